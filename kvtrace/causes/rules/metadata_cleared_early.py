"""metadata-cleared-early: layers whose attention ran after the step's metadata was cleared."""

from __future__ import annotations

from kvtrace.causes.evidence.steps import skipped
from kvtrace.causes.rule import FAULT, SAVES, Case, Cause, Results, SaveEnd, Stage
from kvtrace.versions import since
from kvtrace.words import count, plural

CAUSE = Cause(
    id="metadata-cleared-early",
    stage=Stage.BIND,
    severity=FAULT,
    ledger=SAVES,
    meaning=(
        "The metadata was cleared before the draft model's forward (speculative decoding): its layers are "
        "not saved."
    ),
    seen_as=(
        "In one step: metadata bound, other layers saved, clear_connector_metadata, and after it the "
        "layer's body without metadata."
    ),
    remedy=(
        "Clear the metadata behind the last layer only: in a worker or runner of its own, look at who calls "
        "clear_connector_metadata. vLLM itself did so with a draft model before 0.18.1."
    ),
    versions=since("0.11.1", "0.21.0"),
    save_ends=(SaveEnd.CLEARED,),
)


def rule(case: Case) -> Results:
    if case.affected(CAUSE):
        lost = plural(len(case.affected(CAUSE)), "request")
        yield case.finding(
            CAUSE,
            "Layers (of a draft model) ran after clear_connector_metadata in the same step, so their KV "
            f"was not saved: {lost}.",
            evidence=[
                f"{count(skipped(case.run, 'NO_CONNECTOR_METADATA'))} attention calls of real steps found "
                "no metadata; it had been bound in these steps and other layers were saved, but it was "
                "cleared before these layers ran"
            ],
            headline="the metadata was cleared before the last layers ran",
        )
