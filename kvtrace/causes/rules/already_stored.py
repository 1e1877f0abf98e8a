"""already-stored: the connector holds these tokens."""

from __future__ import annotations

from kvtrace.causes.case import shared_before, stored_before
from kvtrace.causes.evidence.prompts import held
from kvtrace.causes.rule import LIMIT, SAVES, Case, Cause, Interval, Piece, Results, Stage, Turn
from kvtrace.words import plural

CAUSE = Cause(
    id="already-stored",
    stage=Stage.SCHEDULE,
    severity=LIMIT,
    ledger=SAVES,
    meaning="The connector holds these tokens already, so it does not store them again.",
    seen_as="No store entry, and an earlier store of the same tokens in this trace, or a hit at the lookup.",
    remedy=(
        "Nothing to fix. Let such prompts load (kv_role kv_both, no prompt_logprobs) if they should not be "
        "computed again."
    ),
)


def claim(case: Case, piece: Piece, left: list[Interval]) -> list[Interval]:
    if piece.phase == "decode":
        return []
    end_held = held(case, case.requests[piece.request])
    return [(start, min(end, end_held)) for start, end in left if start < end_held]


def claim_unread(case: Case, piece: Piece, left: list[Interval]) -> list[Interval]:
    """Of what the save hook was given and did not read: what an earlier request had saved. The worker
    may well look whether a key is there."""
    request = case.requests[piece.request]
    end_held = max(stored_before(case, request, saved=True), shared_before(case, request))
    return [(start, min(end, end_held)) for start, end in left if start < end_held]


CLAIMS = {Turn.POSITION: claim, Turn.UNREAD: claim_unread}


def rule(case: Case) -> Results:
    rows = case.affected(CAUSE)
    if not rows:
        looked = [r for r in case.requests if r.offered >= 0]
        if looked and not any(engine.unreadable_steps for engine in case.run.engines):
            hits = sum(r.offered > 0 for r in looked)
            yield CAUSE.ruled_out(
                f"{plural(hits, 'hit')} in {plural(len(looked), 'lookup')}, and no prompt that an earlier "
                "store of this run covers was left out"
            )
        return
    here = sum(max(stored_before(case, r), shared_before(case, r)) > 0 for r in rows)
    hits = sum(r.offered > 0 for r in rows)
    skipped = len(rows) - sum(
        max(stored_before(case, r), shared_before(case, r), r.offered) > 0 for r in rows
    )
    parts = []
    if here:
        parts.append(
            "an earlier request of this run that begins with the same tokens stored them "
            f"({plural(here, 'request')})"
        )
    if hits:
        parts.append(f"the lookup answered a hit ({plural(hits, 'request')})")
    if skipped:
        parts.append(f"the store begins after them ({plural(skipped, 'request')})")
    whole = [r for r in rows if not r.external and not r.entries]
    title = "The connector holds these tokens already and does not store them again"
    if not whole:
        title += ": they are what a hit leaves to compute"
    yield case.finding(
        CAUSE,
        f"{title} ({plural(len(rows), 'request')}).",
        evidence=["; ".join(parts)],
        events=case.events(CAUSE, "computed again, no store: held by the connector"),
        headline=f"{plural(len(whole), 'prompt')} that the connector holds already "
        f"{'was' if len(whole) == 1 else 'were'} computed again"
        if whole
        else "the connector's store holds them already (what a hit leaves to compute)",
    )
