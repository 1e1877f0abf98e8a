"""Which requests of two engines are one: pure functions over the ids that were handed over.

A request here (that loads) is joined with one there (that computed for it) where an id says so, and one only:

- ``returned``: an id that the connector there returned when its request had finished came with the one here;
- ``named``: the one here brought the id of the one there;
- ``transfer``: both brought the same id;
- ``shared``: the client gave both the same id. Plain numbers do not count: every engine counts alike.

Equal prompts are no evidence. What cannot be told stays alone, with the reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvtrace.merge.asked import EngineRequest
from kvtrace.merge.clocks import Clocks
from kvtrace.merge.merged import NAMED, RETURNED, SHARED, TRANSFER, EngineOf

NO_ID = "no id was handed over"
NUMBERS = "the client's ids are plain numbers, which every engine counts alike"
NOT_HERE = "the id that it brought is of no request in these runs"
NO_ENGINE = "the engine that it names is in none of these runs"
UNCLAIMED = "no request of another engine brought the id that its connector returned or was to return"
NO_SCHEDULER = "no scheduler is known that had it"
SEVERAL = "several requests fit the id"
EARLY = "it arrived before the ids that it brought had been returned"
NO_ORDER = "which of two requests with the same id came first cannot be told"

_SENDS, _LOADS = "do_remote_decode", "do_remote_prefill"
_PRODUCER, _CONSUMER = "kv_producer", "kv_consumer"


@dataclass(frozen=True)
class Found:
    """``there`` and ``here`` are indices of requests."""

    there: int
    here: int
    how: str
    key: str
    value: str


@dataclass
class JoinResult:
    """``why``: index of a request that is joined with none -> the reason. ``skews``: pair of clocks -> by how
    much they are off at least, as something came before its cause."""

    found: list[Found] = field(default_factory=list)
    why: dict[int, str] = field(default_factory=dict)
    skews: dict[tuple[int, int], int] = field(default_factory=dict)


def join(requests: Sequence[EngineRequest], engines: Sequence[EngineOf], clocks: Clocks) -> JoinResult:
    """The requests of all runs, joined.

    Args:
        requests: with their engine's index in `engines`; -1 where no scheduler is known, they stay alone.
    """
    return _Join(requests, engines, clocks).result()


class _Join:
    def __init__(
        self, requests: Sequence[EngineRequest], engines: Sequence[EngineOf], clocks: Clocks
    ) -> None:
        self._all, self._engines, self._clocks = requests, engines, clocks
        self._engine_ids = {one.id for one in engines if one.id}
        self._result = JoinResult()
        self._returned = self._index(lambda one: _of_requests(one.returned).values())
        self._own = self._index(lambda one: [ident for ident in (one.id, one.client) if not ident.isdigit()])
        self._brought = self._index(lambda one: _of_transfers(one.brought).values())

    def _index(self, ids: Callable[[EngineRequest], Iterable[str]]) -> Mapping[str, list[int]]:
        found: dict[str, list[int]] = defaultdict(list)
        for at, one in enumerate(self._all):
            for ident in set(ids(one)) - {""} if one.engine >= 0 else ():
                found[ident].append(at)
        return found

    def result(self) -> JoinResult:
        alone: dict[int, str] = {}
        for at, one in enumerate(self._all):
            why = self._by_brought(at, one) if one.engine >= 0 else NO_SCHEDULER
            if why:
                alone[at] = why
        used = {end for found in self._result.found for end in (found.there, found.here)}
        self._by_client({at for at in range(len(self._all)) if at not in used}, alone)
        used = {end for found in self._result.found for end in (found.there, found.here)}
        for at in range(len(self._all)):
            if at not in used:
                self._result.why[at] = alone.get(at, NO_ID)
        return self._result

    # -- by what it brought

    def _by_brought(self, here: int, one: EngineRequest) -> str:
        """Joins a request with the one that it names; else why not ("" where it is the one that is named)."""
        named = _of_requests(one.brought)
        whose = {value for key, value in one.brought.items() if key.endswith("engine_id")}
        if (_SENDS in one.asks or one.returned) and _LOADS not in one.asks and not named:
            return UNCLAIMED
        why = NO_ID
        for key, value in named.items():
            for how, index in ((RETURNED, self._returned), (NAMED, self._own), (TRANSFER, self._brought)):
                if how == TRANSFER and key not in _of_transfers(one.brought):
                    continue
                there = [at for at in index.get(value, ()) if self._may_send(at, here, how)]
                fitting = [at for at in there if self._is_of(at, whose)]
                if len(fitting) == 1:
                    if how == RETURNED and self._too_early(fitting[0], one):
                        return EARLY
                    self._result.found.append(Found(fitting[0], here, how, key, value))
                    return ""
                if fitting:
                    return SEVERAL
                if there and why in (NO_ID, NOT_HERE):
                    why = NO_ENGINE
            why = NOT_HERE if why == NO_ID else why
        if why == NOT_HERE and whose and self._engine_ids.isdisjoint(whose):
            return NO_ENGINE
        return why

    def _may_send(self, there: int, here: int, how: str) -> bool:
        one, two = self._all[there], self._all[here]
        if one.engine == two.engine or self._engines[one.engine].role == _CONSUMER:
            return False
        if self._engines[two.engine].role == _PRODUCER:
            return False
        return how != TRANSFER or self._first(there, here) == there

    def _first(self, one: int, two: int) -> int | None:
        """Which of two requests with the same id computes for the other one; None: that cannot be told, or
        both load from a third one."""
        if all(_LOADS in self._all[at].asks for at in (one, two)):
            return None
        for at, other in ((one, two), (two, one)):
            sends, loads = self._all[at], self._all[other]
            if _SENDS in sends.asks and _SENDS not in loads.asks:
                return at
            if _LOADS in loads.asks and _LOADS not in sends.asks:
                return at
        for at, other in ((one, two), (two, one)):
            own, others = (self._engines[self._all[end].engine].role for end in (at, other))
            if own == _PRODUCER or (others == _CONSUMER and own != _CONSUMER):
                return at
        apart = self._wall(two) - self._wall(one)
        clock_of = [self._engines[self._all[at].engine].clock for at in (one, two)]
        if abs(apart) <= self._clocks.off_by(*clock_of):
            return None
        return one if apart > 0 else two

    def _wall(self, at: int) -> int:
        one = self._all[at]
        return self._clocks.wall(self._engines[one.engine].clock, one.t)

    def _is_of(self, at: int, whose: set[str]) -> bool:
        """Whether a request is of one of the engines that are named, as far as that is known."""
        ident = self._engines[self._all[at].engine].id
        return not whose or not ident or ident in whose

    def _too_early(self, there: int, here: EngineRequest) -> bool:
        """Whether something came before its cause: on one clock that cannot be, between two it says by how
        much they are off."""
        source = self._all[there]
        one, two = self._engines[source.engine].clock, self._engines[here.engine].clock
        early = self._clocks.wall(one, source.returned_t) - self._clocks.wall(two, here.t)
        if early <= 0:
            return False
        if one == two:
            return True
        pair = (min(one, two), max(one, two))
        self._result.skews[pair] = max(self._result.skews.get(pair, 0), early)
        return False

    # -- by the client's id

    def _by_client(self, free: set[int], alone: dict[int, str]) -> None:
        for ident, members in self._index(lambda one: (one.client or one.id,)).items():
            if len({self._all[at].engine for at in members}) < 2 or not free.issuperset(members):
                continue
            reason = NUMBERS if ident.isdigit() else SEVERAL if len(members) > 2 else ""
            there = None if reason else self._first(*members)
            if there is not None:
                here = next(at for at in members if at != there)
                if self._may_send(there, here, SHARED):
                    self._result.found.append(Found(there, here, SHARED, "request id", ident))
                    continue
            for at in members:
                alone[at] = reason or NO_ORDER


def _of_requests(ids: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in ids.items() if not key.endswith("engine_id")}


def _of_transfers(ids: Mapping[str, str]) -> dict[str, str]:
    """Without the ids of another's request, which several requests may bring."""
    found = _of_requests(ids)
    return {key: value for key, value in found.items() if not key.rpartition(".")[2].startswith("remote_")}
