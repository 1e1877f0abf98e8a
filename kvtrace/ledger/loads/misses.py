"""What the connector did not find, though an earlier prompt of the run had just been saved."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvtrace.ledger.beginnings import beginnings
from kvtrace.ledger.ends import LoadEnd
from kvtrace.ledger.intervals import union
from kvtrace.ledger.loads.outcome import LoadOf
from kvtrace.ledger.model import Engine
from kvtrace.ledger.requests import Request
from kvtrace.ledger.values import replace

_BETWEEN = 64
"""Saves between a save and a lookup that are counted, at most."""
_SETTLED_NS = 10**9
"""A save in the background is taken for done this long after its request finished."""


@dataclass(frozen=True)
class _Saved:
    """A request that was saved in every pair. ``ended``: step of its finish; ``tokens``: leading ones."""

    ended: int
    row: int
    tokens: int


def explain(
    loads: Sequence[LoadOf],
    requests: Sequence[Request],
    engines: Mapping[int, Engine],
    saved: Sequence[int],
    written: set[int],
) -> list[LoadOf]:
    """The loads, with what earlier requests of the run had saved of the same prompts.

    Args:
        saved: token-layers saved of each request.
        written: steps whose save hooks were seen to write files.
    """
    found = [replace(load, alike=alike) for load, alike in zip(loads, _alike(loads, requests), strict=True)]
    before = _saved_before(found, requests, engines, saved)
    found = [before.get(load.request, load) for load in found]
    missed = _mismatched(before, requests, engines, written)
    return [_missed_saved(load, engines) if load.request in missed else load for load in found]


def _alike(loads: Sequence[LoadOf], requests: Sequence[Request]) -> Iterator[int]:
    """How many leading tokens each prompt has in common with an earlier one."""
    known: dict[int, dict[int, int]] = defaultdict(dict)  # engine -> digest -> tokens
    for load in loads:
        request = requests[load.request]
        mine, seen = beginnings(request), known[load.engine]
        alike = [tokens for digest, tokens in mine.items() if seen.get(digest) == tokens]
        yield min(max(alike, default=0), request.prompt)
        seen.update(mine)


def _saved_before(
    loads: Sequence[LoadOf], requests: Sequence[Request], engines: Mapping[int, Engine], saved: Sequence[int]
) -> dict[int, LoadOf]:
    """Lookups of a prompt that an earlier request of this run saved, by row."""
    saves: dict[int, list[_Saved]] = defaultdict(list)
    for load in loads:
        whole = _saved_whole(load.request, requests[load.request], saved, engines[load.engine].pairs)
        if whole is not None:
            saves[load.engine].append(whole)
    places: dict[tuple[int, int, int], list[int]] = defaultdict(list)  # in ``saves``, of one prompt
    for engine, done in saves.items():
        done.sort(key=lambda one: (one.ended, one.row, one.tokens))
        for at, one in enumerate(done):
            places[(engine, requests[one.row].digest, requests[one.row].arrived)].append(at)
    ends = {engine: [one.ended for one in done] for engine, done in saves.items()}
    found = {}
    for load in loads:
        request = requests[load.request]
        same = places.get((load.engine, request.digest, request.arrived))
        if load.answer is None or not request.digest or not same:
            continue
        done = saves[load.engine]
        ended = bisect_left(ends[load.engine], load.step)
        at = same[bisect_left(same, ended) - 1]
        if at >= ended:
            continue
        between = done[at + 1 : min(ended, at + 1 + _BETWEEN)]
        found[load.request] = replace(
            load,
            saved_before=done[at].tokens,
            saved_by=requests[done[at].row].id,
            saved_by_row=done[at].row,
            others_between=len({requests[one.row].digest for one in between}),
        )
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
    before: Mapping[int, LoadOf],
    requests: Sequence[Request],
    engines: Mapping[int, Engine],
    written: set[int],
) -> set[int]:
    """Rows of misses that no eviction can explain: what was saved last is what is not found.

    A miss with other saves in between can be an eviction; it counts only where a prompt of the same
    length within its block was missed right after its save, and none of these was ever found.
    """
    by_kind: dict[tuple[int, int], list[LoadOf]] = defaultdict(list)
    for load in before.values():
        engine = engines[load.engine]
        # A saved prompt that leaves no token to compute may be out of bounds for a lookup in whole units.
        if not engine.looks_up or load.saved_before >= load.prompt:
            continue
        if load.saved_before > load.local and _settled(load, requests, written):
            block = max(1, requests[load.request].block or engine.block_size)
            by_kind[(load.engine, load.prompt % block)].append(load)
    found: set[int] = set()
    for group in by_kind.values():
        missed = [load for load in group if load.answer == 0]
        hit = any((load.answer or 0) > 0 for load in group)
        at_once = [load for load in missed if load.others_between == 0]
        found.update(load.request for load in (at_once if hit else missed if at_once else []))
    return found


def _settled(load: LoadOf, requests: Sequence[Request], written: set[int]) -> bool:
    """Whether the earlier save was surely done at this lookup."""
    earlier, lookup = requests[load.saved_by_row], requests[load.request].looked_up
    if all(entry.step in written for entry in earlier.entries if entry.slots > 0):
        return True
    if lookup is None or earlier.finish is None:
        return False
    return lookup.t - earlier.finish.t >= _SETTLED_NS


def _missed_saved(load: LoadOf, engines: Mapping[int, Engine]) -> LoadOf:
    """A miss of what had just been saved."""
    pairs = engines[load.engine].pairs
    missed = load.ends.get(LoadEnd.MISSED, 0)
    amount = min(load.saved_before - load.local, missed // pairs) * pairs
    ends = {**load.ends, LoadEnd.MISSED: missed - amount, LoadEnd.MISSED_SAVED: amount}
    return replace(load, ends={end: n for end, n in ends.items() if n})
