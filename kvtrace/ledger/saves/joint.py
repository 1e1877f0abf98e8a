"""A request's positions with several connectors: saved where any of them saved it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from kvtrace.ledger.ends import NOT_LOADED, NOT_SAVED, Outcome, SaveEnd
from kvtrace.ledger.saves.positions import PositionsEvidence, Segment, merged
from kvtrace.terms import LOADED, LOCAL_HIT, NOT_OBSERVED, PENDING, SAVED

_FIRST = (LOADED, NOT_LOADED, SAVED, PENDING, NOT_OBSERVED, LOCAL_HIT, NOT_SAVED)
"""What is true of a position is the first of these that any of the connectors says: one that brought it or
stored it is enough, and what one of them did unseen may have been a save."""


def joint_segments(parts: Sequence[tuple[int, PositionsEvidence]], pair: int) -> list[Segment]:
    """As :meth:`PositionsEvidence.segments`, of one request's ways by each connector's number."""
    ordered = sorted(parts, key=lambda one: one[1].pairs.only_loads)  # those say last why none stored it
    return merged(_joined([(part, way.segments(pair)) for part, way in ordered]))


def _joined(parts: Sequence[tuple[int, list[Segment]]]) -> Iterator[Segment]:
    marks = sorted({mark for _, found in parts for one in found for mark in (one.start, one.end)})
    at = [0] * len(parts)
    for start, end in pairwise(marks):
        here: list[tuple[int, Segment]] = []
        for i, (part, found) in enumerate(parts):
            while at[i] < len(found) and found[at[i]].end <= start:
                at[i] += 1
            if at[i] < len(found) and found[at[i]].start <= start:
                here.append((part, found[at[i]]))
        if here:
            yield _one(start, end, here)


def _one(start: int, end: int, here: Sequence[tuple[int, Segment]]) -> Segment:
    """Positions of which each connector has one outcome."""
    name = min((one.outcome.name for _, one in here), key=_FIRST.index)
    said = [(part, one) for part, one in here if one.outcome.name == name]
    if name == NOT_SAVED:
        # The one that came furthest says why; that none stored it is seen as well as of the least.
        part, best = max(said, key=lambda pair: _stage(pair[1].outcome))
        grade = min(one.outcome.grade for _, one in said)
        outcome = replace(best.outcome, grade=grade)
    else:
        part, best = max(said, key=lambda pair: (pair[1].outcome.grade, not pair[1].outcome.sent_to))
        outcome = best.outcome
    return Segment(start, end, outcome, best.chunk, part)


def _stage(outcome: Outcome) -> int:
    """The ends of what metadata named are in the order of the stages; what none named went less far."""
    return 0 if outcome.end == SaveEnd.NOT_DECLARED else outcome.code
