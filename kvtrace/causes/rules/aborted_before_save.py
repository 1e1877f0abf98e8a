"""aborted-before-save: the request was aborted before its tokens were offered."""

from __future__ import annotations

from kvtrace.causes.evidence.prompts import ABORTED, nothing_else_explains, offered_of_others, unexplained
from kvtrace.causes.rule import LIMIT, SAVES, Case, Cause, Interval, LostSpan, Results, Stage, Turn
from kvtrace.words import capital, count, of_all, plural

CAUSE = Cause(
    id="aborted-before-save",
    stage=Stage.SCHEDULE,
    severity=LIMIT,
    ledger=SAVES,
    meaning="The request was aborted before what it had computed was offered for saving.",
    seen_as=(
        "A finish with status FINISHED_ABORTED, no store entry for the positions, and requests of the same "
        "run that were not aborted and were offered in full."
    ),
    remedy="Offer each chunk as it is computed. Or look at the client's timeouts and disconnects.",
)


def claim(case: Case, span: LostSpan, unclaimed: list[Interval]) -> list[Interval]:
    request = case.requests[span.request]
    if request.status != ABORTED:
        return []
    return unclaimed if nothing_else_explains(case, request) else []


CLAIMS = {Turn.REQUEST: claim}


def rule(case: Case) -> Results:
    rows = case.affected(CAUSE)
    aborted = [r for r in case.requests if r.status == ABORTED]
    if not rows:
        lost = unexplained(case)
        if case.requests and not any(r.unseen or r.row in lost for r in aborted):
            yield CAUSE.ruled_out(
                f"{plural(len(aborted), 'request')} aborted, none with tokens that should have been offered"
            )
        return
    in_prefill = sum(r.computed < r.prompt for r in rows)
    yield case.finding(
        CAUSE,
        f"{capital(of_all(len(rows), len(aborted), 'aborted request'))} had computed tokens that were not "
        "offered yet.",
        evidence=[
            f"status {ABORTED} of {plural(len(rows), 'request')}, {count(in_prefill)} of them in the "
            f"middle of the prompt; {count(sum(not r.entries for r in rows))} that the metadata never names",
            *offered_of_others(case, rows),
        ],
        headline=f"{plural(len(rows), 'request')} aborted before all computed tokens had been offered",
        remedy=[
            "let the connector offer each chunk as it is computed instead of whole prompts",
            "or look at the client's timeouts and disconnects",
        ],
    )
