"""preempted-before-save: the request lost its KV before the connector was offered it."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes.case import Case, Piece
from kvtrace.causes.left_early import only_this_one
from kvtrace.causes.model import Event, Finding, RuledOut
from kvtrace.ledger.intervals import Interval
from kvtrace.trace.format import STEP_MASK
from kvtrace.words import capital, count, of_all, plural

ID = "preempted-before-save"


def claim(case: Case, piece: Piece, left: list[Interval]) -> list[Interval]:
    request = case.requests[piece.request]
    if not request.preemptions or not request.preempt_step:
        return []
    return left if only_this_one(case, request) else []


def rule(case: Case) -> Iterator[Finding | RuledOut]:
    rows = [case.requests[row] for row in case.booked[ID].requests] if ID in case.booked else []
    preempted = [r for r in case.requests if r.preemptions]
    if not rows:
        if preempted:
            yield RuledOut(
                ID,
                f"{plural(len(preempted), 'request')} preempted; what they computed was offered all the same",
            )
        elif case.requests:
            yield RuledOut(ID, f"no preemption of {plural(len(case.requests), 'request')}")
        return
    engine = case.engines[rows[0].engine]
    again = sum(any(e.step > r.preempt_step for e in r.entries) for r in rows)
    yield case.finding(
        ID,
        f"{capital(of_all(len(rows), len(preempted), 'preempted request'))} lost tokens: they were computed, "
        "preempted, and "
        "not offered again.",
        evidence=[
            f"{plural(sum(r.preemptions for r in rows), 'preemption')} of {plural(len(rows), 'request')}; "
            f"{count(again)} of them got a store entry after it, {count(len(rows) - again)} none",
            "requests of this run that were not preempted were offered in full",
            f"at most {engine.facts.max_num_seqs or 0} sequences at once (--max-num-seqs)",
        ],
        events=[
            Event(r.id, r.preempt_step, f"preempted in step {r.preempt_step & STEP_MASK} with "
                  f"{count(r.prompt)} prompt tokens")
            for r in rows[:3]
        ],
        headline=f"{plural(len(rows), 'request')} lost tokens to preemption",
        remedy=[
            "in the connector: treat resumed requests (scheduled_cached_reqs.resumed_req_ids) like new ones",
            "or avoid preemption: more KV cache memory, or fewer sequences at once (--max-num-seqs)",
        ],
    )  # fmt: skip
