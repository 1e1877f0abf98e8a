#!/usr/bin/env python3
"""A soak: a traced ``vllm serve`` under clients that come, go and break off, for an hour.

    python scripts/soak.py [--minutes 60] [--out FOLDER] [--page FILE]

Two real servers (tiny model, vLLM's ExampleConnector) listen on the loopback at the same time, one under
`kvtrace run` and one without. Six clients at a time ask each of them one to five prompts, of 40 to 160
tokens, and leave; some read a stream, some break off at its first word, some before any answer. Meanwhile
memory, open descriptors and threads of every process are read. Checked:

- flat: in no process of the traced server is the median of the last third of the run further above that of
  the first than in the same process of the other one, by more than 16 MiB, 2 descriptors or 2 threads.
  (vLLM's worker grows by itself, by more than that in the first minutes.)
- exact: each request that was answered stands in the run once, with its prompt and output; none stands there
  that was not sent; the outcomes of both ledgers sum to their totals, and these to the requests' tokens;
  no record was lost.

Exit codes: 0 flat and exact, 1 not, 2 a server did not start. The last line has the numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from tiny_model import make_tiny_model  # noqa: E402
from vllm_env import CACHE, vllm_env  # noqa: E402
from vllm_server import VllmServer, free_port  # noqa: E402

CLIENTS = 6
PROMPTS = 200
"""Different ones: the first time each is stored, later it is loaded. So the store has an end, too. So many
requests pass before it counts what grows: what is made once has been made by then."""
MOST_MEMORY, MOST_DESCRIPTORS, MOST_THREADS = 16 * 1024, 2, 2
"""KiB, and numbers, by which a process may grow more than untraced."""
_GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(128 << 10), "MALLOC_TRIM_THRESHOLD_": str(128 << 10)}
"""glibc raises both as it goes, and keeps what vLLM freed: by tens of MiB, and never by the same amount."""
_EVERY = 1.0
_START_SECONDS = _WARM_SECONDS = 600
_STOP_SECONDS = 600
SIDES = ("traced", "untraced")
_ANSWERED, _BROKEN_OFF, _NEVER_READ = "answered", "broken off", "left at once"


class Sample(NamedTuple):
    """Of one process at one time. ``memory``: resident, KiB."""

    memory: int
    descriptors: int
    threads: int


class Sent(NamedTuple):
    """A request. ``output``: tokens of the answer, where all of it was read."""

    how: str
    prompt: int
    output: int


class Traffic:
    """The clients, each a thread that lives for a few requests and is followed by another one."""

    def __init__(self, port: int) -> None:
        self.sent: dict[str, Sent] = {}
        self.failed: list[str] = []
        self.clients = 0
        self._port = port
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._prompts = random.Random(1)
        self._lengths = [self._prompts.randint(40, 160) for _ in range(PROMPTS)]
        self._slots = [threading.Thread(target=self._slot, args=(at,)) for at in range(CLIENTS)]

    def start(self) -> None:
        for one in self._slots:
            one.start()

    def stop(self) -> None:
        self._over.set()
        for one in self._slots:
            one.join()

    def _slot(self, seed: int) -> None:
        chance = random.Random(1000 + seed)
        while not self._over.is_set():
            client = threading.Thread(target=self._client, args=(chance,))
            client.start()
            client.join()

    def _client(self, chance: random.Random) -> None:
        with self._lock:
            self.clients += 1
            me = self.clients
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        try:
            for number in range(chance.randint(1, 5)):
                if self._over.is_set():
                    break
                if not self._ask(connection, f"soak-{me}-{number}", chance):
                    break
                self._over.wait(chance.uniform(0, 0.6))
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            with self._lock:
                self.failed.append(f"client {me}: {type(error).__name__}: {error}"[:200])
        finally:
            connection.close()

    def _ask(self, connection: http.client.HTTPConnection, ident: str, chance: random.Random) -> bool:
        """One request; whether the connection can be used for another one."""
        at, turn = chance.randrange(PROMPTS), chance.random()
        length = self._lengths[at]
        breaks_off = turn > 0.8
        body = {
            "model": "tiny", "prompt": [5 + (at * 31 + place * 7) % 500 for place in range(length)],
            "max_tokens": 160 if breaks_off else chance.randint(1, 24), "temperature": 0, "ignore_eos": True,
            "stream": turn > 0.6,
        }  # fmt: skip
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        headers = {"Content-Type": "application/json", "X-Request-Id": ident}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        self._note(ident, Sent(_NEVER_READ, length, 0))  # also where no answer comes in time
        if turn > 0.95:
            return False
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"status {response.status}: {response.read(200)!r}")
        if breaks_off:
            response.readline()
            return self._note(ident, Sent(_BROKEN_OFF, length, 0))
        if not body["stream"]:
            usage = json.loads(response.read())["usage"]
        else:
            lines = [line[6:] for line in response.read().splitlines() if line.startswith(b"data: {")]
            usage = json.loads(lines[-1])["usage"]
        self._note(ident, Sent(_ANSWERED, usage["prompt_tokens"], usage["completion_tokens"]))
        return True

    def _note(self, ident: str, sent: Sent) -> bool:
        with self._lock:
            self.sent[ident] = sent
        return False


# ------------------------------------------------------------------------- the processes


def descendants(root: int) -> list[int]:
    """The process and all that it started, directly or not."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
                children[int(stat.rpartition(")")[2].split()[1])].append(int(entry.name))
    found = [root]
    for pid in found:
        found += children[pid]
    return found


def sample(pid: int) -> Sample:
    """What a process holds now.

    Raises:
        OSError, StopIteration: it is gone.
    """
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    values = {name: rest for name, _, rest in (line.partition(":") for line in lines)}
    return Sample(
        int(values.get("VmRSS", "0").split()[0]), len(os.listdir(f"/proc/{pid}/fd")), int(values["Threads"])
    )


def named(pid: int) -> str:
    """For people, and the same in both servers: ``VLLM::EngineCore``."""
    with contextlib.suppress(OSError):
        line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        words = [Path(os.fsdecode(word)).name for word in line[:4] if word and not word.startswith(b"-")]
        return " ".join(words)[:40]
    return str(pid)


def watched(servers: list[VllmServer], seconds: float) -> list[dict[str, list[Sample]]]:
    """Of each server the samples, in order, of each process that was there all the time.

    Raises:
        RuntimeError: a server ended.
    """
    found: list[dict[int, list[Sample]]] = [defaultdict(list) for _ in servers]
    rounds, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        for server, of in zip(servers, found, strict=True):
            if server.process.poll() is not None:
                raise RuntimeError(f"a server ended under load, exit code {server.process.returncode}")
            for pid in descendants(server.process.pid):
                with contextlib.suppress(OSError, KeyError):
                    of[pid].append(sample(pid))
        rounds += 1
        time.sleep(_EVERY)
    return [by_name({pid: one for pid, one in of.items() if len(one) >= rounds - 1}) for of in found]


def by_name(of: dict[int, list[Sample]]) -> dict[str, list[Sample]]:
    """Those of one name in the order in which they began: the second is ``name #2``."""
    found: dict[str, list[Sample]] = {}
    again: Counter[str] = Counter()
    for pid in sorted(of):
        name = named(pid)
        again[name] += 1
        found[f"{name} #{again[name]}" if again[name] > 1 else name] = of[pid]
    return found


def growth(samples: list[Sample]) -> Sample:
    """By how much the medians of the last third are above those of the first."""
    third = max(1, len(samples) // 3)
    first, last = samples[:third], samples[-third:]
    return Sample(
        *(
            round(statistics.median(of) - statistics.median(before))
            for of, before in zip(zip(*last, strict=True), zip(*first, strict=True), strict=True)
        )
    )


def more(traced: Sample, untraced: Sample | None) -> Sample:
    """By how much a process grew more than the same one of the untraced server, which may have none."""
    return traced if untraced is None else Sample(*(a - b for a, b in zip(traced, untraced, strict=True)))


def not_flat(grown: dict[str, Sample], untraced: dict[str, Sample]) -> list[str]:
    """A line for each process that grew too much."""
    found = {name: more(one, untraced.get(name)) for name, one in grown.items()}
    return [
        f"{name} grew by {one.memory / 1024:.1f} MiB, {one.descriptors} descriptors, {one.threads} threads "
        "more than untraced"
        for name, one in found.items()
        if one.memory > MOST_MEMORY or one.descriptors > MOST_DESCRIPTORS or one.threads > MOST_THREADS
    ]


# ---------------------------------------------------------------------------- the ledger


def not_exact(run: Path, sent: dict[str, Sent]) -> list[str]:
    """A line for each number of the run that is not what was sent."""
    import kvtrace

    trace = kvtrace.load(run)
    rows = trace.requests
    wrong = []
    found: dict[str, list[Any]] = defaultdict(list)
    for row in rows.itertuples():
        found[_ours(str(row.client if isinstance(row.client, str) and row.client else row.id))].append(row)
    for ident in found.keys() - sent.keys():
        wrong.append(f"{ident} stands in the run and was not sent")
    for ident, one in sent.items():
        here = found[ident]
        if len(here) > 1 or (not here and one.how != _NEVER_READ):
            wrong.append(f"{ident} ({one.how}) stands in the run {len(here)} times")
        elif here and here[0].prompt != one.prompt:
            wrong.append(f"{ident}: prompt {here[0].prompt}, sent {one.prompt}")
        elif here and one.how == _ANSWERED and here[0].output != one.output:
            wrong.append(f"{ident}: output {here[0].output}, answered {one.output}")
    pairs = sum(engine["pairs"] for engine in trace.report["run"]["engines"])
    # Who was given up while still waiting was never let in: nothing was computed, and no load was due.
    given_up = (rows["computed"] == 0) & (rows["chunks"] == 0) & (rows["status"] == "FINISHED_ABORTED")
    tokens = {"saves": int(rows["computed"].sum()), "loads": int(rows["prompt"][~given_up].sum())}
    for name in ("saves", "loads"):
        book: Any = trace.report["ledger"][name]  # type: ignore[literal-required]
        outcomes = sum(book["accounts"].values())
        if not outcomes == book["total"] == tokens[name] * pairs:
            wrong.append(
                f"ledger of {name}: outcomes sum to {outcomes}, total {book['total']}, "
                f"requests' tokens {tokens[name]} x {pairs}"
            )
    limits = trace.report["limits"]
    if limits["lost_records"] or limits["damaged"]:
        wrong.append(f"{limits['lost_records']} records lost, {len(limits['damaged'])} spools damaged")
    return wrong


def _ours(ident: str) -> str:
    """``cmpl-soak-12-3-0-1a2b3c4d`` -> ``soak-12-3``: vLLM puts words around the client's id."""
    parts = ident.split("-")
    at = parts.index("soak") if "soak" in parts else None
    return ident if at is None else "-".join(parts[at : at + 3])


# ------------------------------------------------------------------------------- the run


class Result(NamedTuple):
    """Of each process of the traced server the last sample, and the growth; ``untraced``: of the other's."""

    minutes: float
    sent: list[Sent]
    clients: int
    last: dict[str, Sample]
    grown: dict[str, Sample]
    untraced: dict[str, Sample]
    wrong: list[str]

    def line(self) -> str:
        found = [more(one, self.untraced.get(name)) for name, one in self.grown.items()]
        worst = Sample(*(max(column) for column in zip(*found, strict=True)))
        return (
            f"soak: minutes={self.minutes:g} requests={len(self.sent)} clients={self.clients} "
            f"aborted={sum(one.how != _ANSWERED for one in self.sent)} processes={len(self.grown)} "
            f"memory={worst.memory / 1024:+.1f}MiB descriptors={worst.descriptors:+d} "
            f"threads={worst.threads:+d} ledger={'wrong' if self.wrong else 'exact'}"
        )


@contextlib.contextmanager
def served(out: Path, traced: bool) -> Iterator[VllmServer]:
    """A server, which is not ready yet; its store, its log and its run lie in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    port = free_port()
    connector = {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(out / "store")},
    }  # fmt: skip
    command = [
        "vllm", "serve", str(make_tiny_model(CACHE / "tiny-model")), "--served-model-name", "tiny",
        "--enforce-eager", "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "512",
        "--block-size", "32", "--max-num-batched-tokens", "2048",  # this connector knows no chunks
        "--num-gpu-blocks-override", "128",  # all of them are used soon: their pages are no growth
        "--no-enable-prefix-caching", "--kv-transfer-config", json.dumps(connector),
    ]  # fmt: skip
    if traced:
        command = [sys.executable, "-m", "kvtrace", "run", "-o", str(out / "run"), "--", *command]
    env = {**vllm_env(), **_GIVE_BACK, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "WARNING"}
    with (out / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT, cwd=out)
        try:
            yield VllmServer(process, port)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def soak(minutes: float, out: Path) -> Result:
    """Raises RuntimeError: a server did not start, or ended by itself."""
    with ExitStack() as stack:
        servers = [stack.enter_context(served(out / name, name == "traced")) for name in SIDES]
        for server in servers:
            server.wait_until_ready(_START_SECONDS)
        traffic = [Traffic(server.port) for server in servers]
        for one in traffic:
            stack.callback(one.stop)
            one.start()
        until = time.monotonic() + _WARM_SECONDS
        while min(len(one.sent) for one in traffic) < PROMPTS:
            if time.monotonic() > until:
                raise RuntimeError(f"a server was sent fewer than {PROMPTS} requests in {_WARM_SECONDS} s")
            time.sleep(_EVERY)
        samples = watched(servers, 60 * minutes)
    ours, other = traffic
    wrong = [*ours.failed[:5], *other.failed[:5], *not_exact(out / SIDES[0] / "run", ours.sent)]
    grown, untraced = ({name: growth(of) for name, of in side.items()} for side in samples)
    last = {name: of[-1] for name, of in samples[0].items()}
    return Result(minutes, list(ours.sent.values()), ours.clients, last, grown, untraced, wrong)


def page(result: Result) -> str:
    """The processes as Markdown."""
    lines = [
        "# Soak", "",
        f"Made by `python scripts/soak.py --minutes {result.minutes:g}`: a `vllm serve` under clients that "
        "come, go and break off. Each",
        "process at the end, by how much the median of the last third is above that of the first, and the "
        "same of an",
        "untraced server beside it.", "",
        "| process | memory, MiB | grown | untraced | descriptors | grown | threads | grown |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for name, grown in result.grown.items():
        end, other = result.last[name], result.untraced.get(name)
        beside = "" if other is None else f"{other.memory / 1024:+.1f}"
        lines.append(
            f"| {name} | {end.memory / 1024:.1f} | {grown.memory / 1024:+.1f} | {beside} "
            f"| {end.descriptors} | {grown.descriptors:+d} | {end.threads} | {grown.threads:+d} |"
        )
    return "\n".join([*lines, "", f"`{result.line()}`", ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--out", type=Path, help="where the runs, the stores and the logs are kept")
    parser.add_argument("--page", type=Path, help="write the table there, as Markdown")
    given = parser.parse_args()
    CACHE.mkdir(exist_ok=True)
    out = given.out or Path(tempfile.mkdtemp(prefix="soak-", dir=CACHE))
    out = out.resolve()
    try:
        result = soak(given.minutes, out)
    except RuntimeError as error:
        for log in sorted(out.glob("*/server.log")):
            print(log.read_text(encoding="utf-8", errors="replace")[-2000:], file=sys.stderr)
        print(f"soak.py: {error}", file=sys.stderr)
        return 2
    finally:
        if given.out is None:
            shutil.rmtree(out)
    text = page(result)
    if given.page:
        given.page.write_text(text, encoding="utf-8")
    print(text)
    problems = [*not_flat(result.grown, result.untraced), *result.wrong]
    for line in problems[:20]:
        print(f"soak.py: {line}", file=sys.stderr)
    print(result.line())
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
