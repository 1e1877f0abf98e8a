"""kv-load-wrong: what a load put into the KV cache is not what its tokens compute to."""

from __future__ import annotations

from kvtrace.causes.evidence import loads
from kvtrace.causes.rule import FAULT, LOADS, Case, Cause, LoadEnd, Results
from kvtrace.words import of_all, plural

CAUSE = Cause(
    id="kv-load-wrong",
    severity=FAULT,
    ledger=LOADS,
    live=False,
    meaning="What a load put into the KV cache is not what these tokens compute to.",
    seen_as=(
        "The fingerprint of a slot after the load differs from that of the same prefix, position, layer and "
        "rank when it was computed in this run."
    ),
    remedy=(
        "Check the key (all tokens up to the end of what is stored, model, layer, rank), the order of the "
        "blocks and the layer that each piece is written to."
    ),
    load_ends=(LoadEnd.WRONG,),
)


def rule(case: Case) -> Results:
    accepted = list(loads.accepted(case))
    wrong = loads.affected(case, CAUSE)
    if wrong:
        yield loads.finding(
            case,
            CAUSE,
            f"{plural(loads.tokens(case, wrong, CAUSE), 'token')} were loaded with KV that is not theirs "
            f"({of_all(len(wrong), len(accepted), 'load')}).",
            evidence=loads.reasons_and_places(wrong, CAUSE),
            headline="loaded KV is not what its tokens compute to",
        )
