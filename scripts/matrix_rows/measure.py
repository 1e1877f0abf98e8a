"""Runs rows: each healthy and with a planted fault, untraced and traced, and keeps what came of it.

Below the folder of a call: ``ROW/KIND-untraced`` and ``ROW/KIND-traced`` (KIND: healthy, planted), each with
``spec.json``, ``outcome.json``, ``store``, ``log`` and, where traced, ``trace``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import drive
from vllm_env import CACHE, vllm_env

from matrix_rows import vision
from matrix_rows.row import Row

HERE = Path(__file__).resolve().parent
KINDS = ("healthy", "planted")
LIMIT_SECONDS = 560

ERROR = re.compile(r"(?:^|[\s:])((?:[a-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt): \S.*)$")
OF_OTHERS = ("Engine core initialization failed", "the server ended while starting", "ended with exit code",
             "EngineDeadError", "ChildFailedError")  # fmt: skip
"""What is said where the cause was in another process, which said it before."""


@dataclass(frozen=True)
class Run:
    """One of the four runs of a row."""

    row: Row
    kind: str
    traced: bool
    out: Path

    @property
    def name(self) -> str:
        return f"{self.row.name}-{self.kind}"

    @property
    def folder(self) -> Path:
        return self.out / self.row.name / f"{self.kind}-{'traced' if self.traced else 'untraced'}"

    @property
    def trace(self) -> Path:
        return self.folder / "trace"

    def prepare(self) -> None:
        """Its folder, new, with the spec in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "store").mkdir(parents=True)
        store, weights = str(self.folder / "store"), str(model(self.row.model))
        spec = {
            "engines": self.row.engine_args(self.kind, weights, store),
            "acts": self.row.acts_of(weights),
            "store": store,
            "outcome": str(self.folder / "outcome.json"),
        }
        (self.folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")

    def outcome(self) -> dict[str, Any]:
        """What came of it; ``error`` is "" where it ran through."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "outcome.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            found = {"answers": [], "rows": 0, "error": "the process ended without an outcome"}
        if found["error"]:
            found["error"] = root_error(self._log(), found["error"])
        return found

    def states(self) -> int:
        """States of layers in its store: of each a file of its own."""
        return sum(1 for _ in (self.folder / "store").rglob("state.safetensors"))

    def _log(self) -> str:
        try:
            return (self.folder / "log").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def command(self) -> list[str]:
        """How it is started where it does not share a process."""
        spec = str(self.folder / "spec.json")
        kvtrace = [sys.executable, "-m", "kvtrace", "run", "-o", str(self.trace), "--name", self.name, "--"]
        before = kvtrace if self.traced else []
        if self.row.how == "serve":
            return [sys.executable, "-m", "matrix_rows.serve", spec, *before]
        if self.row.how == "stream":
            return [*before, sys.executable, "-m", "matrix_rows.stream", spec]
        if self.row.how == "torchrun":
            ranks = str(self.row.engine.get("tensor_parallel_size", 1))
            starter = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", ranks]
            return [*before, *starter, "-m", "matrix_rows.play", spec]
        return [*before, sys.executable, "-m", "matrix_rows.play", spec]

    def environment(self) -> dict[str, str]:
        env = {**environment(), **self.row.env}
        if self.row.how in ("one", "torchrun"):
            env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        if self.row.images:
            env["PYTHONPATH"] += os.pathsep + str(vision.FOLDER)
        return env

    def start(self) -> None:
        """Runs it, in processes of its own; where what it needs cannot be had, its outcome says why."""
        self.prepare()
        if self.row.images and (refused := vision.fetch()):
            outcome = json.dumps({"answers": [], "rows": 0, "error": refused})
            (self.folder / "outcome.json").write_text(outcome, encoding="utf-8")
            return
        with (self.folder / "log").open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                self.command(), env=self.environment(), stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            try:
                process.wait(timeout=LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                log.write(f"\nTimeoutError: not ended after {LIMIT_SECONDS} s\n")
            finally:
                _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Whatever is left of what this run started."""
    try:
        os.killpg(process.pid, 9)
    except ProcessLookupError:
        pass
    process.wait()


def environment() -> dict[str, str]:
    env = vllm_env()
    parts = [HERE.parent, *drive.MODULE_DIRS, HERE.parents[1] / "scenarios", HERE.parents[1]]
    env["PYTHONPATH"] = os.pathsep.join([*map(str, parts), env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    env["OMP_NUM_THREADS"] = "1"
    return env


def model(name: str) -> Path:
    """The folder of a model of weights.py."""
    return Path(CACHE / ("tiny-model" if name == "tiny" else f"models/{name}"))


def make_model(name: str) -> None:
    """In a process of its own: torch and transformers stay out of this one."""
    model(name).parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "matrix_rows.weights", name, str(model(name))]
    subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL)


def root_error(log: str, said: str) -> str:
    """The last error that a process of the run printed, no echo of another's; else what was said."""
    lines = [*(line.rstrip() for line in log.splitlines()), ""]
    found = []
    for at, line in enumerate(lines):
        if match := ERROR.search(line):
            # pydantic says in the next line what was not valid
            more = lines[at + 1].partition(" [type=")[0] if "validation error for" in line else ""
            found.append(match[1] + (f": {more.strip()}" if more else ""))
    own = [line for line in found if not any(words in line for words in OF_OTHERS)]
    return (own or [said])[-1][:300]


def run_together(runs: list[Run]) -> None:
    """Runs that may share a process, all traced or none. After one that ends the process the others go on in
    another one."""
    left = list(runs)
    while left:
        for one in left:
            one.prepare()
        jobs = left[0].out / "jobs.json"
        jobs.write_text(json.dumps([_job(one) for one in left]), encoding="utf-8")
        command = [sys.executable, "-m", "matrix_rows.several", str(jobs)]
        shared = left[0].out / "log"
        with shared.open("w", encoding="utf-8") as log:
            subprocess.run(command, env=environment(), stdout=log, stderr=subprocess.STDOUT, check=False)
        done = [one for one in left if (one.folder / "outcome.json").exists()]
        dead = left[len(done) :][:1]
        for one in dead:
            shutil.copy(shared, one.folder / "log")
        left = left[len(done) + len(dead) :]


def _job(one: Run) -> dict[str, Any]:
    trace = str(one.trace) if one.traced else ""
    return {"spec": str(one.folder / "spec.json"), "trace": trace, "name": one.name, "env": one.row.env}


def run_all(rows: Iterable[Row], out: Path, say: Any, kinds: Sequence[str] = KINDS) -> Iterable[Row]:
    """Runs all rows; yields each when its runs are done. What does not run untraced is not run traced."""
    rows = list(rows)
    for name in sorted({row.model for row in rows}):
        make_model(name)
    shared = [row for row in rows if row.shares_process]
    if shared:
        run_together([Run(row, kind, False, out) for row in shared for kind in kinds])
        runs = [Run(row, kind, True, out) for row in shared for kind in kinds]
        run_together([one for one in runs if _ran_untraced(one)])
        yield from shared
    for row in rows:
        if not row.shares_process:
            for kind in kinds:
                for traced in (False, True):
                    one = Run(row, kind, traced, out)
                    if traced and not _ran_untraced(one):
                        break
                    one.start()
                    say(f"{row.name}: {one.folder.name}: {one.outcome()['error'] or 'ran'}")
                if not _ran_untraced(one):
                    break
            yield row


def is_whole(row: Row, out: Path) -> bool:
    """Whether all runs of a row are there, or its healthy one did not run untraced."""
    runs = [Run(row, kind, traced, out) for kind in KINDS for traced in (False, True)]
    there = [(one.folder / "outcome.json").exists() for one in runs]
    return all(there) or (there[0] and not _ran_untraced(runs[0]))


def _ran_untraced(one: Run) -> bool:
    return not Run(one.row, one.kind, False, one.out).outcome()["error"]
