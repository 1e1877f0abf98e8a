"""Device times: host and device durations of the same calls, and which calls waited for the device.

Streamed: histograms and counts, whatever the number of timed calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvtrace.ledger.timing import Histograms
from kvtrace.trace.format import HOOKS, OPS, QUIET_IS_OP, STEP_SHIFT, Flag
from kvtrace.trace.reader import Records, code, detail, flags

BEHIND_NS = 100_000
"""Device work that a call finds outstanding, from which on its return says whether it waited."""
_TAIL = 1.5
"""A call that took up to this times the outstanding work spent its time waiting, not working."""
_LEAST_WAITS = 8
_LEAST_SPREAD = 2.0
_FIRST_OP = len(HOOKS)  # hooks and ops in one row of codes
_CODES = len(HOOKS) + len(OPS)


@dataclass
class Waits:
    """Calls of one hook that began while the device had work left (a lower bound: BEHIND_NS or more)."""

    behind: int = 0
    early: int = 0  # of these, returned before that work was done: the hook did not wait
    waited: int = 0  # returned when it was done, and took little more time than that
    least_ns: int = 1 << 62  # outstanding work of the calls that waited
    most_ns: int = 0
    total_ns: int = 0

    def shown(self) -> bool:
        """Whether this can be nothing but waiting.

        A hook that is merely slow also returns after the device is done. But then its time has nothing to do
        with the outstanding work: it returns early where there was more, and takes far longer where
        there was less. So: never early, mostly as long as the work was, over a spread of it.
        """
        return (
            self.early == 0
            and self.waited >= _LEAST_WAITS
            and 2 * self.waited >= self.behind
            and self.most_ns >= _LEAST_SPREAD * self.least_ns
        )

    def add(self, other: Waits) -> None:
        self.behind += other.behind
        self.early += other.early
        self.waited += other.waited
        self.least_ns = min(self.least_ns, other.least_ns)
        self.most_ns = max(self.most_ns, other.most_ns)
        self.total_ns += other.total_ns


@dataclass(frozen=True)
class Row:
    """One hook or op: the same calls on both clocks (ns)."""

    name: str
    kind: str  # hook | op
    count: int
    host: tuple[int, int, int]  # median, 99th percentile, sum
    device: tuple[int, int, int]
    other_stream: int  # calls that ended on another stream than they began: they have no device time
    behind: int
    waited: int


@dataclass
class DeviceTimes:
    """What was timed on the device; of one spool, or of all (:func:`merged`)."""

    steps: int = 0
    calls: int = 0
    untimed: int = 0
    lost: int = 0
    own_ns: int = 0
    busy_ns: int = 0
    waits: dict[tuple[int, int], Waits] = field(default_factory=dict)  # (engine tag, hook's code)
    _host: Histograms = field(default_factory=lambda: Histograms(_CODES))
    _device: Histograms = field(default_factory=lambda: Histograms(_CODES))
    _crossed: Counter[int] = field(default_factory=Counter)

    def add_calls(self, rows: Records) -> None:
        """DEVICE records."""
        head, step = rows[:, 0], rows[:, 2]
        what = code(head) + np.where((detail(head) & QUIET_IS_OP) != 0, _FIRST_OP, 0)
        marks = flags(head)
        crossed = (marks & int(Flag.STREAMS)) != 0
        values, counts = np.unique(what[crossed], return_counts=True)
        self._crossed.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        good = (rows[:, 4] >= 0) & ~crossed
        zero = np.zeros(int(good.sum()), dtype=np.int64)
        self._host.add(what[good], zero, rows[good, 6])
        self._device.add(what[good], zero, rows[good, 4])
        behind = (rows[:, 5] >= BEHIND_NS) & (what < _FIRST_OP)
        for tag in np.unique(step[behind] >> STEP_SHIFT).tolist():
            mine = behind & (step >> STEP_SHIFT == tag)
            for hook in np.unique(what[mine]).tolist():
                part = mine & (what == hook)
                self.waits.setdefault((tag, hook), Waits()).add(_waits(rows[part], marks[part]))

    def add_steps(self, rows: Records) -> None:
        """TIMED records."""
        self.steps += len(rows)
        sums = np.clip(rows[:, 3:8], 0, 1 << 60).astype(float).sum(axis=0)
        calls, untimed, lost, own, busy = (int(value) for value in sums)
        self.calls += calls
        self.untimed += untimed
        self.lost += lost
        self.own_ns += own
        self.busy_ns += busy

    def rows(self) -> list[Row]:
        """Hooks, then ops, in the order of their codes."""
        totals: dict[int, Waits] = {}
        for (_, hook), waits in self.waits.items():
            totals.setdefault(hook, Waits()).add(waits)
        found = []
        for what in range(_CODES):
            name = (*HOOKS, *OPS)[what]
            crossed = self._crossed[what]
            count = self._host.count(what)
            if not name or not count + crossed:
                continue
            waits = totals.get(what, Waits())
            found.append(
                Row(
                    name=name,
                    kind="hook" if what < _FIRST_OP else "op",
                    count=count,
                    host=_figures(self._host, what),
                    device=_figures(self._device, what),
                    other_stream=crossed,
                    behind=waits.behind,
                    waited=waits.waited,
                )
            )
        return found

    def any_calls(self) -> bool:
        """Whether any call was timed: a killed process leaves calls of a step without the step."""
        return bool(self._crossed) or any(self._host.totals)

    def merge(self, other: DeviceTimes) -> None:
        self.steps += other.steps
        self.calls += other.calls
        self.untimed += other.untimed
        self.lost += other.lost
        self.own_ns += other.own_ns
        self.busy_ns += other.busy_ns
        for key, waits in other.waits.items():
            self.waits.setdefault(key, Waits()).add(waits)
        self._host.merge(other._host)
        self._device.merge(other._device)
        self._crossed.update(other._crossed)


def merged(parts: Iterable[DeviceTimes]) -> DeviceTimes:
    whole = DeviceTimes()
    for part in parts:
        if part.steps or part.any_calls():
            whole.merge(part)
    return whole


def _figures(times: Histograms, what: int) -> tuple[int, int, int]:
    return times.quantile(what, 0.5), times.quantile(what, 0.99), times.totals[what]


def _waits(rows: Records, marks: Records) -> Waits:
    before, host = rows[:, 5], rows[:, 6]
    done = (marks & int(Flag.CAUGHT_UP)) != 0
    waited = done & (host <= before * _TAIL)
    mine = before[waited]
    return Waits(
        behind=len(rows),
        early=int((~done).sum()),
        waited=int(waited.sum()),
        least_ns=int(mine.min()) if len(mine) else 1 << 62,
        most_ns=int(mine.max()) if len(mine) else 0,
        total_ns=int(mine.astype(float).sum()),
    )
