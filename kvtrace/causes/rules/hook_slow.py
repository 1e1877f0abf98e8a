"""hook-slow: a hook other than wait_for_save takes a large part of the step."""

from __future__ import annotations

from kvtrace.causes.case import Case
from kvtrace.causes.cause import Cause
from kvtrace.causes.evidence.hook_time import not_slow, per_step, share, slow_ranks
from kvtrace.causes.model import Results
from kvtrace.terms import NOTE
from kvtrace.trace.hooks import WAIT_SAVE, WORKER_DUE
from kvtrace.words import percent

CAUSE = Cause(
    id="hook-slow",
    stage=None,
    severity=NOTE,
    ledger=None,
    meaning="A hook takes a large share of the step.",
    seen_as=(
        "Host time of the hook, by rank: a quarter of execute_model or more, and at least 1 s in the run."
    ),
    remedy="Move the work out of the step, to a separate thread or stream.",
    timed=True,
)
_HOOKS = tuple(hook.name for hook in WORKER_DUE if hook is not WAIT_SAVE)


def rule(case: Case) -> Results:
    slow = [(hook, worker, part) for hook in _HOOKS for worker, part in slow_ranks(case, hook)]
    slow.sort(key=lambda row: -row[2])
    if slow:
        hook, worker, part = slow[0]
        rest = per_step(worker, max(0, worker.exec_ns - worker.hook_ns[hook]))
        yield case.finding(
            CAUSE,
            f"{hook} takes {percent(part, 1)} of the steps of {worker.process}.",
            evidence=[
                f"{w.process}: {per_step(w, w.hook_ns[name])} of {per_step(w, w.exec_ns)} a step in {name} "
                f"({percent(p, 1)}; host clock, execute_model)"
                for name, w, p in slow[:4]
            ],
            remedy=[
                "move the work out of the step, to a separate thread or stream: a step here would take "
                f"{rest} instead of {per_step(worker, worker.exec_ns)}"
            ],
        )
        return
    parts = [
        (share(w, hook), hook) for w in case.run.workers() if w.steps for hook in _HOOKS if hook in w.hook_ns
    ]
    if parts:
        most, hook = max(parts)
        yield not_slow(CAUSE, hook, most)
