"""A front that outlives its engine core: once the core is gone nothing can come of the command any more, and
vLLM's own front may wait for good. Where it does, that is said once, with what to end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtrace.launch.processes import RunProcess
from kvtrace.launch.say import say
from kvtrace.trace.format import SPOOL_DIR, SPOOL_SUFFIX
from kvtrace.words import listed

_CORE, _CORE_SPOOL = "EngineCore", "scheduler-"


class FrontWatch:
    """Called at every tick of a run.

    Args:
        after: seconds for which the command may go on without an engine core; 0: as long as it likes.
        processes: every process of the run that was seen.
        noted: takes the line for run.json.
    """

    def __init__(
        self, run_dir: Path, after: float, processes: Callable[[], Sequence[RunProcess]],
        noted: Callable[[str], object], clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._spools, self._after, self._processes = run_dir / SPOOL_DIR, after, processes
        self._noted, self._clock = noted, clock
        self._since: float | None = None
        self._done = not after

    def tick(self) -> None:
        """Raises nothing but OSError."""
        if self._done:
            return
        front, cores = self._front()
        if front is None:
            self._since = None
        elif self._since is None:
            self._since = self._clock()
        elif self._clock() - self._since >= self._after:
            self._tell(front, cores)

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

    def _tell(self, front: RunProcess, cores: list[RunProcess]) -> None:
        self._done = True
        left = [front, *(one for one in self._processes() if one.alive and one.vllm and one is not front)]
        line = (
            f"the engine core ({named(cores)}) has been gone for {self._after:g} s or more, and what goes on "
            f"without it may never end: {named(left)}; to end it: "
            f"kill {' '.join(str(one.pid) for one in left)}"
        )
        self._noted(line)
        say(line)


def named(processes: Sequence[RunProcess]) -> str:
    """``pid 12 (VLLM::EngineCore), pid 13 (...)``, the first of many."""
    return listed((f"pid {one.pid} ({one.name})" for one in processes), 6)
