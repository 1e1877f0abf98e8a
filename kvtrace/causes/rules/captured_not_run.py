"""captured-not-run: bodies and hooks that ran while a graph was captured, and in no real step."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes.case import Case
from kvtrace.causes.model import Finding
from kvtrace.causes.steps import modes
from kvtrace.words import count

ID = "captured-not-run"


def rule(case: Case) -> Iterator[Finding]:
    if ID in case.booked:
        seen = modes(case.run.workers())
        graphs = sum(n for mode, n in seen.items() if mode > 0)
        yield case.finding(
            ID,
            "Attention ran its Python body while graphs were captured or warmed up, and in no real step: "
            "the hooks "
            "are not replayed.",
            evidence=[
                f"graphs in {count(graphs)} of {count(sum(seen.values()))} worker-steps; these layers' "
                "bodies "
                "are known from outside of the steps alone"
            ],
            events=case.events(
                ID, "a store entry, and the body of this layer only ever ran outside of steps"
            ),
            headline="hooks ran only while graphs were captured",
        )
