"""connector-gone: no connector at the op, though one was created."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes.case import Case
from kvtrace.causes.model import Finding
from kvtrace.causes.steps import skipped
from kvtrace.words import count

ID = "connector-gone"


def rule(case: Case) -> Iterator[Finding]:
    if ID in case.booked:
        calls = skipped(case.run, "NO_CONNECTOR")
        yield case.finding(
            ID,
            "A worker had no connector any more when its attention ran, though one had been created.",
            evidence=[f"{count(calls)} attention calls of real steps found no connector in the process"],
            events=case.events(ID, "a store entry, and no connector at the op"),
            headline="the connector was gone when attention ran",
        )
