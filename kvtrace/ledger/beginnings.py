"""Beginnings of prompts that others of a run have too, by their digests."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from kvtrace.ledger.requests import Request


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
