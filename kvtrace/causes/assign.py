"""Every lost position gets its cause: the first stage that it failed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtrace.causes.case import Case, add, assign, why_unheard
from kvtrace.causes.claims import NOT_OFFERED, Turn
from kvtrace.causes.outcomes import SAVE_CAUSE
from kvtrace.causes.registry import CLAIMS
from kvtrace.causes.whole import whole_tokens
from kvtrace.ledger.ends import SaveEnd
from kvtrace.ledger.intervals import Interval, subtract
from kvtrace.ledger.run import LostSpan
from kvtrace.terms import Grade

_MAY_BE_CAUGHT = (SaveEnd.NOTHING_READ, SaveEnd.NOT_AT_REST, SaveEnd.PUT_FAILED)
"""Ends behind which an exception may stand that was seen."""


def assign_spans(case: Case, parts: Sequence[Case] = ()) -> None:
    """Fill ``case.assigned`` with all that was lost, to the last position.

    Args:
        parts: of several connectors inside one, each one's own case. They say why a span was lost.
    """
    for span in case.run.lost:
        of = case if span.part < 0 else parts[span.part]
        unclaimed: list[Interval] = [(span.start, span.end)]
        unclaimed = _claimed(case, of, span, unclaimed, (Turn.ENGINE,))
        if unclaimed and span.ended in (SaveEnd.NOTHING_READ, SaveEnd.PART_READ):
            unclaimed = _claimed(case, of, span, unclaimed, (Turn.UNREAD,))
        if unclaimed and span.ended in _MAY_BE_CAUGHT:
            unclaimed = _claimed(case, of, span, unclaimed, (Turn.READ,))
        if unclaimed and span.ended in SAVE_CAUSE:
            assign(case, SAVE_CAUSE[span.ended], span, unclaimed)
            case.ends.add(span.ended)
            continue
        asked = [one for one in parts if span.engine in one.engines] if span.part >= 0 else [case]
        if unclaimed and not all(seen_lost(one, span) for one in asked):
            add(case, case.unheard, span, unclaimed)
            continue
        unclaimed = _claimed(case, of, span, unclaimed, NOT_OFFERED)
        assert not unclaimed, f"positions {unclaimed} of request {span.request} without a cause"
    case.whole = whole_tokens(case)


def seen_lost(case: Case, span: LostSpan) -> bool:
    """Whether positions that no metadata names were not stored: their slots were seen not to be read, or the
    metadata of all their steps was. A save in the background that came back contradicts both."""
    request = case.requests[span.request]
    came_back = request.handed_over and not request.saved and not request.entries
    blind = span.engine in case.declared_saves  # nothing of what this connector reads was ever seen
    return (span.grade >= Grade.READ and not came_back and not blind) or not why_unheard(case, request)


def _claimed(
    case: Case, of: Case, span: LostSpan, unclaimed: list[Interval], turns: Iterable[Turn]
) -> list[Interval]:
    """What is left after the claims of these turns, made on the case ``of`` the connector that lost it."""
    for cause, claim in (pair for turn in turns for pair in CLAIMS[turn]):
        if not unclaimed:
            break
        taken = claim(of, span, unclaimed)
        if taken:
            assign(case, cause.id, span, taken)
            unclaimed = subtract(unclaimed, taken)
    return unclaimed
