"""Every lost position gets its cause: the first stage that it failed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvtrace.causes.case import Case, Piece, add, assign, why_unheard
from kvtrace.causes.claims import NOT_OFFERED, Turn
from kvtrace.causes.outcomes import SAVE_CAUSE
from kvtrace.causes.registry import CLAIMS
from kvtrace.causes.tables import rows
from kvtrace.causes.whole import whole_tokens
from kvtrace.ledger.ends import SaveEnd
from kvtrace.ledger.intervals import Interval, subtract
from kvtrace.terms import Grade

_SPOILED = (SaveEnd.NOTHING_READ, SaveEnd.DROPPED, SaveEnd.NOT_AT_REST, SaveEnd.PUT_FAILED)
"""Ends behind which an exception may stand that was seen."""


def assign_pieces(case: Case, parts: Sequence[Case] = ()) -> None:
    """Fill ``case.assigned`` from the pieces of the run, to the last position.

    Args:
        parts: of several connectors inside one, each one's own case. They say why a piece was lost.
    """
    for row in rows(case.run.pieces):
        piece = Piece(*row)
        piece.ended, piece.grade = SaveEnd(piece.ended), Grade(piece.grade)
        of = case if piece.part < 0 else parts[piece.part]
        left: list[Interval] = [(piece.start, piece.end)]
        left = _claimed(case, of, piece, left, (Turn.ENGINE,))
        if left and piece.ended in (SaveEnd.NOTHING_READ, SaveEnd.PART_READ):
            left = _claimed(case, of, piece, left, (Turn.UNREAD,))
        if left and piece.ended in _SPOILED:
            left = _claimed(case, of, piece, left, (Turn.SPOILED,))
        if left and piece.ended in SAVE_CAUSE:
            assign(case, SAVE_CAUSE[piece.ended], piece, left)
            case.ends.add(piece.ended)
            continue
        asked = [one for one in parts if piece.engine in one.engines] if piece.part >= 0 else [case]
        if left and not all(seen_lost(one, piece) for one in asked):
            add(case, case.unheard, piece, left)
            continue
        left = _claimed(case, of, piece, left, NOT_OFFERED)
        assert not left, f"positions {left} of request {piece.request} without a cause"
    case.whole = whole_tokens(case)


def seen_lost(case: Case, piece: Piece) -> bool:
    """Whether positions that no metadata names were not stored: their slots were seen not to be read, or the
    metadata of all their steps was. A save in the background that came back contradicts both."""
    request = case.requests[piece.request]
    came_back = request.handed_over and not request.saved and not request.entries
    blind = piece.engine in case.declared_saves  # nothing of what this connector reads was ever seen
    return (piece.grade >= Grade.READ and not came_back and not blind) or not why_unheard(case, request)


def _claimed(
    case: Case, of: Case, piece: Piece, left: list[Interval], turns: Iterable[Turn]
) -> list[Interval]:
    """What is left after the claims of these turns, made on the case ``of`` the connector that lost it."""
    for cause, claim in (pair for turn in turns for pair in CLAIMS[turn]):
        if not left:
            break
        taken = claim(of, piece, left)
        if taken:
            assign(case, cause.id, piece, taken)
            left = subtract(left, taken)
    return left
