"""hook-slow: a hook other than wait_for_save takes a large part of the step."""

from __future__ import annotations

from kvtrace.causes.evidence.hook_time import slow_hooks
from kvtrace.causes.rule import NOTE, Case, Cause, Results
from kvtrace.trace.hooks import WAIT_SAVE, WORKER_DUE

CAUSE = Cause(
    id="hook-slow",
    severity=NOTE,
    meaning="A hook takes a large share of the step.",
    seen_as=(
        "Host time of the hook, by rank: a quarter of execute_model or more, and at least 1 s in the run; or "
        "nine tenths, and 0.25 s. Not where most steps have no forward: no token waits in these."
    ),
    remedy="Move the work out of the step, to a separate thread or stream.",
    timed=True,
)
_HOOKS = tuple(hook.name for hook in WORKER_DUE if hook is not WAIT_SAVE)


def rule(case: Case) -> Results:
    remedy = "move the work out of the step, to a separate thread or stream"
    yield from slow_hooks(case, CAUSE, _HOOKS, remedy)
