"""Parts of prompts that were left out because an earlier prompt holds the same tokens, behind others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from kvtrace.causes.tables import rows
from kvtrace.ledger.ends import SaveEnd
from kvtrace.ledger.intervals import Interval, intersect, subtract, union
from kvtrace.ledger.model import Run

Intervals = dict[int, list[Interval]]
"""Positions by request (row in Run.requests)."""


def taken_for_twins(run: Run) -> Mapping[int, Sequence[Interval]]:
    """Positions that no metadata names and whose tokens an earlier request had stored behind other tokens.

    Only of engines in which this is the rule: no such part was ever stored again, and up to its last one a
    request lost nothing else.
    """
    lost, unnamed = _lost(run)
    found: Intervals = defaultdict(list)
    no_rule: set[int] = set()
    requests = list(rows(run.requests))
    for row, parts in run.twins.items():
        held = union(twin.at for twin in parts if _stored(requests, lost, twin.of, twin.there))
        if not held:
            continue
        missing = intersect(unnamed.get(row, []), [(0, held[-1][1])])
        if intersect(held, missing) != held or subtract(missing, held):
            no_rule.add(requests[row].engine)
        found[row] = held
    return {row: parts for row, parts in found.items() if requests[row].engine not in no_rule}


def _lost(run: Run) -> tuple[Intervals, Intervals]:
    """What was lost of each prompt, in any pair; and what of it no metadata names."""
    lost: Intervals = defaultdict(list)
    unnamed: Intervals = defaultdict(list)
    for piece in rows(run.pieces):
        if piece.phase != "decode":
            lost[piece.request].append((piece.start, piece.end))
            if piece.ended == SaveEnd.NOT_DECLARED:
                unnamed[piece.request].append((piece.start, piece.end))
    return tuple({row: union(parts) for row, parts in of.items()} for of in (lost, unnamed))  # type: ignore[return-value]


def _stored(requests: Sequence[object], lost: Intervals, row: int, part: Interval) -> bool:
    saved = getattr(requests[row], "saved", 0)
    return bool(saved) and not intersect(lost.get(row, []), [part])
