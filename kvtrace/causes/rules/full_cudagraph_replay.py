"""full-cudagraph-replay: steps that replay a FULL graph run no Python hook."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes.case import Case
from kvtrace.causes.model import Finding, NotObserved, RuledOut
from kvtrace.causes.steps import bodies, modes, product, real_steps
from kvtrace.words import count, percent, plural

ID = "full-cudagraph-replay"


def rule(case: Case) -> Iterator[Finding | RuledOut | NotObserved]:
    run = case.run
    seen = modes(run.workers())
    total = sum(seen.values())
    if ID in case.booked:
        full = seen.get(2, 0)
        yield case.finding(
            ID,
            f"{plural(len(case.booked[ID].requests), 'request')} had a store entry in a step that replayed a "
            "FULL CUDA graph: no layer hook ran in it.",
            evidence=[
                f"graph mode FULL in {count(full)} of {count(total)} worker-steps ({percent(full, total)})"
            ],
            events=case.events(ID, "a store entry, graph mode FULL, no op body in the step"),
            headline="steps replayed FULL CUDA graphs, in which no hook runs",
        )
        return
    if not total:
        yield NotObserved(ID, "no worker's steps were seen")
        return
    ran = bodies(run)
    eager = [e.facts.enforce_eager for e in run.engines if e.facts.known]
    if seen.get(0, 0) == total:
        steps = real_steps(run)
        note = " (enforce_eager)" if eager and all(eager) else ""
        yield RuledOut(ID, f"graph mode NONE in {count(steps)}/{count(steps)} steps{note}")
    elif seen.get(2, 0) == 0 and ran.eligible and ran.ran == ran.eligible:
        size = f" ({product(run)})" if product(run) else ""
        yield RuledOut(
            ID, f"op body ran in {count(ran.ran)}/{count(ran.eligible)} layer-steps{size}, never FULL"
        )
    elif seen.get(2, 0):
        yield RuledOut(
            ID, f"FULL graphs in {count(seen[2])} of {count(total)} worker-steps, none with a store entry"
        )
    else:
        unknown = seen.get(-1, 0)
        yield NotObserved(ID, f"graph mode unknown in {count(unknown)} of {count(total)} worker-steps")
