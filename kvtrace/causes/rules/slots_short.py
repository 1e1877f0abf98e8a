"""slots-short: a save hook that read fewer slots than its metadata names."""

from __future__ import annotations

from kvtrace.causes.case import CaseRequest
from kvtrace.causes.diagnosis import Finding
from kvtrace.causes.evidence.hooks import SAVE_HOOKS
from kvtrace.causes.evidence.logs import logs_in
from kvtrace.causes.rule import (
    FAULT,
    LIMIT,
    SAVES,
    Case,
    Cause,
    Interval,
    LostSpan,
    Results,
    SaveEnd,
    Stage,
    Turn,
)
from kvtrace.terms import Grade
from kvtrace.words import count, percent, plural

CAUSE = Cause(
    id="slots-short",
    stage=Stage.EFFECT,
    severity=FAULT,
    ledger=SAVES,
    meaning="The hook read fewer slots of the KV tensor than its metadata names.",
    seen_as=(
        "0 < slots read < slots declared in a watched call, by a block or more per entry. Or a part of a "
        "prompt that was read, and no more of it, by no unit, where the metadata of that step is not "
        "understood: a choice to confirm, as nothing that was promised is known to be missing."
    ),
    remedy="Look at the connector's slot mapping.",
    save_ends=(SaveEnd.PART_READ,),
)


def claim(case: Case, span: LostSpan, unclaimed: list[Interval]) -> list[Interval]:
    """Positions of a prompt that was read in part, in steps whose metadata is not understood: that it names
    no more is not known."""
    if span.phase == "decode" or span.grade < Grade.READ:
        return []
    return unclaimed if _read_unnamed(case, case.requests[span.request]) else []


def _read_unnamed(case: Case, request: CaseRequest) -> bool:
    """Whether all that was read of a request was read in steps whose metadata is not understood."""
    unread = case.engines[request.engine].watched_steps
    return bool(request.saved and request.entries) and all(one.step in unread for one in request.entries)


CLAIMS = {Turn.WORKER: claim}


def rule(case: Case) -> Results:
    trust = case.run.trust
    hit = case.affected(CAUSE)
    if hit and not trust.short:
        yield _partly(case)
    elif hit:
        share = percent(trust.short_read, trust.short_declared)
        blocks = sorted({e.block_size for e in case.run.engines if e.block_size})
        yield case.finding(
            CAUSE,
            f"The save hook read {share} of the slots that the metadata names in "
            f"{plural(trust.short, 'call')}.",
            evidence=[
                f"{count(trust.short_read)} of {count(trust.short_declared)} slots were read from the KV "
                f"tensors in {count(trust.short)} of {plural(trust.measured, 'measured store call')}; "
                f"{count(trust.agreed)} read all of theirs",
                f"less than a block ({blocks[0] if blocks else 1} slots) per entry counts as rounding, not "
                "as a loss; where a step stores for several requests, the loss is divided among them",
                *logs_in(case, SAVE_HOOKS),
            ],
            events=case.events(CAUSE),
            headline=f"the save hook read {share} of the slots that its metadata names",
            remedy=["compare the slot mapping that is indexed in save_kv_layer with the one in the metadata"],
        )
    elif trust.agreed and trust.agreed == trust.calls:
        yield CAUSE.ruled_out(
            f"none of {plural(trust.agreed, 'store call')} read fewer slots than the metadata names"
        )


def _partly(case: Case) -> Finding:
    """Of prompts a part was read, and the metadata does not say how much was meant to be."""
    hit = case.affected(CAUSE)
    lost, kept = case.tokens(CAUSE), sum(case.of_request(r).saved for r in hit)
    share = percent(kept, lost + kept)
    return case.finding(
        CAUSE,
        f"The save hook read {share} of the tokens of {plural(len(hit), 'request')}, and never the others. "
        "Is that meant?",
        severity=LIMIT,
        evidence=[
            f"{count(lost)} tokens were not read, {count(kept)} of the same prompts were; no unit with a "
            "name gives these amounts",
            "the metadata of these steps has a shape that is not understood: whether it names the others is "
            "not known",
            *logs_in(case, SAVE_HOOKS),
        ],
        events=case.events(CAUSE, "never read, beside other tokens of the same prompt that were"),
        headline=f"the save hook read {share} of the tokens of these prompts",
        remedy=[
            "compare the slot mapping that is indexed in save_kv_layer with the one in the metadata; where "
            "they are the same, look at how build_connector_meta counts"
        ],
    )
