"""aborted-before-save: the request was aborted before its tokens were offered."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes.case import Case, Piece
from kvtrace.causes.left_early import ABORTED, only_this_one
from kvtrace.causes.model import Event, Finding, RuledOut
from kvtrace.ledger.intervals import Interval
from kvtrace.words import capital, count, of_all, plural

ID = "aborted-before-save"


def claim(case: Case, piece: Piece, left: list[Interval]) -> list[Interval]:
    request = case.requests[piece.request]
    if request.status != ABORTED:
        return []
    return left if only_this_one(case, request) else []


def rule(case: Case) -> Iterator[Finding | RuledOut]:
    rows = [case.requests[row] for row in case.booked[ID].requests] if ID in case.booked else []
    aborted = [r for r in case.requests if r.status == ABORTED]
    if not rows:
        if aborted:
            yield RuledOut(ID, f"{plural(len(aborted), 'request')} aborted, none with tokens that were due")
        elif case.requests:
            yield RuledOut(ID, f"no abort of {plural(len(case.requests), 'request')}")
        return
    in_prefill = sum(r.computed < r.prompt for r in rows)
    yield case.finding(
        ID,
        f"{capital(of_all(len(rows), len(aborted), 'aborted request'))} had computed tokens that were not "
        "offered "
        "yet.",
        evidence=[
            f"status {ABORTED} of {plural(len(rows), 'request')}, {count(in_prefill)} of them in the "
            "middle of the "
            f"prompt; {count(sum(not r.entries for r in rows))} without any store entry",
            "requests of this run that were not aborted were offered in full",
        ],
        events=[
            Event(r.id, r.last_step, f"aborted after {count(r.computed)} of {count(r.prompt)} prompt tokens")
            for r in rows[:3]
        ],
        headline=f"{plural(len(rows), 'request')} left before all that was computed had been offered",
        remedy=[
            "look at the client's timeouts and disconnects",
            "or let the connector offer each chunk as it is computed instead of whole prompts",
        ],
    )
