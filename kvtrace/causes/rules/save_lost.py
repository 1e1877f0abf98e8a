"""save-lost: KV that had been handed over and did not stay: its file was written anew, or the save failed."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes.case import Case
from kvtrace.causes.model import Event, Finding, RuledOut
from kvtrace.words import count, plural

ID = "save-lost"


def rule(case: Case) -> Iterator[Finding | RuledOut]:
    saves = case.run.async_saves
    trust = case.run.trust
    if ID in case.booked and trust.overwritten_calls:
        old = {request for request, _, _, _ in trust.overwritten}
        yield case.finding(
            ID,
            "Different prompts are stored under one key: the later one overwrites the earlier one's KV.",
            evidence=[
                f"{plural(trust.overwritten_calls, 'time')} the file of one prompt was written anew for a "
                "prompt that has not even its first block in common with it (sampled calls only)",
                "a later load of the first prompt's key gives the KV of the other",
            ],
            events=[
                Event(request, step, f"its file was written anew for {other}", layer=layer)
                for request, other, step, layer in trust.overwritten[:3]
            ],
            headline=f"{plural(len(old), 'request')} lost their KV to another prompt with the same key",
        )
    elif ID in case.booked:
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
