"""connector-gone: no connector at the op, though one was created."""

from __future__ import annotations

from kvtrace.causes.evidence.steps import skipped
from kvtrace.causes.rule import FAULT, SAVES, Case, Cause, Results, SaveEnd, Stage
from kvtrace.words import count

CAUSE = Cause(
    id="connector-gone",
    stage=Stage.HOOK,
    severity=FAULT,
    ledger=SAVES,
    meaning="The worker had no connector any more when attention ran, though one was created (disabled, "
    "shut down).",
    seen_as="has_kv_transfer_group() is false at the attention op.",
    remedy="Look for a shutdown or an out-of-tree runner that disables the connector.",
    save_ends=(SaveEnd.CONNECTOR_GONE,),
)


def rule(case: Case) -> Results:
    if case.affected(CAUSE):
        calls = skipped(case.run, "NO_CONNECTOR")
        yield case.finding(
            CAUSE,
            "A worker had no connector any more when its attention ran, though one had been created.",
            evidence=[f"{count(calls)} attention calls of real steps found no connector in the process"],
            headline="the connector was gone when attention ran",
        )
