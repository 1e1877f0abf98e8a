"""save-blocks-step: wait_for_save takes a large part of the step."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes.case import Case
from kvtrace.causes.model import Finding, NotObserved, RuledOut
from kvtrace.causes.slow import not_slow, per_step, share, slow_ranks
from kvtrace.words import percent

ID = "save-blocks-step"
_HOOK = "wait_for_save"


def rule(case: Case) -> Iterator[Finding | NotObserved | RuledOut]:
    slow = slow_ranks(case, _HOOK)
    if slow:
        worker, part = slow[0]
        spent = worker.hook_ns[_HOOK]
        rest = per_step(worker, max(0, worker.exec_ns - spent))
        yield case.finding(
            ID,
            f"wait_for_save takes {percent(part, 1)} of the steps of {worker.process}.",
            evidence=[
                f"{w.process}: {per_step(w, w.hook_ns[_HOOK])} of {per_step(w, w.exec_ns)} a step in "
                "wait_for_save "
                f"({percent(p, 1)}; host clock, execute_model)"
                for w, p in slow[:4]
            ],
            remedy=[
                "hand the copy to a thread or a stream of its own and report it in get_finished: a step "
                "here would "
                f"take {rest} instead of {per_step(worker, worker.exec_ns)}"
            ],
        )
        return
    seen = [worker for worker in case.run.workers() if worker.steps and _HOOK in worker.hook_ns]
    if seen:
        yield not_slow(ID, _HOOK, max(share(worker, _HOOK) for worker in seen))
