"""captured-not-run: bodies and hooks that ran while a graph was captured, and in no real step."""

from __future__ import annotations

from kvtrace.causes.evidence.steps import modes
from kvtrace.causes.rule import FAULT, SAVES, Case, Cause, Results, SaveEnd, Stage
from kvtrace.words import count

CAUSE = Cause(
    id="captured-not-run",
    stage=Stage.FORWARD,
    severity=FAULT,
    ledger=SAVES,
    meaning="The layer's Python body ran only while graphs were captured or warmed up, and never again.",
    seen_as=(
        "Graph modes in real steps, bodies or save hooks of the layer outside of all steps, none inside one."
    ),
    remedy=(
        "Set cudagraph_mode to PIECEWISE for the whole engine, which makes decode steps slower; "
        "enforce_eager shows the difference."
    ),
    live=False,
    save_ends=(SaveEnd.ONLY_CAPTURED,),
)


def rule(case: Case) -> Results:
    if case.affected(CAUSE):
        seen = modes(case.run.workers())
        graphs = sum(n for mode, n in seen.items() if mode > 0)
        yield case.finding(
            CAUSE,
            "Attention ran its Python body while graphs were captured or warmed up, and in no real step: "
            "the hooks are not replayed.",
            evidence=[
                f"graphs in {count(graphs)} of {count(sum(seen.values()))} worker-steps; these layers' "
                "attention was only seen to run outside of steps"
            ],
            headline="hooks ran only while graphs were captured",
        )
