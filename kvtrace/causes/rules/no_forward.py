"""no-forward: a store entry in a step without tokens."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes.case import Case
from kvtrace.causes.model import Finding
from kvtrace.words import count

ID = "no-forward"


def rule(case: Case) -> Iterator[Finding]:
    if ID in case.booked:
        idle = sum(worker.no_forward_steps for worker in case.run.workers())
        yield case.finding(
            ID,
            "Store entries stood in steps without a token to compute: no layer hook runs there.",
            evidence=[f"{count(idle)} worker-steps had nothing to compute"],
            events=case.events(ID, "a store entry in a step without forward"),
            headline="stores stood in steps without a forward",
        )
