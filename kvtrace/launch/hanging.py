"""A front that outlives its engine core: once the core is gone nothing can come of the command any more, and
vLLM's own front may wait for good. Where it does, that is said once, with where it stands and what to end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtrace.launch.processes import RunProcess
from kvtrace.launch.say import say
from kvtrace.launch.spy import Spy, SpyError
from kvtrace.trace.format import SPOOL_DIR, SPOOL_SUFFIX
from kvtrace.trace.stuck_file import Thread

_CORE, _CORE_SPOOL = "EngineCore", "scheduler-"
_MOST_FRAMES = 6


class FrontWatch:
    """Called at every tick of a run.

    Args:
        after: seconds for which the command may go on without an engine core; 0: as long as it likes.
        processes: every process of the run that was seen.
        noted: takes the line for run.json.
        look: starts a look at a pid, with native frames or without.
    """

    def __init__(
        self, run_dir: Path, after: float, processes: Callable[[], Sequence[RunProcess]],
        noted: Callable[[str], object], look: Callable[[int, bool], Spy] = Spy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._spools, self._after, self._processes = run_dir / SPOOL_DIR, after, processes
        self._noted, self._look, self._clock = noted, look, clock
        self._since: float | None = None
        self._spy: Spy | None = None
        self._done = not after

    def tick(self) -> None:
        """Raises nothing but OSError."""
        if self._done:
            return
        front, cores = self._front()
        if front is None:
            self._since = None
            self.stop()
        elif self._since is None:
            self._since = self._clock()
        elif self._clock() - self._since >= self._after:
            self._see(front, cores)

    def stop(self) -> None:
        """No look outlives the run."""
        if self._spy is not None:
            self._spy.stop()
            self._spy = None

    def _front(self) -> tuple[RunProcess | None, list[RunProcess]]:
        """The server's first process where every engine core that it had is gone, and these. A script may
        have ended its engine itself: of one nothing is said."""
        seen = self._processes()
        recorded = self._recorded()
        cores = [one for one in seen if _CORE in one.name or one.pid in recorded]
        if not cores or any(one.alive for one in cores):
            return None, cores
        fronts = (one for one in seen if one.alive and one.vllm and "Worker" not in one.name)
        return next(fronts, None), cores

    def _recorded(self) -> set[int]:
        """Processes with a scheduler of their own, by the names of their spools."""
        names = (name for name in os.listdir(self._spools) if name.startswith(_CORE_SPOOL))
        parts = (name.removesuffix(SPOOL_SUFFIX).split("-") for name in names)
        return {int(part[-2]) for part in parts if len(part) > 2 and part[-2].isdecimal()}

    def _see(self, front: RunProcess, cores: list[RunProcess]) -> None:
        try:
            if self._spy is None:
                self._spy = self._look(front.pid, False)
            threads = self._spy.threads()
            if threads is None:
                return
            where = _stands(threads)
        except SpyError as error:
            where = f"{_in_kernel(front.pid)} ({error})"
        self._spy, self._done = None, True
        left = [one for one in self._processes() if one.alive and one.vllm and one is not front]
        others = f", and so {'do' if len(left) > 1 else 'does'} {named(left)}" if left else ""
        line = (
            f"the engine core ({named(cores)}) has been gone for {self._after:g} s or more, and "
            f"{named([front])} goes on{others}: it stands in {where}; where it does not end, end it: "
            f"kill {' '.join(str(one.pid) for one in (front, *left))}"
        )
        self._noted(line)
        say(line)


def _in_kernel(pid: int, proc: Path = Path("/proc")) -> str:
    """What the kernel tells of a process: whether it sleeps, and in which call."""
    try:
        state = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        call = (proc / str(pid) / "wchan").read_text(errors="replace").strip()
    except (OSError, IndexError):
        return "a place that is not known"
    doing = {"R": "running", "S": "asleep", "D": "asleep for a device", "T": "stopped"}.get(state, state)
    return f"the kernel, {doing}" + (f" in {call}" if call not in ("", "0") else "")


def named(processes: Sequence[RunProcess]) -> str:
    """``pid 12 (VLLM::EngineCore), pid 13 (...)``, the first of many."""
    shown = ", ".join(f"pid {one.pid} ({one.name})" for one in processes[:_MOST_FRAMES])
    more = len(processes) - _MOST_FRAMES
    return shown + (f" and {more} more" if more > 0 else "")


def _stands(threads: Sequence[Thread]) -> str:
    """The main thread's calls, the innermost first."""
    main = next((one for one in threads if one.name == "MainThread"), threads[0] if threads else None)
    frames = main.frames[:_MOST_FRAMES] if main is not None else ()
    calls = (f"{one.function} ({os.path.basename(one.file)}:{one.line})" for one in frames)
    return " < ".join(calls) or "no Python code"
