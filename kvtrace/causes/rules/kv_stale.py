"""kv-stale: KV that was read before the forward had written it."""

from __future__ import annotations

from kvtrace.causes.evidence import unstored
from kvtrace.causes.rule import FAULT, SAVES, Case, Cause, Results, SaveEnd, Stage
from kvtrace.words import plural

CAUSE = Cause(
    id="kv-stale",
    stage=Stage.EFFECT,
    severity=FAULT,
    ledger=SAVES,
    meaning="The connector read KV slots before their tokens were computed.",
    seen_as=(
        "A slot of the token was read, the read came before the layer's attention of the step "
        "that computed it, and no later read of that slot is in the trace."
    ),
    remedy=(
        "Copy in save_kv_layer of the same layer or later, and only tokens that this step or an earlier one "
        "computed."
    ),
    save_ends=(SaveEnd.STALE,),
)

_RESUMED = (
    "when a request resumes (scheduled_cached_reqs.resumed_req_ids), count what is computed from its "
    "num_computed_tokens anew: what was computed before it was preempted is gone"
)


def rule(case: Case) -> Results:
    hit = case.affected(CAUSE)
    if hit:
        preempted = all(request.preemptions for request in hit)
        yield case.finding(
            CAUSE,
            f"{plural(len(hit), 'request')} had KV slots read before they were computed, and never after.",
            evidence=[
                *unstored.where(case, CAUSE),
                "the slots were read before the attention of their layer had run in the step that computes "
                "them, and in no call after it: what was read is what stood there before",
                *([f"each was preempted ({plural(len(hit), 'request')})"] if preempted else []),
            ],
            remedy=[*([_RESUMED] if preempted else []), CAUSE.remedy],
            events=case.events(CAUSE, "its slots were read before they were computed, and not again"),
            headline="KV was read before it was computed",
        )
