"""Device times: host and device durations of the same calls, and which calls waited for the device.

Streamed: histograms and counts, whatever the number of timed calls.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from kvtrace.ledger.timing import Histograms
from kvtrace.trace import hooks, ops, rows
from kvtrace.trace.format import DETAIL_IS_OP, Flag
from kvtrace.trace.reader import Records

BEHIND_NS = 100_000
"""Device work that a call finds outstanding, from which on its return says whether it waited."""
_TAIL = 1.5
"""A call that took up to this times the outstanding work spent its time waiting, not working."""
_LEAST_WAITS = 8
_LEAST_SPREAD = 2.0
_FIRST_OP = hooks.CODES  # hooks and ops in one row of codes
_CODES = hooks.CODES + ops.CODES


@dataclass(frozen=True)
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

    def __add__(self, other: Waits) -> Waits:
        return Waits(
            behind=self.behind + other.behind,
            early=self.early + other.early,
            waited=self.waited + other.waited,
            least_ns=min(self.least_ns, other.least_ns),
            most_ns=max(self.most_ns, other.most_ns),
            total_ns=self.total_ns + other.total_ns,
        )


@dataclass(frozen=True)
class ClockRow:
    """One hook or op: the same calls on both clocks (ns)."""

    name: str
    kind: str  # hook | op
    count: int
    host: tuple[int, int, int]  # median, 99th percentile, sum
    device: tuple[int, int, int]
    other_stream: int  # calls that ended on another stream than they began: they have no device time
    behind: int
    waited: int


@dataclass(frozen=True)
class DeviceTotals:
    """What was timed on the device. Counts of steps and calls as in :class:`kvtrace.trace.rows.TimedStep`."""

    steps: int = 0
    calls: int = 0
    untimed: int = 0
    lost: int = 0
    own_ns: int = 0
    busy_ns: int = 0
    rows: tuple[ClockRow, ...] = ()  # hooks, then ops, in the order of their codes
    waits: Mapping[str, Waits] = field(default_factory=dict)  # of each hook


class DeviceTally:
    """Counts and histograms while the spools are read."""

    def __init__(self) -> None:
        # Of TimedStep: calls, untimed, lost, own_ns, busy_ns.
        self._sums = [0] * 5
        self._steps = 0
        self._waits: dict[int, Waits] = {}  # by the hook's code
        self._host = Histograms(_CODES)
        self._device = Histograms(_CODES)
        self._crossed: Counter[int] = Counter()

    def add_calls(self, table: Records) -> None:
        """DEVICE records."""
        call = rows.columns(rows.DeviceCall, table)
        what = rows.code(call.head) + np.where((rows.detail(call.head) & DETAIL_IS_OP) != 0, _FIRST_OP, 0)
        crossed = (rows.flags(call.head) & int(Flag.STREAMS)) != 0
        values, counts = np.unique(what[crossed], return_counts=True)
        self._crossed.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        good = (call.device_ns >= 0) & ~crossed
        self._host.add(what[good], call.host_ns[good])
        self._device.add(what[good], call.device_ns[good])
        behind = (call.before_ns >= BEHIND_NS) & (what < _FIRST_OP)
        for hook in np.unique(what[behind]).tolist():
            self._add_waits(hook, _waits(rows.columns(rows.DeviceCall, table[behind & (what == hook)])))

    def _add_waits(self, hook: int, waits: Waits) -> None:
        self._waits[hook] = self._waits.get(hook, Waits()) + waits

    def add_steps(self, table: Records) -> None:
        """TIMED records."""
        step = rows.columns(rows.TimedStep, table)
        self._steps += len(table)
        sums = np.stack([step.calls, step.untimed, step.lost, step.own_ns, step.busy_ns])
        self._add_sums(np.clip(sums, 0, 1 << 60).astype(float).sum(axis=1).tolist())

    def _add_sums(self, more: Iterable[float]) -> None:
        self._sums = [known + int(new) for known, new in zip(self._sums, more, strict=True)]

    def merge(self, other: DeviceTally) -> None:
        self._steps += other._steps
        self._add_sums(other._sums)
        for hook, waits in other._waits.items():
            self._add_waits(hook, waits)
        self._host.merge(other._host)
        self._device.merge(other._device)
        self._crossed.update(other._crossed)

    def result(self) -> DeviceTotals:
        calls, untimed, lost, own, busy = self._sums
        return DeviceTotals(
            steps=self._steps,
            calls=calls,
            untimed=untimed,
            lost=lost,
            own_ns=own,
            busy_ns=busy,
            rows=tuple(self._rows()),
            waits={hooks.name_of(hook): waits for hook, waits in self._waits.items()},
        )

    def _rows(self) -> Iterable[ClockRow]:
        for what in range(_CODES):
            is_hook = what < _FIRST_OP
            name = hooks.name_of(what) if is_hook else ops.name_of(what - _FIRST_OP)
            count, crossed = self._host.count(what), self._crossed[what]
            if name and count + crossed:
                waits = self._waits.get(what, Waits())
                yield ClockRow(
                    name=name,
                    kind="hook" if is_hook else "op",
                    count=count,
                    host=_figures(self._host, what),
                    device=_figures(self._device, what),
                    other_stream=crossed,
                    behind=waits.behind,
                    waited=waits.waited,
                )


def merged(tallies: Iterable[DeviceTally]) -> DeviceTotals:
    """The device times of all spools together."""
    whole = DeviceTally()
    for tally in tallies:
        whole.merge(tally)
    return whole.result()


def _figures(times: Histograms, what: int) -> tuple[int, int, int]:
    return times.quantile(what, 0.5), times.quantile(what, 0.99), times.totals[what]


def _waits(call: rows.DeviceCall) -> Waits:
    """Of calls of one hook that began while the device had work left."""
    done = (rows.flags(call.head) & int(Flag.CAUGHT_UP)) != 0
    waited = done & (call.host_ns <= call.before_ns * _TAIL)
    before = call.before_ns[waited]
    return Waits(
        behind=len(done),
        early=int((~done).sum()),
        waited=int(waited.sum()),
        least_ns=int(before.min()) if len(before) else 1 << 62,
        most_ns=int(before.max()) if len(before) else 0,
        total_ns=int(before.astype(float).sum()),
    )
