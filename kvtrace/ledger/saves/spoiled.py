"""Tokens that were computed on KV that a load did not bring: what is stored of them is not their prompt's.

A token's KV depends on that of all tokens before it. Where a load left other KV in the cache than that of the
prompt, and no step computed it anew, everything behind it in the request is wrong too, in a layer more or
less; and so is what a later request reuses of these blocks by the GPU's prefix cache, and computes on top.
Where it is read, to be stored, it may take the place of what an earlier request with the same tokens stored:
in a file that is only added to the earlier one's bytes stand on, and nobody finds them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from kvtrace.ledger.contents.residue import Places
from kvtrace.ledger.ends import EVER, Doubt, LoadEnd, Outcome, Spoiled
from kvtrace.ledger.intervals import Interval, covers, intersect, subtract, union
from kvtrace.ledger.loads.model import LoadOf
from kvtrace.ledger.model import Engine
from kvtrace.ledger.requests import Request
from kvtrace.ledger.saves.positions import Segment, merged, reuse_of
from kvtrace.ledger.slots.reads import Touch
from kvtrace.terms import NOT_OBSERVED, SAVED, Grade

_UNKNOWN = frozenset({LoadEnd.LOADED, LoadEnd.LOCAL_HIT, LoadEnd.PENDING, LoadEnd.NOT_OBSERVED})

_Reads = Mapping[int, Sequence[Touch]]
"""What was read of the requests by one worker, by row."""


def spoiled(
    requests: Sequence[Request], engines: Sequence[Engine], loads: Iterable[LoadOf], places: Places
) -> dict[int, Spoiled]:
    """The requests, by row, that computed on KV that is known to be wrong; what the metadata alone says
    of it does not count."""
    load_of = {load.request: load for load in loads}
    own = {row: by for row, load in load_of.items() if (by := _own(requests[row], load))}
    if not own:
        return {}
    found: dict[int, Spoiled] = {}
    of_prefix: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    """(engine, digest, end) -> rows of the requests that put KV there themselves, in the order of time."""
    sizes = {engine.tag: (engine.block_size, max(1, len(engine.facts.kv_groups))) for engine in engines}
    for row in sorted(range(len(requests)), key=lambda row: requests[row].first_step):
        request = requests[row]
        reuse = reuse_of(request, load_of[row].lost if row in load_of else {})
        here = [own.get(row)]
        for digest, end in request.prefixes.items():
            key = request.engine, digest, end
            if not covers(reuse.local, end - 1):
                of_prefix[key].append(row)
                continue
            block = _block(places, row, end - 1, sizes[request.engine])
            owners = [one for one in of_prefix[key]
                      if _block(places, one, end - 1, sizes[request.engine]) == block]  # fmt: skip
            before = found.get(owners[-1]) if owners else None
            here.append(before if before is not None and before.start < end else None)
        begun = [one for one in here if one is not None]
        if begun:
            found[row] = min(begun, key=lambda one: one.start)
    return found


def _own(request: Request, load: LoadOf) -> Spoiled | None:
    """By the request's own load."""
    reuse = reuse_of(request, load.lost)
    left = [
        (low, ended)
        for start, end, ended in _lost(load)
        for low, _ in subtract(intersect([(start, end)], reuse.external), reuse.computed)
    ]
    if not left:
        return None
    start, ended = min(left)
    return Spoiled(start, ended)


def _block(places: Places, row: int, position: int, sizes: tuple[int, int]) -> tuple[int, ...]:
    """The blocks of the KV cache that held a position, one of each group; 0 where it is not known."""
    size, groups = sizes
    return tuple(places.block(row, group, position // max(1, size), EVER) for group in range(groups))


def doubts(
    requests: Sequence[Request],
    found: Mapping[int, Spoiled],
    loads: Iterable[LoadOf],
    reads: Sequence[_Reads],
) -> dict[int, Doubt]:
    """What is not called stored, by the row of a request: of those that computed on wrong KV, for a time or
    until they ended, and of those before them whose place that KV may have taken.

    Args:
        found: as ``spoiled`` found them.
        reads: what was read of the requests, by row; of each worker.
    """
    load_of = {load.request: load for load in loads}
    unknown = _read_before_anew(requests, load_of.values(), reads)
    wrong = {row: parts[0][0] for row, parts in unknown.items()}
    for row, by in found.items():
        wrong[row] = min(wrong.get(row, by.start), by.start)
    if not wrong:
        return {}
    starts = {row: by.start for row, by in found.items()}
    of_prefix: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for row, request in enumerate(requests):
        for digest, end in request.prefixes.items():
            of_prefix[request.engine, digest, end].append(row)
    for row, start in wrong.items():
        request = requests[row]
        read = union(part for touch in _of_row(reads, row) for part in touch.positions)
        for digest, end in request.prefixes.items():
            if end <= start or not covers(read, end - 1):
                continue
            for before in of_prefix[request.engine, digest, end]:
                if requests[before].first_step < request.first_step:
                    starts[before] = min(starts.get(before, start), start)
    for row, by in found.items():
        reuse = reuse_of(requests[row], load_of[row].lost if row in load_of else {})
        if inherited := intersect(reuse.local, [(by.start, EVER)]):
            unknown[row] = union([*unknown.get(row, ()), *inherited])
    return {row: Doubt(starts.get(row, EVER), tuple(unknown.get(row, ()))) for row in {*starts, *unknown}}


def _read_before_anew(
    requests: Sequence[Request], loads: Iterable[LoadOf], reads: Sequence[_Reads]
) -> dict[int, list[Interval]]:
    """Row of a request whose load went wrong, and of which a later step computed anew what it should have
    brought -> what of it, and behind it, was read before that step, and not again from it on."""
    found: dict[int, list[Interval]] = {}
    for load in loads:
        lost = union((start, end) for start, end, _ in _lost(load))
        again = [
            chunk.step for chunk in requests[load.request].chunks
            if intersect(lost, [(chunk.start, chunk.end)])
        ]  # fmt: skip
        if not again:
            continue
        early: list[Interval] = []
        late: list[Interval] = []
        for touch in _of_row(reads, load.request):
            (early if touch.step < max(again) else late).extend(touch.positions)
        if left := intersect(subtract(union(early), union(late)), [(lost[0][0], EVER)]):
            found[load.request] = left
    return found


def _of_row(reads: Sequence[_Reads], row: int) -> Iterator[Touch]:
    return (touch for one in reads for touch in one.get(row, ()))


def _lost(load: LoadOf) -> Iterator[tuple[int, int, LoadEnd]]:
    """What a load is known not to have brought, in positions, and how it ended: what the metadata alone says
    does not count."""
    for parts in load.lost:
        for start, end, ended in parts:
            if ended not in _UNKNOWN and load.grade(ended) >= Grade.READ:
                yield start, end, ended


def doubted(segments: Sequence[Segment], doubt: Doubt | None) -> list[Segment]:
    """The segments with no more said of them than what is beyond doubt."""
    if doubt is None:
        return list(segments)
    marks = sorted({doubt.start, *(mark for part in doubt.unknown for mark in part)})
    return merged(_less(part, doubt) for one in segments for part in _parted(one, marks))


def _parted(segment: Segment, marks: Iterable[int]) -> Iterator[Segment]:
    """A segment, parted at the marks within it."""
    for mark in marks:
        if segment.start < mark < segment.end:
            yield replace(segment, end=mark)
            segment = replace(segment, start=mark)
    yield segment


def _less(one: Segment, doubt: Doubt) -> Segment:
    if one.outcome.name != SAVED:
        return one
    if covers(list(doubt.unknown), one.start):
        return replace(one, outcome=Outcome(NOT_OBSERVED, grade=Grade.NOT_OBSERVED))
    if one.start >= doubt.start and one.outcome.grade > Grade.READ:
        return replace(one, outcome=Outcome(SAVED, grade=Grade.READ))
    return one
