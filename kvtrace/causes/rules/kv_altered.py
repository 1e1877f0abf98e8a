"""kv-altered: blocks came back as other numbers than were computed."""

from __future__ import annotations

from kvtrace.causes.evidence import loads
from kvtrace.causes.rule import LIMIT, LOADS, Case, Cause, LoadEnd, Results
from kvtrace.causes.rules.kv_load_wrong import stored_so
from kvtrace.ledger.contents.compare import ALTERED, EQUAL
from kvtrace.ledger.contents.distance import TWO_BITS
from kvtrace.words import count, of_all, plural

_ASK = "Ask kvtrace verify by how much they differ."

CAUSE = Cause(
    id="kv-altered",
    severity=LIMIT,
    ledger=LOADS,
    wrong_data=True,
    meaning="What comes back is not the KV that was stored, but other numbers.",
    seen_as=(
        "The fingerprints of loaded blocks differ from those of the same tokens as they were computed, and "
        "no loaded block is known to be that of other tokens or of another place; by their sketches, where "
        "there are any, they are nearer to those than KV of other tokens is, and of about the same size. "
        "Fewer bits, in a tier of a store, in some layers or in all, look so, and so does KV that was spoilt."
    ),
    remedy=(
        f"{_ASK} Where fewer bits are meant, say so in the connector's documentation and check what the "
        "model answers from it."
    ),
    load_ends=(LoadEnd.ALTERED,),
)


def rule(case: Case) -> Results:
    hit = loads.affected(case, CAUSE)
    if hit:
        whole, parts = _as_many_bytes(case), case.run.read_in_part
        altered, equal = (case.run.compared.get(word, 0) for word in (ALTERED, EQUAL))
        where = f"in {of_all(altered, altered + equal, 'block')} that could be compared"
        size = ", though as many bytes came to rest as were read" if whole else ""
        lost = loads.tokens(case, hit, CAUSE)
        first, by = stored_so(case, lost), case.run.altered_by
        meant = "" if first else " Is that meant?"
        much = by is not None and by.share > TWO_BITS
        yield loads.finding(
            case,
            CAUSE,
            f"{plural(lost, 'token')} came back as other numbers than were computed, {where}{size}.{meant}",
            evidence=[
                *([f"from what was computed: {by}{_MUCH * much}"] if by else []),
                *([_PARTS_READ.format(count(parts))] if parts else []),
                *([_IN_PART.format(plural(equal, "block"))] if equal else []),
                *loads.reasons_and_places(case, hit, CAUSE),
                "none of them is known to be other KV",
            ],
            headline="loaded blocks hold other numbers than were computed",
            remedy=first
            or [
                *([_WHOLE_SLOTS] if parts else []),
                *([_PARTS] if equal or much else []),
                *([f"{_ASK} {_ORDER}"] if whole else [CAUSE.remedy, _ORDER]),
            ],
        )


_MUCH = f" (a store of two bits a number: about {TWO_BITS * 100:.0f} %)"
_PARTS_READ = (
    "the save hooks read a part of each slot alone (some heads, or K or V alone), in all {} layer-steps in "
    "which they were seen to read"
)
_WHOLE_SLOTS = "Save and load all of a slot (K and V, every head): a part of each was read, and nothing else."
_IN_PART = (
    "{} came back bit for bit: a store of fewer bits gives that where one of its tiers keeps all; "
    "else a part of the others (V, some heads) came late, or from another place"
)
_PARTS = (
    "Where no tier keeps fewer bits: see that all of a block is written (K and V, every head and channel), "
    "before its layer's attention or before get_finished names the load; that K and V come from one place of "
    "the store; and that nothing writes there once more."
)
_ORDER = (
    "Rounding is a small part of the numbers; where it is more, compare the order of dimensions in which KV "
    "is written with that in which it is read back."
)


def _as_many_bytes(case: Case) -> bool:
    """Whether as many came to rest as were read: in all, and in most calls. Fewer bits are then not meant."""
    reads = [one for one in case.run.outside if one.read]
    return bool(reads) and all((one.came or 0) >= one.read <= 2 * one.accounted for one in reads)
