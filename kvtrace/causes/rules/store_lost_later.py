"""store-lost-later: KV that was at rest once, and is gone by the end."""

from __future__ import annotations

from kvtrace.causes.evidence import spoiled
from kvtrace.causes.rule import FAULT, SAVES, Case, Cause, Results, SaveEnd, Stage
from kvtrace.words import plural

CAUSE = Cause(
    id="store-lost-later",
    stage=Stage.COMPLETION,
    severity=FAULT,
    ledger=SAVES,
    meaning="The KV was at rest once, and is gone or overwritten by the end of the run.",
    seen_as=("A file that held it was removed or written anew by the connector itself before the run ended."),
    remedy=(
        "Give the store room for what is to be found again, and key what it holds by all tokens, "
        "the model, the layer and the rank."
    ),
    save_ends=(SaveEnd.LOST_LATER,),
)


def rule(case: Case) -> Results:
    hit = case.affected(CAUSE)
    if hit:
        yield case.finding(
            CAUSE,
            f"The KV of {plural(len(hit), 'request')} was at rest, and is gone or overwritten by the end of "
            "the run.",
            evidence=spoiled.where(case, CAUSE),
            events=case.events(CAUSE, "it was at rest, and is not any more"),
            headline="KV that was stored is gone by the end of the run",
        )
