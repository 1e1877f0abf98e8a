"""Tokens that were read for a later request alone, which reuses their blocks.

Where a request is stored, so is its beginning, that the GPU's prefix cache gave it from an earlier one. That
tells of the later request: the earlier one may be stored less far, in units of its own prompt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from kvtrace.ledger.ends import EVER, Doubt
from kvtrace.ledger.intervals import Interval, intersect, subtract, union
from kvtrace.ledger.requests import Request
from kvtrace.ledger.slots.reads import Touch

_At = tuple[int, int, int]
"""(step, time, layers) of a read."""


def with_reused(
    doubts: Mapping[int, Doubt], requests: Sequence[Request], reads: Sequence[Mapping[int, Sequence[Touch]]]
) -> dict[int, Doubt]:
    """The doubts, with what was read of requests for later ones alone, and was in no metadata before these
    began: blocks that the metadata names later may be meant for them as well.

    Args:
        reads: what was read of the requests, by row; of each worker.
    """
    found: dict[int, list[Interval]] = defaultdict(list)
    for of_worker in reads:
        latest = _latest(requests, of_worker)
        for row, touches in of_worker.items():
            found[row] += _for_later(requests, row, touches, latest)
    result = dict(doubts)
    for row, parts in found.items():
        if parts:
            start, unknown = doubts.get(row, Doubt(EVER))
            result[row] = Doubt(start, tuple(union([*unknown, *parts])))
    return result


def _latest(requests: Sequence[Request], reads: Mapping[int, Sequence[Touch]]) -> dict[_At, int]:
    """Of each read the request that came last."""
    found: dict[_At, int] = {}
    for row, touches in reads.items():
        for touch in touches:
            at = touch.step, touch.t, touch.columns
            if at not in found or requests[found[at]].first_step < requests[row].first_step:
                found[at] = row
    return found


def _for_later(
    requests: Sequence[Request], row: int, touches: Sequence[Touch], latest: Mapping[_At, int]
) -> list[Interval]:
    own: list[Interval] = []
    others: list[Interval] = []
    began = requests[row].last_step
    for touch in touches:
        by = requests[latest[touch.step, touch.t, touch.columns]]
        later = by.first_step > requests[row].last_step
        shared = intersect(list(touch.positions), union(by.reused)) if later else []
        began = max(began, by.first_step) if shared else began
        others += shared
        own += subtract(list(touch.positions), shared)
    named = [(one.start, one.start + one.slots) for one in requests[row].entries if 0 < one.step < began]
    return subtract(union(others), union([*own, *named]))
