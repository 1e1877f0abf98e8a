"""stored-nothing: a save hook with a store entry that read no slot of the KV tensor."""

from __future__ import annotations

from kvtrace.causes.diagnosis import Finding
from kvtrace.causes.evidence import unstored
from kvtrace.causes.evidence.loads import OF_ITS_GROUP, of_several_groups
from kvtrace.causes.evidence.logs import logs_in, see_why_logged
from kvtrace.causes.rule import (
    FAULT,
    SAVES,
    Case,
    Cause,
    Interval,
    LoadEnd,
    LostSpan,
    Results,
    SaveEnd,
    Stage,
    Turn,
)
from kvtrace.ledger.reported import SAVE_HOOKS
from kvtrace.words import count, plural, sentence

CAUSE = Cause(
    id="stored-nothing",
    stage=Stage.EFFECT,
    severity=FAULT,
    ledger=SAVES,
    meaning="The hook ran with a store entry and read 0 slots. It may still write files: empty ones.",
    seen_as=(
        "0 slots read from the layer's KV tensor in a watched call with slots to store, and one of these: "
        "other calls of this connector were seen to read some; the files written hold less than 8 bytes a "
        "slot; no watched call of the run read anything (said also where the metadata leaves it to the "
        "worker), and in none could it have happened out of sight (another thread, native code, a memory "
        "address, a look into the store)."
    ),
    remedy="Look at the connector's slot mapping; in a wrapper, at which calls it does not pass on.",
    save_ends=(SaveEnd.NOTHING_READ,),
)


def idle_steps(case: Case, span: LostSpan) -> list[int]:
    """The steps in which a span may have been named by metadata that can't be read, and in which nothing was
    read: its own, and later ones of its request. [] where anything was read in one of them."""
    unread, last = case.engines[span.engine].watched_steps, case.requests[span.request].last_step
    steps = [step for step in unread if span.step == step or span.step < step <= last]
    if not span.step or case.read_steps.intersection((span.step, *steps)):
        return []
    if case.requests[span.request].saved and any(step > last for step in case.read_steps):
        return []  # it is read after its last step
    return steps


def claim(case: Case, span: LostSpan, unclaimed: list[Interval]) -> list[Interval]:
    """Positions of a step whose metadata says nothing readable, where it was seen that nothing ever was read:
    the connector decides on the worker, and there nothing was taken. Where others were read, the hook does
    its work, and these were not given to it."""
    return unclaimed if not case.read_steps and idle_steps(case, span) else []


CLAIMS = {Turn.WORKER: claim}


def rule(case: Case) -> Results:
    trust = case.run.trust
    if case.affected(CAUSE):
        yield _finding(case)
    elif trust.blind:
        yield CAUSE.not_observed(
            f"{plural(trust.blind, 'store call')} read nothing that could be seen, and no call of this "
            "connector ever did: it works where kvtrace can't look (in a thread, in native code), or "
            "stores nothing; look into its store"
        )
    elif trust.agreed and trust.agreed == trust.calls:
        yield CAUSE.ruled_out(
            f"all {plural(trust.agreed, 'store call')} read the slots that the metadata names"
        )
    elif trust.agreed:
        yield CAUSE.not_observed(
            f"what {count(trust.calls - trust.agreed)} of {plural(trust.calls, 'store call')} read was not "
            "measured, or is not what the metadata names"
        )


_VIEW = (
    "where the hook keeps a view of the KV cache (a slice, .cpu() of KV in host memory), copy it: what comes "
    "back is what the blocks hold by then"
)


def _came_back(case: Case) -> bool:
    """Whether loads wrote KV of tokens that no hook was ever seen to read."""
    return any(end in row.ends for row in case.run.load_rows for end in _WITH_KV)


_WITH_KV = (LoadEnd.LOADED, LoadEnd.WRONG)


def _finding(case: Case) -> Finding:
    some = _of_some_layers(case)
    view = not some and _came_back(case)
    what = "the save hooks ran and read none of these tokens' KV slots" + (" in some layers" if some else "")
    found = case.finding(
        CAUSE,
        f"{sentence(what)}: {plural(len(case.affected(CAUSE)), 'request')} lost tokens.",
        evidence=_evidence(case) + logs_in(case, SAVE_HOOKS),
        headline=what,
        remedy=[
            *see_why_logged(case, SAVE_HOOKS),
            *([_VIEW] if view else []),
            *([OF_ITS_GROUP] if some and of_several_groups(case, case.affected(CAUSE)) else []),
            "look at what save_kv_layer, or wait_for_save, does with the metadata: an early return (at a "
            "limit, too), an empty slot mapping, a filter by rank or layer; in a wrapper, whether these and "
            "bind_connector_metadata are passed on",
            "where a thread copies later, keep the blocks until it is done (request_finished returns True): "
            "else it reads what another request has in them by then",
            *([] if view else [_VIEW]),
            "nothing to fix where the worker found the key in a store from before this run",
        ],
    )
    return found if some else unstored.perhaps_taken_back(case, found)


def _of_some_layers(case: Case) -> bool:
    """Whether all that was lost so was lost in a part of the layers and ranks."""
    pieces = [span for span, _, _ in unstored.spans_of(case, CAUSE)]
    return all(span.pairs < case.engines[span.engine].pairs for span in pieces)


def _evidence(case: Case) -> list[str]:
    trust = case.run.trust
    evidence = unstored.where(case, CAUSE) if _of_some_layers(case) else []
    if trust.nothing:
        others = f", {count(trust.agreed)} all that the metadata names" if trust.agreed else ""
        evidence.append(
            f"{count(trust.nothing)} of {plural(trust.measured, 'measured store call')} (one per step, "
            f"layer and rank) read 0 slots of the KV tensor{others}"
        )
    steps = {
        span.step
        for span, _, _ in case.assigned[CAUSE.id].samples
        if span.step in case.engines[span.engine].watched_steps
    }
    if steps:
        evidence.append(
            "the metadata of these steps names no request, or is not understood: what is stored is decided "
            "on the worker; there the save hooks were seen to read none of their slots in "
            + plural(len(steps), "watched step")
        )
    if trust.empty:
        evidence.append(f"{count(trust.empty)} of them opened a file for writing and wrote almost nothing")
    return evidence
