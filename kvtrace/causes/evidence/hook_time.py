"""Shares of the step that hooks take: what the notes on speed have in common."""

from __future__ import annotations

from collections.abc import Iterable

from kvtrace.causes.case import Case
from kvtrace.causes.cause import Cause
from kvtrace.causes.diagnosis import Results
from kvtrace.ledger.run import Worker
from kvtrace.trace.hooks import BY_NAME
from kvtrace.words import percent

_SHARE = 0.25
"""Of the workers' execute_model time; below that a hook is not called slow."""
_LEAST_NS = 10**9
"""In the whole run: what takes less time than this is nobody's problem, unless the run is short and little
else was done in it:"""
_MOST_OF_IT, _LEAST_OF_IT_NS = 0.9, 25 * 10**7
"""... at least this share of the steps' time, and so many ns in the run."""


def slow_hooks(case: Case, cause: Cause, hooks: Iterable[str], remedy: str) -> Results:
    """A finding where one of these hooks takes a large part of a rank's steps, else how much they take.

    Args:
        remedy: where to move the hook's work; what a step would take then is put behind it.
    """
    seen = [
        (worker.hook_ns[hook] / worker.exec_ns if worker.exec_ns else 0.0, hook, worker)
        for hook in hooks
        for worker in case.run.workers()
        if worker.steps and hook in worker.hook_ns
    ]
    slow = [one for one in seen if _is_slow(*one)]
    slow.sort(key=lambda one: -one[0])
    if slow:
        part, hook, worker = slow[0]
        whole = _per_step(worker, worker.exec_ns)
        rest = _per_step(worker, max(0, worker.exec_ns - worker.hook_ns[hook]))
        yield case.finding(
            cause,
            f"{hook} takes {percent(part, 1)} of the steps of {worker.process}.",
            evidence=[
                f"{w.process}: {_per_step(w, w.hook_ns[name])} of {_per_step(w, w.exec_ns)} a step in {name} "
                f"({percent(p, 1)}; host clock, execute_model)"
                for p, name, w in slow[:4]
            ],
            remedy=[f"{remedy}: a step here would take {rest} instead of {whole}"],
        )
    elif seen:
        most, hook, _ = max(seen, key=lambda one: one[:2])
        if most >= _SHARE or any(_mostly_idle(worker, hook) for _, hook, worker in seen):
            yield cause.not_observed(
                f"{hook} takes {percent(most, 1)} of the step: in too short a run to call it slow, or in "
                "steps without a forward, where no token waits"
            )
        elif not _any_large(case):
            yield cause.ruled_out(f"{hook} takes {percent(most, 1)} of the step at most (host clock)")


def _mostly_idle(worker: Worker, hook: str) -> bool:
    """Whether most steps had no forward, as while a load is waited for: no token waits in these, and hooks of
    layers are called in none of them."""
    return worker.no_forward_steps > worker.steps and not BY_NAME[hook].layered


def _is_slow(share: float, hook: str, worker: Worker) -> bool:
    if _mostly_idle(worker, hook):
        return False
    took = worker.hook_ns[hook]
    little_else = share >= _MOST_OF_IT and took >= _LEAST_OF_IT_NS
    return share >= _SHARE and (took >= _LEAST_NS or little_else)


def _any_large(case: Case) -> bool:
    """Whether any hook takes a large part of a rank's steps: then none of the notes on speed is ruled out."""
    return any(
        ns >= _SHARE * worker.exec_ns
        for worker in case.run.workers()
        if worker.steps and worker.exec_ns
        for ns in worker.hook_ns.values()
    )


def _per_step(worker: Worker, nanoseconds: int) -> str:
    """Milliseconds a step, for people."""
    return f"{nanoseconds / max(1, worker.steps + worker.no_forward_steps) / 1e6:.1f} ms"
