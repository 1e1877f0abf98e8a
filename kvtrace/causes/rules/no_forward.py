"""no-forward: a store entry in a step without tokens."""

from __future__ import annotations

from kvtrace.causes.rule import LIMIT, SAVES, Case, Cause, Results, SaveEnd, Stage
from kvtrace.words import count

CAUSE = Cause(
    id="no-forward",
    stage=Stage.FORWARD,
    severity=LIMIT,
    ledger=SAVES,
    meaning=(
        "The step had nothing to compute, so no layer hook ran; the stores in its metadata were not done."
    ),
    seen_as="A store entry in a step without tokens.",
    remedy="Store in wait_for_save or get_finished what must also be stored without a forward.",
    save_ends=(SaveEnd.NO_FORWARD,),
)


def rule(case: Case) -> Results:
    if case.affected(CAUSE):
        idle = sum(worker.no_forward_steps for worker in case.run.workers())
        yield case.finding(
            CAUSE,
            "Store entries were in steps with nothing to compute, where no layer hook runs.",
            evidence=[f"{count(idle)} worker-steps had nothing to compute"],
            headline="what was to be stored came in steps without a forward",
        )
