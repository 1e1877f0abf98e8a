"""What the connector did not find, though an earlier prompt of the run had just been saved."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kvtrace.ledger.beginnings import beginnings
from kvtrace.ledger.intervals import union
from kvtrace.ledger.loads.outcome import AskedLoad, Before
from kvtrace.ledger.requests import Request
from kvtrace.ledger.run import Engine

_BETWEEN = 64
"""Saves between a save and a lookup that are counted, at most."""
_SETTLED_NS = 10**9
"""A save in the background is taken for done this long after its request finished."""


class _Saved(NamedTuple):
    """A request that was saved in every pair. ``ended``: step of its finish; ``tokens``: leading ones."""

    ended: int
    row: int
    tokens: int


class _Earlier(NamedTuple):
    """The request that saved the same prompt last, and how many others were saved since."""

    saved: _Saved
    others: int


def explain(
    asked: Sequence[AskedLoad],
    requests: Sequence[Request],
    engines: Mapping[int, Engine],
    saved: Sequence[int],
    written: set[int],
) -> Iterator[Before]:
    """What earlier requests of the run had saved of the same prompts, of each one.

    Args:
        saved: token-layers saved of each request.
        written: steps whose save hooks were seen to write files.
    """
    earlier = _saved_before(asked, requests, engines, saved)
    missed = _mismatched(asked, earlier, requests, engines, written)
    for one, alike in zip(asked, _alike(asked, requests), strict=True):
        if one.request not in earlier:
            yield Before(alike=alike)
            continue
        (_, row, tokens), others = earlier[one.request]
        yield Before(tokens, row, others, alike, one.request in missed)


def _alike(asked: Sequence[AskedLoad], requests: Sequence[Request]) -> Iterator[int]:
    """How many leading tokens each prompt has in common with an earlier one."""
    known: dict[int, dict[int, int]] = defaultdict(dict)  # engine -> digest -> tokens
    for one in asked:
        request = requests[one.request]
        mine, seen = beginnings(request), known[one.engine]
        alike = [tokens for digest, tokens in mine.items() if seen.get(digest) == tokens]
        yield min(max(alike, default=0), request.prompt)
        seen.update(mine)


def _saved_before(
    asked: Sequence[AskedLoad],
    requests: Sequence[Request],
    engines: Mapping[int, Engine],
    saved: Sequence[int],
) -> dict[int, _Earlier]:
    """Lookups of a prompt that an earlier request of this run saved, by row."""
    saves: dict[int, list[_Saved]] = defaultdict(list)
    for one in asked:
        whole = _saved_whole(one.request, requests[one.request], saved, engines[one.engine].pairs)
        if whole is not None:
            saves[one.engine].append(whole)
    places: dict[tuple[int, int, int], list[int]] = defaultdict(list)  # in ``saves``, of one prompt
    for engine, done in saves.items():
        done.sort(key=lambda one: (one.ended, one.row, one.tokens))
        for at, save in enumerate(done):
            places[(engine, requests[save.row].digest, requests[save.row].arrived)].append(at)
    ends = {engine: [save.ended for save in done] for engine, done in saves.items()}
    found = {}
    for one in asked:
        request = requests[one.request]
        same = places.get((one.engine, request.digest, request.arrived))
        if one.answer is None or not request.digest or not same:
            continue
        done = saves[one.engine]
        ended = bisect_left(ends[one.engine], one.step)
        at = same[bisect_left(same, ended) - 1]
        if at < ended:
            between = done[at + 1 : min(ended, at + 1 + _BETWEEN)]
            others = len({requests[save.row].digest for save in between})
            found[one.request] = _Earlier(done[at], others)
    return found


def _saved_whole(row: int, request: Request, saved: Sequence[int], pairs: int) -> _Saved | None:
    """A request whose leading positions were saved in every pair, None where that is not known."""
    amount = saved[row]
    open_saves = sum(one.store and one.begun for one in request.transfers) - sum(
        not one.begun and not one.load and not one.spool for one in request.transfers
    )
    if request.finish is None or open_saves > 0 or amount <= 0 or amount % pairs:
        return None
    entries = union((e.start, min(e.start + e.slots, e.available)) for e in request.entries if e.slots > 0)
    if not entries or entries[0][0] != 0 or any(entry.asynchronous for entry in request.entries):
        return None
    tokens = entries[0][1]
    return _Saved(request.finish.step, row, tokens) if tokens * pairs == amount else None


def _mismatched(
    asked: Sequence[AskedLoad],
    earlier: Mapping[int, _Earlier],
    requests: Sequence[Request],
    engines: Mapping[int, Engine],
    written: set[int],
) -> set[int]:
    """Rows of misses that no eviction can explain: what was saved last is what is not found.

    A miss with other saves in between can be an eviction; it counts only where a prompt of its kind was
    missed right after its save, and none of these was ever found. Where an engine finds some prompts, those
    of the same length within a block are of a kind; where it never finds any, all are.
    """
    finds = {one.engine for one in asked if (one.answer or 0) > 0}
    by_kind: dict[tuple[int, int], list[AskedLoad]] = defaultdict(list)
    for one in asked:
        engine, before = engines[one.engine], earlier.get(one.request)
        if before is None or not engine.looks_up:
            continue
        # A saved prompt that leaves no token to compute may be out of bounds for a lookup in whole units.
        inside = one.local < before.saved.tokens < one.prompt
        if inside and _settled(requests[one.request], requests[before.saved.row], written):
            block = max(1, requests[one.request].block or engine.block_size)
            by_kind[(one.engine, one.prompt % block if one.engine in finds else 0)].append(one)
    found: set[int] = set()
    for group in by_kind.values():
        missed = [one for one in group if one.answer == 0]
        hit = any((one.answer or 0) > 0 for one in group)
        at_once = [one for one in missed if earlier[one.request].others == 0]
        found.update(one.request for one in (at_once if hit else missed if at_once else []))
    return found


def _settled(request: Request, earlier: Request, written: set[int]) -> bool:
    """Whether the earlier save was surely done at this lookup."""
    if all(entry.step in written for entry in earlier.entries if entry.slots > 0):
        return True
    lookup = request.looked_up
    if lookup is None or earlier.finish is None:
        return False
    return lookup.t - earlier.finish.t >= _SETTLED_NS
