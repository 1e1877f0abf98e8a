"""save-lost: an asynchronous save that the connector itself reported as failed."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes.case import Case
from kvtrace.causes.model import Finding, RuledOut
from kvtrace.causes.words import count, plural

ID = "save-lost"


def rule(case: Case) -> Iterator[Finding | RuledOut]:
    saves = case.run.async_saves
    if ID in case.booked:
        lost = [save for save in saves if save.state == "lost"]
        yield case.finding(
            ID,
            f"{plural(len(lost), 'asynchronous save')} failed after the hooks had handed them over.",
            evidence=[f"{count(len(lost))} of {plural(len(saves), 'save')} were reported as failed"],
            events=case.events(ID, "handed over to an asynchronous save that failed"),
            headline="saves failed after they had been handed over",
        )
    elif saves and all(save.state == "done" for save in saves):
        yield RuledOut(ID, f"{plural(len(saves), 'asynchronous save')} began and came back, none as failed")
