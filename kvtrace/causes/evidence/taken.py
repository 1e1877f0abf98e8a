"""How far prompts were kept, as the ledger saw it: whatever their metadata says."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from kvtrace.ledger.ends import SaveEnd
from kvtrace.ledger.intervals import Interval, subtract, union
from kvtrace.ledger.run import Engine, Run
from kvtrace.terms import Grade

_ROUNDED = (SaveEnd.NOT_DECLARED, SaveEnd.NOTHING_READ, SaveEnd.PART_READ)
"""Ends of tokens that the connector may have rounded away."""


@dataclass(frozen=True)
class Kept:
    """What was seen to be kept of one request's prompt.

    Attributes:
        end: positions [0, end) were kept in every pair, those that follow in none; None: it fared otherwise.
        middle: in every pair alike only [start, end) was kept, with start > 0; None: it fared otherwise.
    """

    end: int | None
    middle: Interval | None = None


def kept(run: Run, engines: Mapping[int, Engine]) -> dict[int, Kept]:
    """Of each request (row in Run.requests) what was kept of its prompt; without those of which any position
    is not seen, or was lost for another reason than that nobody read it."""
    lost: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    odd: set[int] = set()
    for span in run.lost:
        if span.phase == "decode":
            continue
        if span.grade < Grade.READ or span.ended not in _ROUNDED:
            odd.add(span.request)
        lost[span.request].append((span.start, span.end, span.pairs))
    found = {}
    for row, request in enumerate(run.requests):
        if row not in odd and request.engine in engines and request.computed >= request.prompt:
            whole = request.prompt, engines[request.engine].pairs
            found[row] = _kept(lost.get(row, []), *whole, bool(request.saved))
    return found


def _kept(pieces: list[tuple[int, int, int]], prompt: int, pairs: int, saved: bool) -> Kept:
    begin = min((start for start, _, _ in pieces), default=prompt)
    size = sum((end - start) * n for start, end, n in pieces)
    if size == (prompt - begin) * pairs:
        return Kept(begin)
    parts = union((start, end) for start, end, n in pieces)
    if not saved or size != sum(end - start for start, end in parts) * pairs:
        return Kept(None)
    kept_parts = subtract([(0, prompt)], parts)
    middle = kept_parts[0] if len(kept_parts) == 1 and kept_parts[0][0] > 0 else None
    return Kept(None, middle)
