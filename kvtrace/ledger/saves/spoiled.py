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
from kvtrace.ledger.ends import LoadEnd, Outcome, Spoiled
from kvtrace.ledger.intervals import covers, intersect, subtract, union
from kvtrace.ledger.loads.model import LoadOf
from kvtrace.ledger.model import Engine
from kvtrace.ledger.requests import Request
from kvtrace.ledger.saves.positions import Segment, merged, reuse_of
from kvtrace.ledger.slots.reads import Touch
from kvtrace.terms import SAVED, Grade

_UNKNOWN = frozenset({LoadEnd.LOADED, LoadEnd.LOCAL_HIT, LoadEnd.PENDING, LoadEnd.NOT_OBSERVED})
_EVER = 1 << 62


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
        for parts in load.lost
        for start, end, ended in parts
        if ended not in _UNKNOWN and load.grade(ended) >= Grade.READ
        for low, _ in subtract(intersect([(start, end)], reuse.external), reuse.computed)
    ]
    if not left:
        return None
    start, ended = min(left)
    return Spoiled(start, ended)


def _block(places: Places, row: int, position: int, sizes: tuple[int, int]) -> tuple[int, ...]:
    """The blocks of the KV cache that held a position, one of each group; 0 where it is not known."""
    size, groups = sizes
    return tuple(places.block(row, group, position // max(1, size), _EVER) for group in range(groups))


def only_read(
    requests: Sequence[Request], found: Mapping[int, Spoiled], reads: Sequence[Mapping[int, Sequence[Touch]]]
) -> dict[int, int]:
    """Row of a request -> from which position on no more is said than that it was read: of those that
    computed on wrong KV, and of those before them whose place it may have taken.

    Args:
        reads: what was read of the requests, by row; of each worker.
    """
    if not found:
        return {}
    starts = {row: by.start for row, by in found.items()}
    of_prefix: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for row, request in enumerate(requests):
        for digest, end in request.prefixes.items():
            of_prefix[request.engine, digest, end].append(row)
    for row, by in found.items():
        request = requests[row]
        read = union(part for one in reads for touch in one.get(row, ()) for part in touch.positions)
        for digest, end in request.prefixes.items():
            if end <= by.start or not covers(read, end - 1):
                continue
            for before in of_prefix[request.engine, digest, end]:
                if requests[before].first_step < request.first_step:
                    starts[before] = min(starts.get(before, by.start), by.start)
    return starts


def without_spoiled(segments: Sequence[Segment], start: int | None) -> list[Segment]:
    """The segments: of what stands at ``start`` and behind no more is said than that it was read."""
    return merged(_parted(segments, start)) if start is not None else list(segments)


def _parted(segments: Iterable[Segment], start: int) -> Iterator[Segment]:
    for one in segments:
        if one.outcome.name != SAVED or one.outcome.grade <= Grade.READ or one.end <= start:
            yield one
            continue
        middle = max(one.start, start)
        if one.start < middle:
            yield replace(one, end=middle)
        yield replace(one, start=middle, outcome=Outcome(SAVED, grade=Grade.READ))
