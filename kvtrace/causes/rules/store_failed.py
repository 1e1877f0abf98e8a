"""store-failed: KV that was read, and that the store did not take."""

from __future__ import annotations

from kvtrace.causes.evidence import unstored
from kvtrace.causes.evidence.logs import exception_line, logs_in
from kvtrace.causes.rule import FAULT, SAVES, Case, Cause, Results, SaveEnd, Stage
from kvtrace.ledger.reported import BACKGROUND, SAVE_HOOKS
from kvtrace.words import plural

CAUSE = Cause(
    id="store-failed",
    stage=Stage.COMPLETION,
    severity=FAULT,
    ledger=SAVES,
    meaning="The KV was read, and the store refused it or an exception ended its way there.",
    seen_as=(
        "The slots were read, the connections that were asked for were refused, and nothing went to a "
        "file or a peer."
    ),
    remedy=(
        "Look at the exception, or at what the store answered; let a failed put be seen: raise it, "
        "count it, or report the blocks."
    ),
    save_ends=(SaveEnd.PUT_FAILED,),
)


def rule(case: Case) -> Results:
    hit = case.affected(CAUSE)
    if hit:
        caught = unstored.caught_there(case, CAUSE)
        yield case.finding(
            CAUSE,
            f"The store did not take the KV of {plural(len(hit), 'request')}: it was read, and the put "
            "failed.",
            evidence=[
                *map(exception_line, caught),
                *unstored.where(case, CAUSE),
                *logs_in(case, (*SAVE_HOOKS, *BACKGROUND)),
            ],
            headline="the store did not take the KV",
            remedy=[*unstored.look_there(caught), CAUSE.remedy],
        )
