"""The user's own server: started by verify, traced, asked over HTTP, stopped. No other server is touched."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvtrace.trace.config import new_salt
from kvtrace.verify import child
from kvtrace.verify.answers import VerifyError
from kvtrace.verify.command import address
from kvtrace.verify.engine import Reply, RequestToMake
from kvtrace.verify.evidence import Evidence, read
from kvtrace.verify.http import Client
from kvtrace.verify.usage import usage
from kvtrace.words import clean

_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.2
_LONGEST_PAUSE = 2.0
_MOST_LOG = 1 << 20
_ERROR = re.compile(r"[\w.]*(?:Error|Exception)(?:: .+|$)")
_HEAD = re.compile(r"^\([^)]*\)")
"""Of a line of vLLM's: the process."""
_ASIDE = re.compile(r"\b(?:WARNING|INFO|DEBUG)\b|EngineDead")
"""Lines that name an error and are none, or only its consequence."""
_NUDGE = 15
"""Tokens of a request that makes the engine step, so that it hears of what has ended: too few for a block.
Not fewer: where the CPU has AMX, a first prompt of 3 tokens ends vLLM's worker (SIGILL, 0.32.0)."""


class Server:
    """A server and what it writes.

    Args:
        command: what starts it, traced or not.
        served: the user's command in it: where it listens is read from this.
        log: gets its output.
        patience: seconds that it may take to start.
    """

    def __init__(self, command: Sequence[str], served: Sequence[str], log: Path, patience: float) -> None:
        self._command, self._log, self._patience = list(command), log, patience
        self._address = address(served)
        self._client = Client(self._address)
        self._process: subprocess.Popen[bytes] | None = None
        self._nudges = 0
        self._mark = 0

    def start(self, extra: Mapping[str, str] | None = None) -> None:
        """Raises VerifyError: its port is taken, or it was not ready in time; with its own last words."""
        if self._address.taken:
            where = f"{self._address.host}:{self._address.port}"
            raise VerifyError(
                f"something listens on {where} already",
                "verify starts a server of its own and touches no other: give another --port",
            )
        environ = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", **(extra or {})}
        try:
            with open(self._log, "ab") as log:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                    env=environ, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise VerifyError(f"cannot start {self._command[0]}", error.strerror or str(error)) from error
        deadline = time.monotonic() + self._patience
        while not self._client.healthy:
            code = self._process.poll()
            if code is not None:
                raise VerifyError(f"the server ended with exit code {code} while starting", self.last_words())
            if time.monotonic() > deadline:
                self.stop()
                raise VerifyError(
                    f"the server was not ready after {self._patience:.0f} s",
                    self.last_words(),
                    "give it longer with --start-timeout",
                )
            time.sleep(_POLL_SECONDS)

    @property
    def adapters(self) -> int:
        return len(self._client.models) - 1

    def ask(self, requests: Sequence[RequestToMake], patience: float) -> list[Reply]:
        with contextlib.suppress(OSError):
            self._mark = self._log.stat().st_size
        return self._client.ask(requests, patience)

    def reset(self, patience: float) -> bool | None:
        deadline = time.monotonic() + patience
        pause = _POLL_SECONDS
        while True:
            status, came_about = self._client.reset()
            if status == 404:
                raise VerifyError(
                    "this server has no POST /reset_prefix_cache",
                    "verify needs a vLLM whose developer mode (VLLM_SERVER_DEV_MODE=1) has it",
                )
            if came_about or (came_about is None and status == 200):
                return came_about
            if self.gone() or time.monotonic() > deadline:
                return False
            self.nudge()
            time.sleep(pause)
            # few: a connector that gives no blocks back keeps those of each nudge too
            pause = min(2 * pause, _LONGEST_PAUSE)

    def nudge(self) -> None:
        """Have the engine make a few steps."""
        self._nudges += 1
        self.ask([RequestToMake(f"kvnudge-{self._nudges}", [100 + self._nudges % 300] * _NUDGE, 2)], 20.0)

    def gone(self) -> str:
        code = self._process.poll() if self._process is not None else None
        if code is None and self._client.healthy:
            return ""
        ended = f"the server ended with exit code {code}" if code is not None else "the server is not healthy"
        return f"{ended}: {self.last_words()}"

    @property
    def stopped(self) -> bool:
        return self._process is None or self._process.poll() is not None

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else -1

    def stop(self) -> None:
        """Ask it to stop, make it where it does not. Never raises."""
        process = self._process
        if process is None:
            return
        # Twice: vLLM loses a first SIGTERM that comes while it starts its engine core.
        for _ in range(2):
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._process = None
        deadline = time.monotonic() + _STOP_SECONDS
        while self._address.taken and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def last_words(self) -> str:
        """The first error that it told of since the last request, else its last lines."""
        try:
            with open(self._log, "rb") as file:
                file.seek(max(self._mark, os.fstat(file.fileno()).st_size - _MOST_LOG))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return ""
        for number, line in enumerate(lines):
            found = _ERROR.search(line)
            if found and not _ASIDE.search(line):
                # pydantic says on the next line what it is about
                more = [_HEAD.sub("", other).strip() for other in lines[number + 1 : number + 2]]
                return clean(" ".join([found[0], *more]).strip(), 400)
        return " | ".join(clean(line.strip(), 200) for line in lines[-3:])


class TracedServer:
    """The user's server, traced, as an engine; each start of it has a run directory of its own, and all of
    them are read as one. Those with the ``other`` command, which has another model, by themselves: the same
    tokens compute to other KV there."""

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        directory: Path,
        patience: float,
        other: Sequence[str] = (),
    ) -> None:
        self._command, self._environ, self._other = command, environ, other
        self._directory, self._patience = directory, patience
        self.runs: list[Path] = []
        self._runs_of_other: list[Path] = []
        self.salt = new_salt()
        self._server: Server | None = None

    def start(self, other: bool = False) -> None:
        """Raises VerifyError."""
        served, runs = (self._other, self._runs_of_other) if other else (self._command, self.runs)
        run = self._directory / f"{'other' if other else 'run'}-{len(runs) + 1}"
        command = child.words(run, served)
        server = Server(command, served, self._directory / "server.log", self._patience)
        self._server = server
        runs.append(run)
        server.start({**self._environ, child.SALT: self.salt.hex()})

    @property
    def adapters(self) -> int:
        return self._running.adapters

    def ask(self, requests: Sequence[RequestToMake], patience: float) -> list[Reply]:
        return self._running.ask(requests, patience)

    def reset(self, patience: float) -> bool | None:
        return self._running.reset(patience)

    @property
    def other_model(self) -> bool:
        return bool(self._other)

    def restart(self, other: bool = False) -> None:
        self.stop()
        self.start(other)

    def gone(self) -> str:
        return self._running.gone()

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()

    def look(self) -> Evidence:
        """What its spools say now; a step's last records come with the next step."""
        self.nudge()
        found = read(self.runs)
        of_other = read(self._runs_of_other).seen if self._runs_of_other else {}
        return replace(found, seen={**found.seen, **of_other})

    def nudge(self) -> None:
        if self._server is not None and not self._server.stopped:
            self._server.nudge()

    def usage(self) -> Mapping[str, int]:
        """Of all processes of the server."""
        return usage(self._running.pid)

    @property
    def _running(self) -> Server:
        assert self._server is not None
        return self._server
