"""store-incomplete: what came to rest is empty, cut or was never there."""

from __future__ import annotations

from kvtrace.causes.evidence import spoiled
from kvtrace.causes.rule import FAULT, SAVES, Case, Cause, Results, SaveEnd, Stage
from kvtrace.words import plural

CAUSE = Cause(
    id="store-incomplete",
    stage=Stage.COMPLETION,
    severity=FAULT,
    ledger=SAVES,
    meaning="The KV was read, and what came to rest of it is empty, cut, or was never there.",
    seen_as=(
        "At the end of the run a file that a save made is missing, empty, or shorter than what "
        "was written to it."
    ),
    remedy=(
        "Flush and close what is written before the save counts as done; write to a temporary "
        "file and rename it once it is whole."
    ),
    save_ends=(SaveEnd.NOT_AT_REST,),
)


def rule(case: Case) -> Results:
    hit = case.affected(CAUSE)
    if hit:
        yield case.finding(
            CAUSE,
            f"What came to rest of {plural(len(hit), 'request')} is not whole: it is empty, cut, or was "
            "never put in place.",
            evidence=spoiled.where(case, CAUSE) + spoiled.caught_there(case, CAUSE),
            events=case.events(CAUSE, "read from the KV cache, and not whole where it came to rest"),
            headline="what came to rest is not whole",
        )
