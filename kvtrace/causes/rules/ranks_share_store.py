"""ranks-share-store: several ranks write one file, and the last one's KV stays."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes.case import Case
from kvtrace.causes.model import Event, Finding, RuledOut
from kvtrace.words import count, listed, plural

ID = "ranks-share-store"


def rule(case: Case) -> Iterator[Finding | RuledOut]:
    trust = case.run.trust
    if ID in case.booked:
        ranks = max(len(ranks) for _, _, ranks in trust.shared)
        who = "both ranks" if ranks == 2 else f"{ranks} ranks"
        names = listed(e.connector.cls for e in case.run.engines if e.connector) or "The connector"
        sizes = sorted({e.facts.tp or 1 for e in case.run.engines})
        yield case.finding(
            ID,
            f"{names}: {who} write the same file for a layer, and the last one wins: the others' KV is "
            "lost, and a "
            "later load gives it to every rank.",
            evidence=[
                f"{plural(trust.shared_files, 'time')} several ranks wrote one file for the same layer in "
                "the same "
                f"step (tensor_parallel_size {listed(map(str, sizes))}); the one that wrote last counts as "
                "saved",
                f"{count(trust.measured)} of {plural(trust.calls, 'store call')} were measured"
                + (
                    f"; the {count(trust.unknown)} others are not observed: nobody knows who won there"
                    if trust.unknown
                    else ""
                ),
            ],
            events=[
                Event("", step, f"one file written by ranks {', '.join(map(str, ranks))}", layer=layer)
                for step, layer, ranks in trust.shared[:3]
            ],
            headline="ranks overwrite each other's files, so a later load is silently wrong",
        )
        return
    several = [engine for engine in case.run.engines if len(engine.workers) > 1]
    if several and trust.agreed:
        yield RuledOut(
            ID,
            "no file was written by two ranks for the same layer in "
            f"{plural(trust.agreed, 'measured store call')}",
        )
