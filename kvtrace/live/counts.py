"""One process's records as running sums: memory does not grow with the run."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvtrace.ledger.steps import real_step, spent
from kvtrace.trace import rows
from kvtrace.trace.blocks import Records
from kvtrace.trace.format import DETAIL_IS_OP, STEP_SHIFT, Flag, Kind

Array = NDArray[np.int64]

EDGES_S = tuple(
    float(f"{figure}e{power}") for power in range(-6, 2) for figure in (1, 2.5, 5)
)  # 1 µs to 50 s
"""Upper edges of the buckets of hook times, seconds."""
_EDGES_NS = np.array([round(edge * 1e9) for edge in EDGES_S], dtype=np.int64)
WINDOW_NS = 10_000_000_000
"""Steps per second are those of so long a time."""
_MOST_RECENT = 1 << 16
_MOST_OPEN = 1 << 12
# Kinds that are written as they happen, and the column of their (last) time.
_TIMES = (
    (Kind.HOOK, 2), (Kind.OP, 2), (Kind.STEP, 2), (Kind.EXEC, 2), (Kind.REQUEST, 1), (Kind.FINISH, 1),
    (Kind.CHUNK, 1), (Kind.LOOKUP, 2), (Kind.ALLOC, 2), (Kind.DONE, 1), (Kind.TRAILER, 1),
)  # fmt: skip


@dataclass
class HookTimes:
    """Calls of one hook. ``buckets``: calls per bucket, of EDGES_S and one above; not cumulative."""

    calls: int = 0
    total_ns: int = 0
    longest_ns: int = 0
    raised: int = 0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(EDGES_S) + 1))

    def merge(self, other: HookTimes) -> None:
        self.calls += other.calls
        self.total_ns += other.total_ns
        self.longest_ns = max(self.longest_ns, other.longest_ns)
        self.raised += other.raised
        self.buckets = [a + b for a, b in zip(self.buckets, other.buckets, strict=True)]


@dataclass
class EngineSteps:
    """``schedule()`` calls of one engine that gave out tokens. Times: host clock, ns."""

    steps: int = 0
    first_t: int = 0
    last_t: int = 0
    recent: Array = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Ends of those of the last WINDOW_NS."""
    open: dict[int, int] = field(default_factory=dict)
    """Step -> its end in the scheduler, of the newest ones; who executes drops those that are done."""


class Counts:
    """What one process recorded so far."""

    def __init__(self) -> None:
        self.records = 0
        self.last_t = 0
        self.stopped = False
        """A trailer says that this process records no more."""
        self.arrived = self.finished = self.preempted = 0
        self.engines: dict[int, EngineSteps] = {}
        self.executed: dict[int, int] = {}
        """Engine tag -> the greatest step that this worker ended."""
        self.hooks: dict[int, HookTimes] = {}
        """By the hook's code."""

    def add(self, table: Records) -> None:
        """Records of any kinds, shape (n, 8)."""
        kinds = rows.kind(table[:, 0])
        texts = (kinds == Kind.NAME) | (kinds == Kind.FACT) | (kinds == Kind.BYTES)
        self.records += int((~texts).sum())
        for kind, column in _TIMES:
            times = table[kinds == kind, column]
            if len(times):
                self.last_t = max(self.last_t, int(times.max()))
        self.stopped |= bool((kinds == Kind.TRAILER).any())
        self.arrived += int((kinds == Kind.REQUEST).sum())
        self.finished += int((kinds == Kind.FINISH).sum())
        self.preempted += int((kinds == Kind.PREEMPT).sum())
        self._schedules(table[kinds == Kind.STEP])
        self._executions(table[kinds == Kind.EXEC])
        self._hook_calls(table[kinds == Kind.HOOK])
        self._quiet_calls(table[kinds == Kind.QUIET])

    def _schedules(self, table: Records) -> None:
        call = rows.columns(rows.Step, table)
        real = real_step(call.step) & (call.tokens > 0)
        steps, ends = call.step[real], call.t1[real]
        tags = steps >> STEP_SHIFT
        for tag in np.unique(tags).tolist():
            here = tags == tag
            t = ends[here]
            engine = self.engines.setdefault(tag, EngineSteps(first_t=int(t[0])))
            engine.steps += len(t)
            engine.last_t = max(engine.last_t, int(t.max()))
            recent = np.concatenate([engine.recent, t])
            engine.recent = recent[recent > engine.last_t - WINDOW_NS][-_MOST_RECENT:]
            engine.open.update(zip(steps[here][-_MOST_OPEN:].tolist(), t[-_MOST_OPEN:].tolist(), strict=True))
            for step in sorted(engine.open)[:-_MOST_OPEN]:
                del engine.open[step]

    def _executions(self, table: Records) -> None:
        ran = rows.columns(rows.Execution, table)
        steps = ran.step[real_step(ran.step) & ((rows.flags(ran.head) & Flag.DUMMY) == 0)]
        tags = steps >> STEP_SHIFT
        for tag in np.unique(tags).tolist():
            self.executed[tag] = max(self.executed.get(tag, 0), int(steps[tags == tag].max()))

    def _hook_calls(self, table: Records) -> None:
        call = rows.columns(rows.HookCall, table)
        codes = rows.code(call.head)
        spans = spent(call.t0, call.t1)
        raised = (rows.flags(call.head) & Flag.RAISED) != 0
        for code in np.unique(codes).tolist():
            here = codes == code
            own = spans[here]
            found = np.bincount(np.searchsorted(_EDGES_NS, own), minlength=len(EDGES_S) + 1)
            times = HookTimes(
                len(own),
                int(own.sum(dtype=np.float64)),
                int(own.max()),
                int(raised[here].sum()),
                found.tolist(),
            )
            self.hooks.setdefault(code, HookTimes()).merge(times)

    def _quiet_calls(self, table: Records) -> None:
        """Past the size limit of a spool calls are sums: each stands in the bucket of their mean."""
        table = table[(rows.detail(table[:, 0]) & DETAIL_IS_OP) == 0]
        calls = rows.columns(rows.QuietCalls, table)
        columns = (rows.code(calls.head), calls.count, calls.total_ns, calls.most_ns)
        for code, count, total, most in zip(*(column.tolist() for column in columns), strict=True):
            if count > 0 and total >= 0:
                times = HookTimes(count, total, max(most, 0))
                times.buckets[bisect_left(EDGES_S, total / count / 1e9)] += count
                self.hooks.setdefault(code, HookTimes()).merge(times)
