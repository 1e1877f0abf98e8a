"""The report of a run that grows: made anew now and then, never for more than a small part of the time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvtrace.errors import KvtraceError
from kvtrace.live.look import Analysis

if TYPE_CHECKING:
    from kvtrace.report.model import Report

LEAST_S = 3.0
"""Between the end of one building and the begin of the next one, at least."""
SHARE = 10.0
"""And so many times as long as the building took: one core is busy with it a tenth of the time at most."""


def pause(took_s: float) -> float:
    """Seconds to wait after a building that took so long."""
    return max(LEAST_S, SHARE * took_s)


def _build(run_dir: Path) -> Report:
    from kvtrace.report.build import build_report  # the first numbers are there before it

    return build_report(run_dir)


class Analyses:
    """Builds reports of one run, in a thread or while the caller waits."""

    def __init__(
        self,
        run_dir: Path,
        build: Callable[[Path], Report] = _build,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_dir, self._build, self._clock = run_dir, build, clock
        self._thread: threading.Thread | None = None
        self._last: tuple[Report, float, float] | None = None  # report, when its building began, how long
        self._due = clock()
        self._seen: object = None
        self.problem = ""

    def refresh(self, state: object, wait: bool = False) -> None:
        """Build one where it is due and the run is in another state than when the last one began.

        Args:
            state: anything that differs when there is more to read.
            wait: build it here, due or not, and return when it is there.
        """
        if self._thread is not None and self._thread.is_alive():
            if not wait:
                return
            self._thread.join()
        if state == self._seen or (not wait and self._clock() < self._due):
            return
        self._seen = state
        if wait:
            self._make()
        else:
            self._thread = threading.Thread(target=self._make, name="kvtrace-report", daemon=True)
            self._thread.start()

    def _make(self) -> None:
        began = self._clock()
        try:
            report = self._build(self._run_dir)
        except (KvtraceError, OSError) as error:
            self.problem = str(error)
        except Exception as error:  # the numbers that need no report are still right
            self.problem = f"the report could not be made: {type(error).__name__}: {error}"
        else:
            self.problem = ""
            self._last = report, began, self._clock() - began
        self._due = self._clock() + pause(self._clock() - began)

    def latest(self) -> Analysis | None:
        """The last one that could be made; None where there is none yet."""
        if self._last is None:
            return None
        report, began, took = self._last
        return Analysis(report, max(0.0, self._clock() - began), took)
