"""preempted-before-save: the request lost its KV before the connector was offered it."""

from __future__ import annotations

from collections.abc import Sequence

from kvtrace.causes.case import CaseRequest
from kvtrace.causes.evidence.prompts import nothing_else_explains, offered_of_others, unexplained
from kvtrace.causes.rule import LIMIT, SAVES, Case, Cause, Event, Interval, LostSpan, Results, Stage, Turn
from kvtrace.causes.rules import kv_misplaced
from kvtrace.ledger.ends import LoadEnd
from kvtrace.trace.format import STEP_MASK
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
_OTHER_KV = (
    "{} of prompts that begin like theirs brought other KV: blocks that they had lost may have been offered "
    "in the place of their new ones"
)


def _came_back_wrong(case: Case, rows: Sequence[CaseRequest]) -> int:
    """How many loads of prompts that begin like one of these brought KV that is not theirs."""
    common = case.run.in_common
    theirs = {beginning for request in rows for beginning in common.get(request.row, ())}
    wrong = (row.request for row in case.run.load_rows if row.ends.get(LoadEnd.WRONG))
    return sum(not theirs.isdisjoint(common.get(request, ())) for request in wrong)


def rule(case: Case) -> Results:
    rows = case.affected(CAUSE)
    preempted = [r for r in case.requests if r.preemptions]
    if not rows:
        lost, late = unexplained(case), _read_late(case)
        if preempted and not any(r.unseen or r.row in lost or r.row in late for r in preempted):
            yield CAUSE.ruled_out(
                f"{plural(len(preempted), 'request')} preempted; what they lost, if anything, has another "
                "reason"
            )
        elif case.requests and not preempted:
            yield CAUSE.ruled_out(f"no preemption of {plural(len(case.requests), 'request')}")
        return
    engine = case.engines[rows[0].engine]
    wrong = _came_back_wrong(case, rows)
    stored = sum(any(e.step > r.preempt_step for e in r.entries) for r in rows)
    yield case.finding(
        CAUSE,
        f"{capital(of_all(len(rows), len(preempted), 'preempted request'))} lost tokens: they were "
        "preempted, and not all of their tokens were seen to be offered again.",
        evidence=[
            *([_OTHER_KV.format(plural(wrong, "load"))] if wrong else []),
            f"{plural(sum(r.preemptions for r in rows), 'preemption')} of {plural(len(rows), 'request')}; "
            f"tokens of {count(stored)} of them were offered after it",
            *offered_of_others(case, rows, "preempted"),
            f"at most {engine.facts.max_num_seqs or 0} sequences at once (--max-num-seqs)",
        ],
        events=[
            Event(
                r.id,
                r.preempt_step,
                f"preempted in step {r.preempt_step & STEP_MASK} with {count(r.prompt)} prompt tokens",
            )
            for r in rows[:3]
        ],
        headline=f"{plural(len(rows), 'request')} lost tokens to preemption",
        remedy=[
            *([kv_misplaced.PREEMPTED] if wrong else []),
            "in the connector: treat resumed requests (scheduled_cached_reqs.resumed_req_ids) like new ones",
            "or avoid preemption in the whole engine: more KV cache memory, or fewer sequences at once "
            "(--max-num-seqs), which lowers throughput",
        ],
    )
