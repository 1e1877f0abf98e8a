"""The ledger of loads, with what the fingerprints say of what was loaded."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from kvtrace.ledger.contents.compare import Contents, Proved, Wrong, reasons
from kvtrace.ledger.ends import LoadEnd
from kvtrace.ledger.intervals import Interval, intersect, length, subtract, union
from kvtrace.ledger.loads.outcome import LoadOf, Part, Place
from kvtrace.ledger.model import Engine
from kvtrace.ledger.requests import Request
from kvtrace.ledger.values import replace

_MAX_PLACES = 256
_NOT_THERE = frozenset({LoadEnd.NOT_WRITTEN, LoadEnd.PARTLY})
"""Ends that say that nothing was written: it was, where the content is there all the same."""
_LEFT = (
    "no write was seen, and their blocks hold what the same blocks held before: nothing was written, "
    "or it came too late"
)
_LATE = (
    "when attention used them their blocks held what they had held before; what was loaded was written later"
)

_BEFORE = {LoadEnd.NOT_WRITTEN: [_LEFT], LoadEnd.PARTLY: [_LEFT], LoadEnd.USED_BEFORE: [_LATE]}
"""What is said before the contents themselves."""


def with_contents(
    loads: Sequence[LoadOf],
    contents: Contents,
    engines: Sequence[Engine],
    requests: Sequence[Request],
    caught: Mapping[int, Sequence[str]],
) -> list[LoadOf]:
    """The loads, with the tokens whose KV is wrong, and how many are proved. What was lost for another reason
    stays so: what a load does not write is not looked at.

    Args:
        requests: all of them, by row.
        caught: step -> exceptions that work for its loads caught. Where no write was seen and the KV is not
            what it should be, the load failed by these.
    """
    by_tag = {engine.tag: engine for engine in engines}
    found = []
    for load in loads:
        wrong = [one for one in contents.wrong.get(load.request, ()) if not _explained(load, one)]
        proved = contents.proved.get(load.request, ())
        judged = load.accepted and (wrong or proved)
        failed = [] if load.request in contents.written else _caught(load, requests[load.request], caught)
        found.append(_judged(load, by_tag[load.engine], wrong, proved, failed) if judged else load)
    return found


def _explained(load: LoadOf, one: Wrong) -> bool:
    """Whether a layer that lost its part of a block is why the block is not what it should be: its print is
    that of all layers."""
    block, of = (one.start, one.end), one.of or one.pairs
    return one.unlike and any(_met(parts, block) for parts, pairs in load.lost.items() if pairs & of)


def _caught(load: LoadOf, request: Request, caught: Mapping[int, Sequence[str]]) -> list[str]:
    """The exceptions that work for this load may have caught, of the steps in which it can have run."""
    until = request.chunks[0].step if request.chunks and load.asynchronous else load.step
    return list(
        dict.fromkeys(line for step in sorted(caught) if load.step <= step <= until for line in caught[step])
    )


def _judged(
    load: LoadOf, engine: Engine, wrong: Sequence[Wrong], proved: Sequence[Proved], failed: Sequence[str]
) -> LoadOf:
    """``failed``: by what exceptions the load failed where its KV is not what it should be."""
    accepted = (load.local, load.local + load.accepted)
    every = (1 << engine.pairs) - 1
    apart = [*(one.pairs for one in wrong), *(pairs for pairs, _ in proved)]
    ends: Counter[LoadEnd] = Counter(load.ends)
    lost: dict[tuple[Part, ...], int] = {}
    said: dict[LoadEnd, list[Wrong]] = defaultdict(list)
    sure = 0
    for parts, pairs in _classes(load.lost, every, apart):
        here = [one for one in wrong if one.pairs & pairs and not _met(parts, (one.start, one.end))]
        bad = intersect([accepted], union((one.start, one.end) for one in here))
        good = [part for bits, intervals in proved if bits & pairs for part in intervals]
        good = intersect([accepted], subtract(union(good), bad))
        of_end: dict[LoadEnd, list[Wrong]] = defaultdict(list)
        for one in here:
            of_end[_end(one, failed, bool(good))].append(one)
        ended_so = [
            (low, high, came_to)
            for came_to, whose in of_end.items()
            for low, high in intersect([accepted], union((one.start, one.end) for one in whose))
        ]
        for came_to, whose in of_end.items():
            said[came_to] += whose
        n = pairs.bit_count()
        kept: list[Part] = []
        for start, end, ended in parts:
            left = [(start, end)]
            if ended is LoadEnd.NOT_OBSERVED:
                left = subtract(subtract(left, bad), good)
            elif ended in _NOT_THERE:
                left = subtract(left, good)
            seen = ended not in _NOT_THERE or not _unseen(left, end - start, engine.block_size)
            still = ended if seen else LoadEnd.NOT_OBSERVED
            for low, high in left:
                kept.append((low, high, still))
            ends[ended] -= (end - start) * n
            ends[still] += length(left) * n
            ends[LoadEnd.LOADED] += (end - start - length(left)) * n
        for low, high, came_to in ended_so:
            ends[LoadEnd.LOADED] -= (high - low) * n
            ends[came_to] += (high - low) * n
        now = tuple(sorted([*kept, *ended_so]))
        sure += length(subtract(good, union((low, high) for low, high, _ in now))) * n
        if now:
            lost[now] = lost.get(now, 0) | pairs
    more_reasons, more_places = dict(load.reasons), dict(load.places)
    before = {**_BEFORE, LoadEnd.FAILED: failed}
    for came_to, whose in said.items():
        more_reasons[came_to] = (*before.get(came_to, ()), *reasons(whose))
        more_places[came_to] = _places(engine, whose)
    return replace(
        load, ends={end: n for end, n in ends.items() if n}, lost=lost, proved=sure,
        untouched=not said.keys().isdisjoint(_NOT_THERE),
        reasons={end: why for end, why in more_reasons.items() if ends[end]},
        places={end: where for end, where in more_places.items() if ends[end]},
    )  # fmt: skip


def _unseen(left: Sequence[Interval], tokens: int, block: int) -> bool:
    """Whether what no write was seen for was written unseen: the content of its whole blocks is there, and
    the begun one that is ``left`` has no fingerprint that could say so."""
    return length(left) < tokens and all(high - low < block for low, high in left)


def _end(one: Wrong, failed: Sequence[str], partly: bool) -> LoadEnd:
    """``partly``: other tokens of the load came."""
    if one.late:
        return LoadEnd.USED_BEFORE
    if failed or not one.unwritten:
        return LoadEnd.FAILED if failed else LoadEnd.ALTERED if one.altered else LoadEnd.WRONG
    return LoadEnd.PARTLY if partly else LoadEnd.NOT_WRITTEN


def _met(parts: Iterable[Part], block: Interval) -> bool:
    """Whether a part of a block is known to be lost in another way."""
    return any(
        start < block[1] and end > block[0] and ended is not LoadEnd.NOT_OBSERVED
        for start, end, ended in parts
    )


def _classes(
    lost: Mapping[tuple[Part, ...], int], every: int, apart: Iterable[int]
) -> list[tuple[tuple[Part, ...], int]]:
    """What was lost -> pairs that fared so, such that each of ``apart`` holds all of a class or nothing."""
    rest = every
    for pairs in lost.values():
        rest &= ~pairs
    found = [*lost.items(), ((), rest)]
    for bits in set(apart):
        found = [(parts, some) for parts, pairs in found for some in (pairs & bits, pairs & ~bits)]
    return [(parts, pairs) for parts, pairs in found if pairs]


def _places(engine: Engine, wrong: Iterable[Wrong]) -> tuple[Place, ...]:
    """The pairs that it concerns, the first few."""
    pairs = 0
    for one in wrong:
        pairs |= one.pairs
    every = [(worker.rank, layer) for worker in engine.workers for layer in worker.kv_layers]
    return tuple(place for at, place in enumerate(every) if pairs >> at & 1)[:_MAX_PLACES]
