"""metadata-cleared-early: layers whose attention ran after the step's metadata was cleared."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes.case import Case
from kvtrace.causes.model import Finding
from kvtrace.causes.steps import skipped
from kvtrace.words import count, plural

ID = "metadata-cleared-early"


def rule(case: Case) -> Iterator[Finding]:
    if ID in case.booked:
        lost = plural(len(case.booked[ID].requests), "request")
        yield case.finding(
            ID,
            f"Layers ran after clear_connector_metadata in the same step (a draft model's): {lost} lost "
            "them.",
            evidence=[
                f"{count(skipped(case.run, 'NO_CONNECTOR_METADATA'))} attention calls of real steps found no "
                "metadata; it had been bound in these steps, other layers saved, and it was cleared before"
            ],
            events=case.events(ID, "a store entry, and the layer ran after the metadata was cleared"),
            headline="the metadata was cleared before the last layers ran",
        )
