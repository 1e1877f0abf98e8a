"""kv-altered: KV that left as other numbers than those that were read."""

from __future__ import annotations

from kvtrace.causes.evidence import spoiled
from kvtrace.causes.rule import FAULT, SAVES, Case, Cause, Results, SaveEnd, Stage
from kvtrace.words import plural

CAUSE = Cause(
    id="kv-altered",
    stage=Stage.COMPLETION,
    severity=FAULT,
    ledger=SAVES,
    meaning="What was stored is not the KV that was read: other numbers in the same place.",
    seen_as=(
        "The bytes that were read are not in what left, and their numbers are there after a cast to a "
        "narrower type that loses digits, or as zeros. Or they are there head by head, and the last head of "
        "a slot stands before the first one, always."
    ),
    remedy=(
        "Store the KV in the type of the cache. Where a narrower type is meant, say so in the connector's "
        "documentation and check what the model answers from it."
    ),
    save_ends=(SaveEnd.ALTERED,),
)


def rule(case: Case) -> Results:
    hit = case.affected(CAUSE)
    if hit:
        yield case.finding(
            CAUSE,
            f"The KV of {plural(len(hit), 'request')} came to the store as other numbers than those "
            "that were read, or in another order.",
            evidence=[
                *spoiled.where(case, CAUSE),
                "what left was compared with what was read: as bytes, as narrower numbers, as zeros, by the "
                "order of its heads",
            ],
            events=case.events(CAUSE, "read, and sent on as other numbers, or in another order"),
            headline="what was stored is not the KV that was read",
        )
