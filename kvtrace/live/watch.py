"""A run directory, looked at again and again: what grew since is added to running sums."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvtrace.errors import KvtraceError
from kvtrace.live.analysis import Analyses
from kvtrace.live.counts import WINDOW_NS, Counts, EngineSteps, HookTimes
from kvtrace.live.look import ProcessLook, Snapshot, State
from kvtrace.live.stuck import of_looks
from kvtrace.live.tail import Tail
from kvtrace.report.load import REPORT_NAME
from kvtrace.report.running import any_alive
from kvtrace.trace import hooks
from kvtrace.trace.facts import Header
from kvtrace.trace.format import SPOOL_DIR, STEP_MASK, STEP_SHIFT
from kvtrace.trace.options import transfer_in
from kvtrace.trace.reader import SpoolError, spool_paths
from kvtrace.trace.run_file import RunFile, read_run_file
from kvtrace.trace.stuck_file import read_stuck_file

_GRACE_NS = 10_000_000_000


@dataclass
class _Process:
    tail: Tail
    counts: Counts

    @property
    def header(self) -> Header:
        return self.tail.header

    def now(self, wall_ns: int) -> int | None:
        """The process's own clock at a wall time; None where its spool does not place it."""
        header = self.header
        return header.perf_ns + wall_ns - header.wall_ns if header.wall_ns else None


class LiveRun:
    """Follows one run. Reads files only.

    Args:
        wall: the wall clock, ns.
    """

    def __init__(
        self, run_dir: Path, analyses: Analyses | None = None, wall: Callable[[], int] = time.time_ns
    ) -> None:
        self.run_dir = run_dir
        self._analyses = analyses or Analyses(run_dir)
        self._wall = wall
        self._processes: dict[Path, _Process] = {}
        self._problem = ""

    def look(self, wait: bool = False) -> Snapshot:
        """The run now.

        Args:
            wait: with an analysis of all that is there; else the last one, and a newer one begins where due.
        """
        (file, _), (stuck, _) = read_run_file(self.run_dir), read_stuck_file(self.run_dir)
        self._read()
        wall = now = self._wall()
        state = self._state(file)
        grown = sum(one.tail.size for one in self._processes.values())
        self._analyses.refresh((grown, state, self.finished), wait)
        if state != "running":
            now = file.ended_wall_ns or self._last_wall() or now
        # kvtrace run waits for processes, looks at the connector's paths and makes its report
        settled = state != "running" and (self.finished or wall - now > _GRACE_NS)
        processes = list(self._processes.values())
        engines = _engines(processes)
        looks = tuple(_process(one, engines, now) for one in processes)
        return Snapshot(
            run=file.name or self.run_dir.resolve().name,
            directory=str(self.run_dir),
            state=state,
            seconds=_seconds(file, engines, now),
            steps=sum(one.steps for _, one in engines.values()),
            steps_per_s=_rate(engines, now if state == "running" else None),
            arrived=sum(one.counts.arrived for one in processes),
            finished=sum(one.counts.finished for one in processes),
            preempted=sum(one.counts.preempted for one in processes),
            records=sum(one.counts.records for one in processes),
            spool_bytes=sum(one.tail.size for one in processes),
            processes=looks,
            open_hooks=of_looks(stuck, looks, wall) if state == "running" else (),
            hooks=_hooks(one.counts for one in processes),
            settled=settled,
            analysis=self._analyses.latest(),
            problem=self._problem or self._analyses.problem,
            vllm=next((one.header.vllm for one in processes if one.header.vllm), ""),
            connector=str((transfer_in(file.command) or {}).get("kv_connector") or ""),
        )

    @property
    def finished(self) -> bool:
        """Whether the run made its own report: nothing of it changes any more."""
        return (self.run_dir / REPORT_NAME).is_file()

    def _read(self) -> None:
        self._problem = "" if self._processes else "no process has recorded anything yet"
        for path in spool_paths(self.run_dir):
            try:
                if path not in self._processes:
                    self._processes[path] = _Process(Tail(path), Counts())
                one = self._processes[path]
                for table in one.tail.grown():
                    one.counts.add(table)
            except SpoolError as error:
                self._problem = str(error)
            else:
                self._problem = ""

    def _state(self, file: RunFile) -> State:
        if file.ended_wall_ns is not None:
            return "ended"
        recording = [one.header for one in self._processes.values() if not one.counts.stopped]
        return "running" if any_alive(recording) or not self._processes else "lost"

    def _last_wall(self) -> int | None:
        """Wall time of the last record of all."""
        placed = [one for one in self._processes.values() if one.header.wall_ns and one.counts.last_t]
        return max(
            (one.header.wall_ns + one.counts.last_t - one.header.perf_ns for one in placed), default=None
        )


_Engines = Mapping[int, tuple[_Process, EngineSteps]]


def _engines(processes: Iterable[_Process]) -> _Engines:
    """Engine tag -> the process of its scheduler, and its steps."""
    return {tag: (one, steps) for one in processes for tag, steps in one.counts.engines.items()}


def _seconds(file: RunFile, engines: _Engines, now: int) -> float | None:
    if file.started_wall_ns is not None:
        return max(0.0, (now - file.started_wall_ns) / 1e9)
    spans = [steps.last_t - steps.first_t for _, steps in engines.values()]
    return max(spans) / 1e9 if spans else None


def _rate(engines: _Engines, wall_ns: int | None) -> float | None:
    """Steps per second of all engines; `wall_ns` None: over the whole run."""
    rates = []
    for process, engine in engines.values():
        now = None if wall_ns is None else process.now(wall_ns)
        if now is None:
            span, steps = engine.last_t - engine.first_t, engine.steps - 1
        else:
            span = min(WINDOW_NS, now - engine.first_t)
            steps = int((engine.recent > now - WINDOW_NS).sum())
        if span > 0:
            rates.append(steps * 1e9 / span)
    return sum(rates) if rates else None


def _process(one: _Process, engines: _Engines, wall_ns: int) -> ProcessLook:
    now, counts = one.now(wall_ns), one.counts
    waiting = sorted((t, step) for tag, steps in _waiting(one, engines).items() for step, t in steps.items())
    open_s = None
    if waiting:
        scheduler = engines[waiting[0][1] >> STEP_SHIFT][0].now(wall_ns)
        open_s = None if scheduler is None else max(0.0, (scheduler - waiting[0][0]) / 1e9)
    return ProcessLook(
        name=one.header.process or one.tail.path.stem,
        pid=one.header.pid,
        silent_s=None if now is None or not counts.last_t else max(0.0, (now - counts.last_t) / 1e9),
        stopped=counts.stopped,
        open_steps=len(waiting),
        open_step=waiting[0][1] & STEP_MASK if waiting else None,
        open_s=open_s,
    )


def _waiting(one: _Process, engines: _Engines) -> dict[int, dict[int, int]]:
    """Engine tag -> the steps that this worker has not ended, with the times when they were scheduled."""
    ended = dict(one.counts.executed)
    if one.header.role == "worker" and not ended and len(engines) == 1:
        ended = dict.fromkeys(engines, 0)  # it is still in its first step
    return {
        tag: {step: t for step, t in engines[tag][1].open.items() if step > last}
        for tag, last in ended.items()
        if tag in engines
    }


def _hooks(counts: Iterable[Counts]) -> dict[str, HookTimes]:
    found: dict[int, HookTimes] = {}
    for one in counts:
        for code, times in one.hooks.items():
            found.setdefault(code, HookTimes()).merge(times)
    return {hooks.name_of(code): found[code] for code in sorted(found) if hooks.name_of(code)}


# ------------------------------------------------------------------------------ which run

REPORTS = "reports"


def find_run(path: str | None) -> Path:
    """The run directory at `path`; without one the run of ``reports/`` that began last.

    Raises:
        KvtraceError: there is none.
    """
    if path is not None:
        folder = Path(path)
        folder = folder.parent if folder.is_file() and folder.name == REPORT_NAME else folder
        if not folder.is_dir():
            raise KvtraceError(
                "no such run directory", ascii(str(path))[1:-1], "give a run directory of kvtrace run"
            )
        if not (folder / SPOOL_DIR).is_dir():
            raise KvtraceError("no spools in this directory", folder, "give a run directory of kvtrace run")
        return folder
    runs = [one.parent for one in Path(REPORTS).glob(f"*/{SPOOL_DIR}") if one.is_dir()]
    if not runs:
        raise KvtraceError(f"no run in {REPORTS}/", "name a run directory of kvtrace run")
    return max(runs, key=lambda run: (read_run_file(run)[0].started_wall_ns or 0, run.name))
