"""Shares of the step that hooks take: what the notes on speed have in common."""

from __future__ import annotations

from kvtrace.causes.case import Case
from kvtrace.causes.cause import Cause
from kvtrace.causes.model import NotObserved, RuledOut
from kvtrace.ledger.model import Worker
from kvtrace.words import percent

SHARE = 0.25
"""Of the workers' execute_model time; below that a hook is not called slow."""
LEAST_NS = 10**9
"""In the whole run: what takes less time than this is nobody's problem."""


def share(worker: Worker, hook: str) -> float:
    return worker.hook_ns.get(hook, 0) / worker.exec_ns if worker.exec_ns else 0.0


def slow_ranks(case: Case, hook: str) -> list[tuple[Worker, float]]:
    """Workers of which this hook takes a large part, the worst first."""
    found = [
        (worker, share(worker, hook))
        for worker in case.run.workers()
        if worker.steps and worker.hook_ns.get(hook, 0) >= LEAST_NS and share(worker, hook) >= SHARE
    ]
    return sorted(found, key=lambda pair: -pair[1])


def not_slow(cause: Cause, hook: str, most: float) -> RuledOut | NotObserved:
    """What to say where :func:`slow_ranks` is empty; ``most``: the hook's share in the worst rank."""
    if most >= SHARE:
        what = f"{hook} takes {percent(most, 1)} of the step"
        return cause.not_observed(f"{what}, but less than 1 s in all: too short a run to call it slow")
    return cause.ruled_out(f"{hook} takes {percent(most, 1)} of the step at most (host clock)")


def per_step(worker: Worker, nanoseconds: int) -> str:
    """Milliseconds a step, for people."""
    return f"{nanoseconds / max(1, worker.steps) / 1e6:.1f} ms"
