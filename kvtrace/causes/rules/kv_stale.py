"""kv-stale: KV that was read before the forward had written it."""

from __future__ import annotations

from kvtrace.causes.evidence import unstored
from kvtrace.causes.rule import FAULT, SAVES, Case, Cause, LoadEnd, Results, SaveEnd, Stage
from kvtrace.words import plural

CAUSE = Cause(
    id="kv-stale",
    stage=Stage.EFFECT,
    severity=FAULT,
    ledger=SAVES,
    meaning="The connector read KV slots before their tokens were computed.",
    seen_as=(
        "A slot of the token was read, the read came before the layer's attention of the step "
        "that computed it, or in a step that vLLM threw away, as the request's load had failed; and no later "
        "read of that slot is in the trace."
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
_IN_VAIN = (
    "their loads failed: what these steps computed, behind KV that had not come, vLLM threw away and "
    "computed anew; the slots were read in such a step, and in no call after it"
)
_NOT_IN_VAIN = (
    "Store nothing of a request in a step in which its load fails (behind the blocks that "
    "get_block_ids_with_load_errors names), and offer these tokens again when they are computed anew."
)


def rule(case: Case) -> Results:
    hit = case.affected(CAUSE)
    if hit:
        preempted = all(request.preemptions for request in hit)
        failed = {row.request for row in case.run.load_rows if LoadEnd.FAILED in row.ends}
        in_vain = all(request.row in failed for request in hit)
        yield case.finding(
            CAUSE,
            f"{plural(len(hit), 'request')} had KV slots read before they were computed, and never after.",
            evidence=[
                *unstored.where(case, CAUSE),
                _IN_VAIN
                if in_vain
                else "the slots were read before the attention of their layer had run in the step that "
                "computes them, and in no call after it: what was read is what stood there before",
                *([f"each was preempted ({plural(len(hit), 'request')})"] if preempted else []),
            ],
            remedy=[_NOT_IN_VAIN] if in_vain else [*([_RESUMED] if preempted else []), CAUSE.remedy],
            headline="KV was read before it was computed",
        )
