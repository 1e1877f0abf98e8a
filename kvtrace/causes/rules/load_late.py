"""load-late: a load that took longer than computing the tokens would have."""

from __future__ import annotations

from statistics import median

from kvtrace.causes.evidence import loads
from kvtrace.causes.rule import NOTE, Case, Cause, Event, LoadEnd, Results
from kvtrace.ledger.loads.outcome import LoadOf
from kvtrace.ledger.reported import LOAD_HOOKS, SAVE_HOOKS
from kvtrace.ledger.run import Engine
from kvtrace.words import count, plural

_WORTH = "Answer a hit only where loading is faster than computing"

CAUSE = Cause(
    id="load-late",
    severity=NOTE,
    meaning="Loading takes longer than computing the tokens would.",
    seen_as=(
        "Time from the lookup to the end of start_load_kv (synchronous) or to the report that it is "
        "finished (asynchronous): in the median 100 ms and five steps of this run or more, and at least "
        "twice what the tokens cost to compute at this run's pace."
    ),
    remedy=f"{_WORTH}; make synchronous loads asynchronous.",
    timed=True,
)
LEAST_WAIT_NS = 100_000_000
"""A median wait below this is not reported."""
_STEPS = 5
"""Nor is one of a few steps: a load that ends at once is seen ended a step later at the earliest."""
_TIMES = 2
_HOOKS = (*LOAD_HOOKS, *SAVE_HOOKS, "get_finished")


def rule(case: Case) -> Results:
    rows = [row for row in loads.accepted(case) if row.waited_ns >= 0 and row.ends.get(LoadEnd.LOADED)]
    if not rows:
        return
    middle = median(row.waited_ns for row in rows)
    compute = sum(row.accepted * _ns_per_token(case, row) for row in rows)
    waited = sum(row.waited_ns for row in rows)
    least = max(LEAST_WAIT_NS, _STEPS * _ns_per_step(case))
    if middle < least or compute <= 0 or waited < _TIMES * compute:
        return
    loaded = sum(row.accepted for row in rows)
    slow = sorted(rows, key=lambda row: -row.waited_ns)[:3]
    yield case.finding(
        CAUSE,
        f"From lookup to KV takes {middle / 1e6:.0f} ms (median of {plural(len(rows), 'load')}): longer "
        "than computing the tokens.",
        requests=len(rows),
        remedy=[f"{_WORTH}."] if all(row.asynchronous for row in rows) else [CAUSE.remedy],
        evidence=[
            f"{plural(loaded, 'token')} loaded in {waited / 1e6:.0f} ms of waiting; at this run's pace "
            f"({compute / max(1, loaded) / 1e3:.1f} µs a token, all steps) computing them takes about "
            f"{compute / 1e6:.0f} ms",
            "host clock; asynchronous loads overlap with the steps of other requests",
        ],
        events=[
            Event(row.id, row.step, f"{row.waited_ns / 1e6:.0f} ms for {count(row.accepted)} tokens")
            for row in slow
        ],
    )


def _ns_per_step(case: Case) -> float:
    """Mean time in execute_model of a step, with or without a forward, of the slowest worker."""
    steps = [(worker.exec_ns, worker.steps + worker.no_forward_steps) for worker in case.run.workers()]
    return max((spent / some for spent, some in steps if some), default=0.0)


def _ns_per_token(case: Case, row: LoadOf) -> float:
    """Time in execute_model for a token of this engine, at most: decode steps count in."""
    return case.once(("ns per token", row.engine), lambda: _ns_per_token_of(case, case.engines[row.engine]))


def _ns_per_token_of(case: Case, engine: Engine) -> float:
    spent = max((worker.exec_ns for worker in engine.workers), default=0)
    computed = sum(r.computed - r.local - r.external for r in case.of_engine(engine.tag))
    # Time in the connector's hooks is not spent computing.
    in_hooks = sum(one.total_ns for one in case.run.timing if one.hook in _HOOKS)
    share = in_hooks / max(1, len(case.run.workers()))
    return max(0.0, spent - share) / computed if computed > 0 else 0.0
