"""ranks-share-store: several ranks write one file, and the last one's KV stays."""

from __future__ import annotations

from kvtrace.causes.evidence.accounted import all_written
from kvtrace.causes.rule import FAULT, SAVES, Case, Cause, Event, Results, SaveEnd, Stage
from kvtrace.words import listed, plural

CAUSE = Cause(
    id="ranks-share-store",
    stage=Stage.EFFECT,
    severity=FAULT,
    ledger=SAVES,
    meaning=(
        "Several ranks write the same key or file: the last one wins, and a later load is silently wrong."
    ),
    seen_as=(
        "The same file written by different ranks for the same layer in one step (watched calls). The rank "
        "that wrote last counts as saved. KV that is the same on every rank (MLA) is no loss."
    ),
    remedy="Put the rank into the key (ExampleConnector does not: use it with TP 1 only).",
    save_ends=(SaveEnd.OVERWRITTEN_BY_RANK,),
)


def rule(case: Case) -> Results:
    trust = case.run.trust
    if case.affected(CAUSE):
        ranks = max(len(ranks) for _, _, ranks in trust.shared)
        who = "both ranks" if ranks == 2 else f"{ranks} ranks"
        names = listed(e.connector.cls for e in case.run.engines if e.connector) or "The connector"
        sizes = sorted({e.facts.tp or 1 for e in case.run.engines})
        yield case.finding(
            CAUSE,
            f"{names}: {who} write the same file for a layer, and the last one wins: the others' KV is "
            "lost, and a later load gives it to every rank.",
            evidence=[
                f"{plural(trust.shared_files, 'time')} several ranks wrote one file for the same layer in "
                f"the same step (tensor_parallel_size {listed(map(str, sizes))}); the one that wrote last "
                "counts as saved",
            ],
            events=[
                Event("", step, f"one file written by ranks {', '.join(map(str, ranks))}", layer=layer)
                for step, layer, ranks in trust.shared[:3]
            ],
            headline="ranks overwrite each other's files, so a later load is silently wrong",
        )
        return
    several = [engine for engine in case.run.engines if len(engine.workers) > 1]
    # Files that nobody was seen to write may be shared, unless what was saved came to rest on every rank.
    seen = trust.files_apart or all_written(case)
    if several and seen and trust.agreed and trust.agreed == trust.calls:
        yield CAUSE.ruled_out(
            f"no file was written by two ranks for the same layer in all {plural(trust.agreed, 'store call')}"
        )
