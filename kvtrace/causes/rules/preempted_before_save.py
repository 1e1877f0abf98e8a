"""preempted-before-save: the request lost its KV before the connector was offered it."""

from __future__ import annotations

from kvtrace.causes.evidence.prompts import nothing_else_explains, offered_of_others, unexplained
from kvtrace.causes.rule import LIMIT, SAVES, Case, Cause, Interval, LostSpan, Results, Stage, Turn
from kvtrace.words import capital, count, of_all, plural

CAUSE = Cause(
    id="preempted-before-save",
    stage=Stage.SCHEDULE,
    severity=LIMIT,
    ledger=SAVES,
    meaning=(
        "The request was preempted, and what it had computed (or computed again) was not offered for saving."
    ),
    seen_as=(
        "A preemption, no store entry for the positions, and requests of the same run that were not "
        "preempted and were offered in full."
    ),
    remedy=(
        "Treat resumed requests like new ones in build_connector_meta. Or avoid preemption in the whole "
        "engine: more KV cache memory, or fewer sequences at once (--max-num-seqs), which lowers "
        "throughput."
    ),
)


def claim(case: Case, span: LostSpan, unclaimed: list[Interval]) -> list[Interval]:
    request = case.requests[span.request]
    if not request.preemptions or not request.preempt_step:
        return []
    return unclaimed if nothing_else_explains(case, request) else []


def _read_late(case: Case) -> set[int]:
    """Requests whose blocks may have gone to another before they were read: a preemption gives them away."""
    found = (case.assigned.get(ident) for ident in ("kv-misplaced", "kv-stale"))
    return {row for one in found if one is not None for row in one.requests}


CLAIMS = {Turn.REQUEST: claim}


def rule(case: Case) -> Results:
    rows = case.affected(CAUSE)
    preempted = [r for r in case.requests if r.preemptions]
    if not rows:
        lost, late = unexplained(case), _read_late(case)
        if case.requests and not any(r.unseen or r.row in lost or r.row in late for r in preempted):
            yield CAUSE.ruled_out(
                f"{plural(len(preempted), 'request')} preempted, none that lost tokens by it"
            )
        return
    engine = case.engines[rows[0].engine]
    stored = sum(any(e.step > r.preempt_step for e in r.entries) for r in rows)
    yield case.finding(
        CAUSE,
        f"{capital(of_all(len(rows), len(preempted), 'preempted request'))} lost tokens: they were "
        "preempted, and not all of their tokens were seen to be offered again.",
        evidence=[
            f"{plural(sum(r.preemptions for r in rows), 'preemption')} of {plural(len(rows), 'request')}; "
            f"tokens of {count(stored)} of them were offered after it",
            *offered_of_others(case, rows),
            f"at most {engine.facts.max_num_seqs or 0} sequences at once (--max-num-seqs)",
        ],
        headline=f"{plural(len(rows), 'request')} lost tokens to preemption",
        remedy=[
            "in the connector: treat resumed requests (scheduled_cached_reqs.resumed_req_ids) like new ones",
            "or avoid preemption in the whole engine: more KV cache memory, or fewer sequences at once "
            "(--max-num-seqs), which lowers throughput",
        ],
    )
