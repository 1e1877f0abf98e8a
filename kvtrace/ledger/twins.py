"""Tokens that stood in an earlier prompt already: its beginnings, and parts behind another beginning.

The KV of a token depends on all tokens before it: equal tokens behind another beginning have other KV. A
store whose keys leave the beginning out takes one for the other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from kvtrace.ledger.intervals import Interval
from kvtrace.ledger.requests import Request

_MOST_REQUESTS = 20_000
"""Requests of an engine that are compared: a rule of a store shows in them."""
_MOST_BEGINNINGS = 16
_MOST_PLACES = 4
"""Of one part, with each of so many beginnings before it."""


def beginnings(request: Request) -> dict[int, int]:
    """The digests of a prompt and of its beginnings -> how many tokens each has."""
    found = dict(request.prefixes)
    if request.prefix and request.block > 0:
        found[request.prefix] = (request.arrived - 1) // request.block * request.block
    if request.digest:
        found[request.digest] = request.arrived
    return found


def in_common(requests: Sequence[Request]) -> dict[int, tuple[tuple[int, int], ...]]:
    """Of each request (by row) its beginnings that another one of the run has too, as (digest, tokens); in
    the order in which they began."""
    rows: dict[tuple[int, int], list[int]] = defaultdict(list)
    for row, request in enumerate(requests):
        for beginning in beginnings(request).items():
            rows[beginning].append(row)
    found: dict[int, tuple[tuple[int, int], ...]] = defaultdict(tuple)
    for beginning, those in rows.items():
        for row in those if len(those) > 1 else ():
            found[row] += (beginning,)
    return {row: found[row] for row in sorted(found, key=lambda row: requests[row].t_first)}


@dataclass(frozen=True)
class Twin:
    """Positions of a request, and those of an earlier one (its row) with the same tokens, behind others."""

    at: Interval
    of: int
    there: Interval


_Beginning = tuple[int, int]
"""How many tokens come before a part, and their digest."""


def twins(requests: Sequence[Request]) -> dict[int, tuple[Twin, ...]]:
    """Of each request (by row) its parts with a twin, in order; of several twins a few."""
    known: dict[tuple[int, int, int], dict[_Beginning, list[int]]] = defaultdict(dict)
    seen: Counter[int] = Counter()
    found: dict[int, tuple[Twin, ...]] = {}
    for row in sorted(range(len(requests)), key=lambda row: requests[row].t_first):
        request = requests[row]
        seen[request.engine] += 1
        if not request.parts or seen[request.engine] > _MOST_REQUESTS:
            continue
        beginnings = {tokens: digest for digest, tokens in request.prefixes.items()}
        mine: list[Twin] = []
        for i, digest in enumerate(request.parts):
            start, size = i * request.stride, request.stride
            own = start, beginnings.get(start, 0)
            places = known[request.engine, size, digest]
            for other, rows in places.items():
                if other != own:
                    there = other[0], other[0] + size
                    mine += [Twin((start, start + size), of, there) for of in rows]
            if own in places or len(places) < _MOST_BEGINNINGS:
                here = places.setdefault(own, [])
                if len(here) < _MOST_PLACES:
                    here.append(row)
        if mine:
            found[row] = tuple(mine)
    return found
