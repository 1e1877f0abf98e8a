"""slots-short: a save hook that read fewer slots than its metadata names."""

from __future__ import annotations

from kvtrace.causes.evidence import unstored
from kvtrace.causes.evidence.logs import logs_in, see_why_logged
from kvtrace.causes.rule import FAULT, SAVES, Case, Cause, Results, SaveEnd, Stage
from kvtrace.ledger.reported import SAVE_HOOKS
from kvtrace.words import count, percent, plural

CAUSE = Cause(
    id="slots-short",
    stage=Stage.EFFECT,
    severity=FAULT,
    ledger=SAVES,
    meaning="The hook read fewer slots than its metadata names, or a part of each (some heads, K or V).",
    seen_as=(
        "0 < slots read < slots declared in a watched call, by a block or more per entry. Where the metadata "
        "is not understood it is not known how many were declared. Or a part of each slot, in all calls for "
        "that step. A choice where the connector's workers answer the scheduler's side: they may take back "
        "what was declared."
    ),
    remedy="Look at the connector's slot mapping, and at which heads of a slot it copies.",
    save_ends=(SaveEnd.PART_READ,),
)


def rule(case: Case) -> Results:
    trust = case.run.trust
    hit = case.affected(CAUSE)
    if hit:
        share = percent(trust.short_read, trust.short_declared)
        what = f"{share} of the slots" if trust.parts < trust.short else "a part of each of the slots"
        parts = f"; {count(trust.parts)} read a part of each slot: some heads, or K or V alone"
        found = case.finding(
            CAUSE,
            f"The save hook read {what} that the metadata names in {plural(trust.short, 'call')}.",
            evidence=[
                f"{count(trust.short_read)} of {count(trust.short_declared)} slots were read from the KV "
                f"tensors in {count(trust.short)} of {plural(trust.measured, 'measured store call')}; "
                f"{count(trust.agreed)} read all of theirs" + (parts if trust.parts else ""),
                *logs_in(case, SAVE_HOOKS),
            ],
            headline=f"the save hook read {what} that its metadata names",
            remedy=[
                *see_why_logged(case, SAVE_HOOKS),
                "copy the whole of each slot: all heads that this rank has, K and V (of MLA the rope, too)"
                if trust.parts
                else "see whether the save hook goes through all that its metadata names (a loop that ends "
                "early, a filter), and whether the slots that it indexes are those that are named",
            ],
        )
        yield found if trust.parts else unstored.perhaps_taken_back(case, found)
    elif trust.agreed and trust.agreed == trust.calls:
        yield CAUSE.ruled_out(
            f"none of {plural(trust.agreed, 'store call')} read fewer slots than the metadata names"
        )
