"""full-cudagraph-replay: steps that replay a FULL graph run no Python hook."""

from __future__ import annotations

from kvtrace.causes.evidence.steps import bodies, modes
from kvtrace.causes.rule import FAULT, SAVES, Case, Cause, Results, SaveEnd, Stage
from kvtrace.words import count, percent, plural

CAUSE = Cause(
    id="full-cudagraph-replay",
    stage=Stage.FORWARD,
    severity=FAULT,
    ledger=SAVES,
    meaning="The step replayed a FULL CUDA graph: no Python hook runs in it.",
    seen_as="Graph mode FULL in the step, and the attention op of the layer did not run in Python.",
    remedy=(
        "Override requires_piecewise_for_cudagraph in the connector (from vLLM 0.17.1). Or set "
        '--compilation-config \'{"cudagraph_mode": "PIECEWISE"}\' for the whole engine, which makes '
        "decode steps slower."
    ),
    live=False,
    save_ends=(SaveEnd.GRAPH_REPLAY,),
)


def rule(case: Case) -> Results:
    run = case.run
    seen = modes(run.workers())
    total = sum(seen.values())
    if case.affected(CAUSE):
        full = seen.get(2, 0)
        yield case.finding(
            CAUSE,
            f"{plural(len(case.affected(CAUSE)), 'request')} had KV to store in a step that replayed a "
            "FULL CUDA graph: no layer hook ran in it.",
            evidence=[
                f"graph mode FULL in {count(full)} of {count(total)} worker-steps ({percent(full, total)})"
            ],
            headline="steps replayed FULL CUDA graphs, in which no hook runs",
        )
        return
    full, unknown, ran = seen.get(2, 0), seen.get(-1, 0), bodies(run)
    if total and (full or not unknown or (ran.eligible and ran.ran == ran.eligible)):
        yield CAUSE.ruled_out(
            f"graph mode FULL in {count(full)} of {count(total)} worker-steps; no store entry was lost in one"
        )
    else:
        yield CAUSE.not_observed(f"graph mode unknown in {count(unknown)} of {count(total)} worker-steps")
