"""save-blocks-step: wait_for_save takes a large part of the step."""

from __future__ import annotations

from kvtrace.causes.evidence.hook_time import slow_hooks
from kvtrace.causes.rule import NOTE, Case, Cause, Results, Stage
from kvtrace.trace.hooks import WAIT_SAVE

CAUSE = Cause(
    id="save-blocks-step",
    stage=Stage.COMPLETION,
    severity=NOTE,
    meaning="Nothing is lost, but wait_for_save takes a large share of the step.",
    seen_as=(
        "Host time of wait_for_save: a quarter of execute_model or more, and at least 1 s in the run; or "
        "nine tenths, and 0.25 s."
    ),
    remedy="Save asynchronously, or fewer tokens at once.",
    timed=True,
)


def rule(case: Case) -> Results:
    remedy = "move the copy to a separate thread or stream and report it in get_finished"
    yield from slow_hooks(case, CAUSE, (WAIT_SAVE.name,), remedy)
