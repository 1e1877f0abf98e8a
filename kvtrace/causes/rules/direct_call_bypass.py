"""direct-call-bypass: layers that call their backend past the hooked op."""

from __future__ import annotations

from kvtrace.causes.evidence.steps import bodies
from kvtrace.causes.rule import FAULT, SAVES, Case, Cause, Results, SaveEnd, Stage
from kvtrace.versions import NEWEST, since
from kvtrace.words import count, plural

CAUSE = Cause(
    id="direct-call-bypass",
    stage=Stage.FORWARD,
    severity=FAULT,
    ledger=SAVES,
    meaning="The layer calls its backend directly and not through the hooked op.",
    seen_as="use_direct_call is true for the layer, and its op never ran in a real step.",
    remedy=(
        "Upgrade: from vLLM 0.15.0 Attention calls the hooked function also directly (MLA does not yet). "
        "On CUDA and CPU use_direct_call is false."
    ),
    versions=f"{since('0.8.5', '0.14.1')} (MLA: .. {NEWEST})",
    live=False,
    save_ends=(SaveEnd.DIRECT_CALL,),
)


def rule(case: Case) -> Results:
    run = case.run
    flags = [value for worker in run.workers() for value in worker.facts.direct_call.values()]
    ran = bodies(run)
    if case.affected(CAUSE):
        yield case.finding(
            CAUSE,
            f"{plural(sum(flags), 'layer')} call their backend directly: their hooked op never ran.",
            evidence=[
                f"use_direct_call is True on {sum(flags)} of {len(flags)} layers and ranks; {ran.share}"
            ],
            headline="layers call their attention backend directly, past the hooks",
        )
        return
    if not ran.eligible:
        late = any(worker.ops_late for worker in run.workers())
        yield CAUSE.not_observed(
            "vLLM's attention was imported before kvtrace came: no op body can be seen"
            if late
            else "no real step of a worker was seen"
        )
        return
    off = (
        f"; use_direct_call is False on all {plural(len(flags), 'layer')}" if flags and not any(flags) else ""
    )
    if off or ran.ran == ran.eligible:
        yield CAUSE.ruled_out(f"{ran.share}{off}")
    else:
        yield CAUSE.not_observed(
            f"{ran.op} was seen in only {count(ran.ran)} of {count(ran.eligible)} layer-steps"
        )
