"""kv-altered: every block that came back holds other numbers than were stored."""

from __future__ import annotations

from kvtrace.causes.evidence import loads
from kvtrace.causes.rule import LIMIT, LOADS, Case, Cause, LoadEnd, Results
from kvtrace.ledger.contents.compare import ALTERED
from kvtrace.words import plural

CAUSE = Cause(
    id="kv-altered",
    severity=LIMIT,
    ledger=LOADS,
    meaning="What comes back is not the KV that was stored, but other numbers, in every block.",
    seen_as=(
        "The fingerprints of all loaded blocks that could be compared differ from those of the same tokens "
        "as they were computed, in all layers, and none is that of other tokens or of another place."
    ),
    remedy=(
        "Ask kvtrace verify by how much they differ. Where fewer bits are meant, say so in the connector's "
        "documentation and check what the model answers from it."
    ),
    load_ends=(LoadEnd.ALTERED,),
)


def rule(case: Case) -> Results:
    hit = loads.affected(case, CAUSE)
    if hit:
        reads = [one for one in case.run.outside if one.read]
        whole = bool(reads) and all(one.accounted >= one.read for one in reads)  # no fewer bits
        meant = "though as many bytes came to rest as were read" if whole else "every block of them"
        yield loads.finding(
            case,
            CAUSE,
            f"{plural(loads.tokens(case, hit, CAUSE), 'token')} came back as other numbers than were "
            f"stored, {meant}. Is that meant?",
            evidence=[
                f"{plural(case.run.compared.get(ALTERED, 0), 'loaded block')} compared: none equal, none "
                "known to be other KV",
                *loads.reasons_and_places(hit, CAUSE),
            ],
            headline="every loaded block holds other numbers than were stored",
        )
