"""How far prompts were kept, as the ledger saw it: whatever their metadata says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from kvtrace.ledger.ends import SaveEnd
from kvtrace.ledger.run import Engine, Run
from kvtrace.terms import Grade

_ROUNDED = (SaveEnd.NOT_DECLARED, SaveEnd.NOTHING_READ, SaveEnd.PART_READ)
"""Ends of tokens that the connector may have rounded away."""


def kept(run: Run, engines: Mapping[int, Engine]) -> dict[int, int]:
    """Of each request (row in Run.requests) how many of its first tokens were seen to be kept in every pair,
    and those that follow in none; without those that fared otherwise, or of which any position is not seen,
    or was lost for another reason than that nobody read it."""
    lost: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    odd: set[int] = set()
    for span in run.lost:
        if span.phase == "decode":
            continue
        if span.grade < Grade.READ or span.ended not in _ROUNDED:
            odd.add(span.request)
        lost[span.request].append((span.start, span.end, span.pairs))
    found: dict[int, int] = {}
    for row, request in enumerate(run.requests):
        if row not in odd and request.engine in engines and request.computed >= request.prompt:
            end = _kept(lost.get(row, []), request.prompt, engines[request.engine].pairs)
            found |= {row: end} if end is not None else {}
    return found


def _kept(pieces: list[tuple[int, int, int]], prompt: int, pairs: int) -> int | None:
    begin = min((start for start, _, _ in pieces), default=prompt)
    size = sum((end - start) * n for start, end, n in pieces)
    return begin if size == (prompt - begin) * pairs else None
