"""Tokens that stood in an earlier prompt already, behind another beginning.

The KV of a token depends on all tokens before it: equal tokens behind another beginning have other KV. A
store whose keys leave the beginning out takes one for the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from kvtrace.ledger.intervals import Interval
from kvtrace.ledger.requests import Request

_MOST = 64
"""Earlier places of one part that are kept."""


@dataclass(frozen=True)
class Twin:
    """Positions of a request, and those of an earlier one (its row) with the same tokens, behind others."""

    at: Interval
    of: int
    there: Interval


def twins(requests: Sequence[Request]) -> dict[int, tuple[Twin, ...]]:
    """Of each request (by row) its parts with a twin, in order; of several twins all."""
    known: dict[tuple[int, int], list[tuple[int, Interval, int]]] = defaultdict(list)
    found: dict[int, tuple[Twin, ...]] = {}
    for row in sorted(range(len(requests)), key=lambda row: requests[row].t_first):
        request = requests[row]
        beginnings = {tokens: digest for digest, tokens in request.prefixes.items()}
        mine: list[Twin] = []
        for at, digest in sorted(request.parts.items()):
            before = beginnings.get(at[0], 0)
            places = known[request.engine, digest]
            mine += [
                Twin(at, of, there) for of, there, other in places if (there[0], other) != (at[0], before)
            ]
            if len(places) < _MOST:
                places.append((row, at, before))
        if mine:
            found[row] = tuple(mine)
    return found
