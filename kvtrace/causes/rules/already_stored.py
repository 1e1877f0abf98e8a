"""already-stored: the connector holds these tokens."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes.case import Case, Piece, Request, stored_before
from kvtrace.causes.model import Finding, RuledOut
from kvtrace.ledger.intervals import Interval
from kvtrace.words import plural

ID = "already-stored"


def held(case: Case, request: Request) -> int:
    """Leading positions that the connector holds: by an earlier store of the same tokens, by its
    own answer at the lookup, or by where its store of this request begins."""
    answered = request.local + request.offered if request.offered > 0 else 0
    begins = min((e.start for e in request.entries if e.slots > 0), default=0)
    return max(stored_before(case, request), answered, begins)


def claim(case: Case, piece: Piece, left: list[Interval]) -> list[Interval]:
    if piece.phase == "decode":
        return []
    end_held = held(case, case.requests[piece.request])
    return [(start, min(end, end_held)) for start, end in left if start < end_held]


def claim_unread(case: Case, piece: Piece, left: list[Interval]) -> list[Interval]:
    """Of what the save hook was given and did not read: what an earlier request had saved. The worker
    may well look whether a key is there."""
    end_held = stored_before(case, case.requests[piece.request], saved=True)
    return [(start, min(end, end_held)) for start, end in left if start < end_held]


def rule(case: Case) -> Iterator[Finding | RuledOut]:
    booked = case.booked.get(ID)
    if booked is None:
        looked = [r for r in case.requests if r.offered >= 0]
        if looked:
            hits = sum(r.offered > 0 for r in looked)
            yield RuledOut(
                ID,
                f"{plural(hits, 'hit')} in {plural(len(looked), 'lookup')}, and no prompt that an earlier "
                "store of this run covers was left out",
            )
        return
    rows = [case.requests[row] for row in booked.requests]
    here = sum(stored_before(case, r) > 0 for r in rows)
    hits = sum(r.offered > 0 for r in rows)
    skipped = len(rows) - sum(stored_before(case, r) > 0 or r.offered > 0 for r in rows)
    parts = []
    if here:
        parts.append(
            f"an earlier request of this run with the same tokens stored them ({plural(here, 'request')})"
        )
    if hits:
        parts.append(f"the lookup answered a hit ({plural(hits, 'request')})")
    if skipped:
        parts.append(f"the store begins after them ({plural(skipped, 'request')})")
    whole = [r for r in rows if not r.external and booked.requests[r.row] and not r.entries]
    title = "The connector holds these tokens already and does not store them again"
    if not whole:
        title += ": what a hit leaves to compute"
    yield case.finding(
        ID,
        f"{title} ({plural(len(rows), 'request')}).",
        evidence=["; ".join(parts)],
        events=case.events(ID, "computed again, no store: held by the connector"),
        headline=f"{plural(len(whole), 'prompt')} that the connector holds already "
        f"{'was' if len(whole) == 1 else 'were'} computed again"
        if whole
        else "the rest is what hits in the connector's store leave to compute",
    )
