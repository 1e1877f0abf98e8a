"""A vLLM, traced or not, under requests: started, asked, looked at through /proc, ended whatever happens."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from vllm_env import CACHE
from vllm_server import free_port

from killing.settings import OUTPUT_TOKENS, PROMPTS, flags, kv_transfer, prompts

HERE = Path(__file__).parent
KVTRACE = [sys.executable, "-m", "kvtrace"]
CLIENTS = 3
PATIENCE = 900
"""Seconds after which a condition is given up: nothing is concluded from a time."""
ENDING = 120
"""Seconds after which an untraced command that was cut short counts as one that does not end."""

FRONT, CORE, WORKER, LAUNCHER, OTHER = "front", "core", "worker", "launcher", "other"
_TITLES = (("VLLM::EngineCore", CORE), ("VLLM::Worker", WORKER), ("multiprocessing.resource_tracker", OTHER))


class NotReached(Exception):
    """A condition that a run waits for did not come; the message is one line."""


def until(true: Callable[[], bool], what: str, seconds: float = PATIENCE) -> None:
    """Wait for a condition.

    Raises:
        NotReached: it did not come.
    """
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            raise NotReached(f"waited in vain until {what}")
        time.sleep(0.002)


@dataclass(frozen=True)
class Setup:
    """What is started. ``server``: ``vllm serve`` with ``ranks`` workers; else a script with an engine in
    it, or with ``forks`` engines, one after the other, each in a forked process."""

    name: str
    server: bool
    ranks: int = 1
    forks: int = 0


@dataclass
class Place:
    """The folder of one run, and who looks after what lies in it. ``run``: kvtrace's run directory."""

    folder: Path
    model: Path
    env: dict[str, str]
    run: Path = field(init=False)

    def __post_init__(self) -> None:
        self.run = self.folder / "run"
        self.store = self.folder / "store"
        self.output = self.folder / "output"
        self.folder.mkdir(parents=True)
        self.store.mkdir()


class Engine:
    """The command under way. Its processes are those of its session."""

    def __init__(self, setup: Setup, place: Place, seed: int, traced: bool) -> None:
        self.setup, self.place, self.traced = setup, place, traced
        self.todo = prompts(seed)
        self.answers: dict[int, list[int]] = {}
        """Tokens that the client got of each prompt so far."""
        self.port = free_port()
        self._front = 0
        self._lock = threading.Lock()
        self._clients: list[threading.Thread] = []
        self._open: set[socket.socket] = set()
        self._dropped = False
        prefix = [*KVTRACE, "run", "-o", str(place.run), "--"] if traced else []
        env = place.env | {
            "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE.parents[1])]),  # this clone's kvtrace
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if setup.server else "0",
            # Many engines are started: what they import is compiled once.
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": str(CACHE / "pycache"),
        }
        with place.output.open("w") as output:
            self.process = subprocess.Popen(
                [*prefix, *self._command()], env=env, cwd=place.folder, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def _command(self) -> list[str]:
        model, store = str(self.place.model), self.place.store
        if not self.setup.server:
            todo = self.place.folder / "prompts.json"
            todo.write_text(json.dumps(self.todo))
            forks = [str(self.setup.forks)] if self.setup.forks else []
            return [sys.executable, str(HERE / "offline.py"), model, str(store), str(todo), *forks]
        ranks = ["--tensor-parallel-size", str(self.setup.ranks)] if self.setup.ranks > 1 else []
        return [
            "vllm", "serve", model, "--served-model-name", "tiny",
            "--host", "127.0.0.1", "--port", str(self.port), *flags(), *ranks,
            "--kv-transfer-config", json.dumps(kv_transfer(store)),
        ]  # fmt: skip

    # ---- its processes ----

    def processes(self) -> dict[int, str]:
        """pid -> what it is, of all that live in the command's session."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _session(entry) == self.process.pid:
                found[int(entry.name)] = self._kind(int(entry.name), entry)
        return found

    def _kind(self, pid: int, entry: Path) -> str:
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            return OTHER
        for title, kind in _TITLES:
            if title in line:
                return kind
        if pid == self.process.pid:
            return LAUNCHER if self.traced else FRONT
        is_command = re.search(r"/vllm serve|offline\.py", line) and "kvtrace run" not in line
        if is_command and _parent(entry) == self.process.pid:
            self._front = pid  # it stays the front when its parent, the launcher, is killed
        return FRONT if pid == self._front else OTHER

    def pids(self, kind: str) -> list[int]:
        return sorted(pid for pid, what in self.processes().items() if what == kind)

    def left(self) -> list[str]:
        """What still lives, without processes that are helpers of the interpreter's."""
        return sorted(what for what in self.processes().values() if what != LAUNCHER)

    # ---- its work ----

    def start(self) -> None:
        """Wait until it is ready, then begin to ask."""
        if self.setup.server:
            until(self._ready, "the server is ready")
            self.processes()  # which of them is the front
            self._clients = [threading.Thread(target=self._ask_on, daemon=True) for _ in range(CLIENTS)]
            for client in self._clients:
                client.start()

    def _ready(self) -> bool:
        if self.process.poll() is not None:
            raise NotReached(f"the server ended with {self.process.returncode} while starting: {self.tail()}")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def _ask_on(self) -> None:
        while True:
            with self._lock:
                if not self.todo:
                    return
                index, prompt = self.todo.pop(0)
            try:
                self._ask(index, prompt)
            except (OSError, http.client.HTTPException, ValueError, LookupError):
                return  # it was killed: what came until then counts

    def _ask(self, index: int, prompt: list[int]) -> None:
        body = {
            "model": "tiny", "prompt": prompt, "max_tokens": OUTPUT_TOKENS, "temperature": 0,
            "ignore_eos": True, "stream": True, "return_token_ids": True,
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.connect()
            with self._opened(connection.sock):
                connection.request(
                    "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
                )
                answer = connection.getresponse()
                got: list[int] = []
                while line := answer.readline():
                    if line.startswith(b"data: {"):
                        got += json.loads(line[6:])["choices"][0]["token_ids"] or []
                        self.answers[index] = list(got)
        finally:
            connection.close()

    @contextlib.contextmanager
    def _opened(self, connection: socket.socket) -> Iterator[None]:
        """While a client holds it: :meth:`drop` can end it."""
        with self._lock:
            if self._dropped:
                raise ConnectionAbortedError
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)

    def drop(self) -> None:
        """The clients go away, in the middle of their answers: whoever stops a server has no use for them.

        A server that shuts down waits for its answers, and those of an engine that has ended never come."""
        with self._lock:
            self._dropped = True
            self.todo.clear()
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def said(self, what: str) -> dict[tuple[int, ...], list[int]]:
        """Whole lines of a script that begin with this word: {the first numbers: the others}."""
        lines = self.place.output.read_text(errors="replace").splitlines(keepends=True)
        words = [line.split() for line in lines if line.endswith("\n") and line.startswith(f"{what} ")]
        keys = 2 if what == "answer" else 1
        return {tuple(map(int, one[1 : keys + 1])): [*map(int, one[keys + 1 :])] for one in words}

    def given(self) -> list[tuple[int, list[int]]]:
        """(prompt, tokens that were given out so far), of every engine that answered it."""
        if self.setup.server:
            return list(self.answers.items())
        return [(key[1], tokens) for key, tokens in self.said("answer").items()]

    def calls(self, pid: int = 0) -> int:
        """Calls in the connector's log, of the worker that is furthest behind or of one process."""
        logs = [log.read_bytes().count(b"\nsave ") for log in self.place.store.glob(f"log-{pid or '*'}")]
        busy = [calls for calls in logs if calls]
        return min(busy) if len(busy) >= self.setup.ranks else 0

    def answer_all(self) -> None:
        """Wait until every prompt is answered."""
        if not self.setup.server:
            until(lambda: len(self.given()) >= PROMPTS, "every prompt is answered")
        until(lambda: not any(client.is_alive() for client in self._clients), "every request is answered")

    # ---- its end ----

    def kill(self, pids: list[int], signum: int) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def wait(self, seconds: float = PATIENCE) -> int | None:
        """The exit code of what was started, -N where signal N ended it; None: it has not ended by then."""
        with contextlib.suppress(NotReached):
            until(lambda: self.process.poll() is not None, "the command has ended", seconds)
        self.drop()
        until(lambda: not any(client.is_alive() for client in self._clients), "the clients have gone")
        return self.process.returncode

    def tail(self) -> str:
        return " | ".join(self.place.output.read_text(errors="replace").splitlines()[-5:])[-600:]

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()
        until(self._is_gone, "all is killed")

    def _is_gone(self) -> bool:
        """Kills what lives: the group, then what is left of the session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.kill(list(self.processes()), signal.SIGKILL)
        return self.process.poll() is not None and not self.processes()


def _stat(entry: Path) -> list[str]:
    """The fields of /proc/PID/stat from the state on; [] for a process that has gone."""
    try:
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[:1] in (["Z"], ["X"]) else fields


def _session(entry: Path) -> int:
    fields = _stat(entry)
    return int(fields[3]) if fields else -1


def _parent(entry: Path) -> int:
    fields = _stat(entry)
    return int(fields[1]) if fields else -1
