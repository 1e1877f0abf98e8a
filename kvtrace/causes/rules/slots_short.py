"""slots-short: a save hook that read fewer slots than its metadata names."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes.case import Case
from kvtrace.causes.model import Finding, RuledOut
from kvtrace.causes.said import logs_in
from kvtrace.words import count, percent, plural

ID = "slots-short"


def rule(case: Case) -> Iterator[Finding | RuledOut]:
    trust = case.run.trust
    if ID in case.booked:
        share = percent(trust.short_read, trust.short_declared)
        blocks = sorted({e.block_size for e in case.run.engines if e.block_size})
        yield case.finding(
            ID,
            f"The save hook read {share} of the slots that the metadata names in "
            f"{plural(trust.short, 'call')}.",
            evidence=[
                f"{count(trust.short_read)} of {count(trust.short_declared)} slots were read from the KV "
                "tensors "
                f"in {count(trust.short)} of {plural(trust.measured, 'measured store call')}; "
                f"{count(trust.agreed)} read all of theirs",
                f"less than a block ({blocks[0] if blocks else 1} slots) an entry is taken for rounding "
                "and not "
                "counted here; where a step stores for several requests, the loss is shared out over them",
                *logs_in(case, ("save_kv_layer", "wait_for_save")),
            ],
            events=case.events(ID),
            headline=f"the save hook read {share} of the slots that its metadata names",
            remedy=["compare the slot mapping that is indexed in save_kv_layer with the one in the metadata"],
        )
    elif trust.agreed and not trust.nothing:
        yield RuledOut(
            ID, f"no measured store call of {count(trust.agreed)} read fewer slots than the metadata names"
        )
