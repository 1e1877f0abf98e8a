"""direct-call-bypass: layers that call their backend past the hooked op."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes.case import Case
from kvtrace.causes.model import Finding, NotObserved, RuledOut
from kvtrace.causes.steps import bodies, product
from kvtrace.words import count, plural

ID = "direct-call-bypass"


def rule(case: Case) -> Iterator[Finding | RuledOut | NotObserved]:
    run = case.run
    flags = [value for worker in run.workers() for value in worker.facts.direct_call.values()]
    ran = bodies(run)
    if ID in case.booked:
        yield case.finding(
            ID,
            f"{plural(sum(flags), 'layer')} call their backend directly: their hooked op never ran.",
            evidence=[
                f"use_direct_call is True on {sum(flags)} of {len(flags)} layers and ranks; op body ran in "
                f"{count(ran.ran)}/{count(ran.eligible)} layer-steps"
            ],
            events=case.events(ID, "a store entry, and no op body in this layer"),
            headline="layers call their attention backend directly, past the hooks",
        )
        return
    if not ran.eligible:
        yield NotObserved(ID, "no real step of a worker was seen")
        return
    said = (
        f"; use_direct_call is False on all {plural(len(flags), 'layer')}" if flags and not any(flags) else ""
    )
    size = f" ({product(run)})" if product(run) else ""
    if ran.ran == ran.eligible:
        stages = (
            "through the dispatcher"
            if not ran.direct
            else f"{count(ran.direct)} of them called directly, and hooked"
        )
        yield RuledOut(
            ID, f"op body ran in {count(ran.ran)}/{count(ran.eligible)} layer-steps{size}, {stages}{said}"
        )
    elif said:
        yield RuledOut(ID, f"op body ran in {count(ran.ran)}/{count(ran.eligible)} layer-steps{size}{said}")
    else:
        yield NotObserved(ID, f"op body seen in {count(ran.ran)} of {count(ran.eligible)} layer-steps only")
