"""What of an accepted load got into the layers, pair by pair."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvtrace.ledger.ends import LoadEnd
from kvtrace.ledger.intervals import Interval, length
from kvtrace.ledger.loads.accepted import Accepted
from kvtrace.ledger.loads.outcome import LoadOf, Part, Place
from kvtrace.ledger.loads.steps_seen import Evidence
from kvtrace.ledger.loads.written import Written
from kvtrace.ledger.model import Worker
from kvtrace.ledger.steps import NEVER_RAN, Executed
from kvtrace.ledger.values import replace
from kvtrace.trace import hooks

FEWER_NAMED = "the metadata names fewer slots than were accepted"
READ_ONLY = "the load read them there: what it filled may be a copy of them"
_MAX_REASONS = 4
_MAX_PLACES = 256


@dataclass(frozen=True)
class Seen:
    """What the workers' spools say, and what each step was to load. Workers by Worker.key."""

    found: Evidence
    executed: Mapping[tuple[int, str], Executed]
    loads: Mapping[int, int]  # step -> synchronous loads
    written: Written = field(default_factory=Written)

    def ran(self, worker: Worker) -> Executed:
        return self.executed.get(worker.key, NEVER_RAN)


def waits(worker: Worker) -> bool:
    """Whether this connector does something in wait_for_layer_load."""
    return worker.connector is not None and worker.connector.does(hooks.WAIT_LAYER)


def parts(end: LoadEnd, positions: Iterable[Interval]) -> list[Part]:
    return [(a, b, end) for a, b in positions if a < b]


def bits(first: int, count: int = 1) -> int:
    """A set of pairs, a bit each."""
    return ((1 << count) - 1) << first


class Arrival:
    """Gathers one accepted load's fate; :meth:`result` is the load with it."""

    def __init__(self, accepted: Accepted) -> None:
        self._load = accepted.load
        self._ends: Counter[LoadEnd] = Counter(accepted.load.ends)
        self._lost: dict[tuple[Part, ...], int] = {}
        self._reasons: dict[LoadEnd, list[str]] = defaultdict(list)
        self._places: dict[LoadEnd, list[Place]] = defaultdict(list)

    def put(self, lost: Iterable[Part], pairs: int) -> None:
        """In these pairs (a bit each) these parts were lost, and the rest was loaded."""
        missing = tuple(part for part in lost if part[0] < part[1])
        for start, end, ended in missing:
            self._ends[ended] += (end - start) * pairs.bit_count()
        arrived = self._load.accepted - length((start, end) for start, end, _ in missing)
        self._ends[LoadEnd.LOADED] += arrived * pairs.bit_count()
        if missing and pairs:
            self._lost[missing] = self._lost.get(missing, 0) | pairs

    def because(self, end: LoadEnd, reason: str, place: Place | None = None) -> None:
        """Why tokens ended there, and a pair in which it was seen."""
        known, places = self._reasons[end], self._places[end]
        if reason not in known and len(known) < _MAX_REASONS:
            known.append(reason)
        if place is not None and len(places) < _MAX_PLACES:
            places.append(place)

    def result(self, measured: bool, waited_ns: int, begun: bool = False) -> LoadOf:
        return replace(
            self._load,
            ends={end: n for end, n in self._ends.items() if n},
            lost=self._lost,
            reasons={end: tuple(reasons) for end, reasons in self._reasons.items()},
            places={end: tuple(places) for end, places in self._places.items() if places},
            measured=measured,
            waited_ns=waited_ns,
            begun=begun,
        )
