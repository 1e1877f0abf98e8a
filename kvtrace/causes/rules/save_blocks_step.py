"""save-blocks-step: wait_for_save takes a large part of the step."""

from __future__ import annotations

from kvtrace.causes.evidence.hook_time import not_slow, per_step, share, slow_ranks
from kvtrace.causes.rule import NOTE, Case, Cause, Results, Stage
from kvtrace.words import percent

CAUSE = Cause(
    id="save-blocks-step",
    stage=Stage.COMPLETION,
    severity=NOTE,
    meaning="Nothing is lost, but wait_for_save takes a large share of the step.",
    seen_as="Host time of wait_for_save: a quarter of execute_model or more, and at least 1 s in the run.",
    remedy="Save asynchronously, or fewer tokens at once.",
    timed=True,
)
_HOOK = "wait_for_save"


def rule(case: Case) -> Results:
    slow = slow_ranks(case, _HOOK)
    if slow:
        worker, part = slow[0]
        spent = worker.hook_ns[_HOOK]
        rest = per_step(worker, max(0, worker.exec_ns - spent))
        yield case.finding(
            CAUSE,
            f"wait_for_save takes {percent(part, 1)} of the steps of {worker.process}.",
            evidence=[
                f"{w.process}: {per_step(w, w.hook_ns[_HOOK])} of {per_step(w, w.exec_ns)} a step in "
                f"wait_for_save ({percent(p, 1)}; host clock, execute_model)"
                for w, p in slow[:4]
            ],
            remedy=[
                "move the copy to a separate thread or stream and report it in get_finished: a step here "
                f"would take {rest} instead of {per_step(worker, worker.exec_ns)}"
            ],
        )
        return
    seen = [worker for worker in case.run.workers() if worker.steps and _HOOK in worker.hook_ns]
    if seen:
        yield not_slow(CAUSE, _HOOK, max(share(worker, _HOOK) for worker in seen))
