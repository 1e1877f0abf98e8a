"""One look at a run: the numbers that the screen and the metrics show. Frozen values, no files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvtrace.live.counts import HookTimes

if TYPE_CHECKING:
    from kvtrace.report.model import Report

State = Literal["running", "ended", "lost"]
"""``lost``: no process of it is there, and its end is not recorded; or it runs on another host."""


@dataclass(frozen=True)
class ProcessLook:
    """One process that records. Times in seconds; None where they are not known."""

    name: str
    pid: int
    silent_s: float | None
    """Since the last record. A hook is recorded when it has returned, and written at the end of its step: one
    that hangs shows as silence while a step is open, and as an OpenHook where kvtrace run looked."""
    stopped: bool
    open_steps: int = 0
    """Steps that were scheduled and that this worker has not ended."""
    open_step: int | None = None
    """The oldest of them."""
    open_s: float | None = None
    """How long ago that one was scheduled."""


@dataclass(frozen=True)
class OpenHook:
    """A hook in which a process stood at both looks of py-spy, and that has recorded nothing since.

    ``what``: the hook's name, or ``step`` outside of all hooks. ``call``: the innermost call in it.
    ``least_s``: open for so long at least; ``most_s``: since the last record, so at most."""

    process: str
    pid: int
    what: str
    call: str
    least_s: float
    most_s: float


@dataclass(frozen=True)
class Analysis:
    """A report of the run so far. ``made_s``: how long ago it was made; ``took_s``: how long that took."""

    report: Report
    made_s: float
    took_s: float


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment. Counts are those of all processes so far."""

    run: str
    directory: str
    state: State
    seconds: float | None
    steps: int = 0
    """``schedule()`` calls that gave out tokens."""
    steps_per_s: float | None = None
    """Over the last ten seconds; of a run that has ended over all of it. None: not known."""
    arrived: int = 0
    finished: int = 0
    preempted: int = 0
    records: int = 0
    spool_bytes: int = 0
    processes: tuple[ProcessLook, ...] = ()
    open_hooks: tuple[OpenHook, ...] = ()
    """The longest first."""
    hooks: Mapping[str, HookTimes] = field(default_factory=dict)
    """By name, in the order in which vLLM calls them."""
    settled: bool = False
    """It has ended, and nothing of it changes any more."""
    analysis: Analysis | None = None
    problem: str = ""
    """Why there is no newer analysis, or no spool; one line."""

    vllm: str = ""
    connector: str = ""
    """As the processes and the command say, before any analysis; "" where they do not."""
    notice: str = ""
    """What to tell whoever looks, before all else; one line."""

    @property
    def unfinished(self) -> int:
        """Requests that arrived and did not finish."""
        return max(0, self.arrived - self.finished)
