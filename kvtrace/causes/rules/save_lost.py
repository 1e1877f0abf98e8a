"""save-lost: KV that had been handed over and did not stay: its file was written anew, or the save failed."""

from __future__ import annotations

from kvtrace.causes.evidence.accounted import all_written
from kvtrace.causes.rule import FAULT, SAVES, Case, Cause, Results, SaveEnd, Stage
from kvtrace.words import count, plural

CAUSE = Cause(
    id="save-lost",
    stage=Stage.EFFECT,
    severity=FAULT,
    ledger=SAVES,
    meaning=(
        "Saved, and then overwritten or dropped inside the connector: prompts with different tokens share "
        "one key, or an asynchronous save failed."
    ),
    seen_as=(
        "As many bytes as were read of a prompt came to rest, and as many again under all of the names with "
        "the next prompts that are saved, which do not even share its first block (salted prefix digests), "
        "while older KV stays: a store that uses its places again drops the oldest first. "
        "Or a save that the connector itself reports as failed. What a connector loses in other ways is not "
        "visible."
    ),
    remedy=(
        "Build the key from all tokens up to the end of what is stored, and from the model, the layer and "
        "the rank. If saves failed, look at the connector's queue."
    ),
    save_ends=(SaveEnd.OVERWRITTEN, SaveEnd.FAILED),
)


def rule(case: Case) -> Results:
    saves = case.run.async_saves
    hit = case.affected(CAUSE)
    if hit and SaveEnd.OVERWRITTEN in case.ends:
        yield case.finding(
            CAUSE,
            "Different prompts are stored under one key: the later one overwrites the earlier one's KV.",
            evidence=[
                f"the files of {plural(len(hit), 'request')} were written again, with no fewer bytes, for "
                "prompts that do not even share their first block, while older KV stays",
                "a later load of the first prompt's key gives the KV of the other",
            ],
            headline=f"{plural(len(hit), 'request')} lost their KV to another prompt with the same key",
        )
    elif hit:
        lost = [save for save in saves if save.end == SaveEnd.FAILED]
        yield case.finding(
            CAUSE,
            f"{plural(len(lost), 'asynchronous save')} failed after the hooks had handed them over.",
            evidence=[f"{count(len(lost))} of {plural(len(saves), 'save')} were reported as failed"],
            headline="saves failed after they had been handed over",
        )
    elif case.requests and all(r.saved for r in case.requests) and all_written(case):
        yield CAUSE.ruled_out(
            f"something of all {plural(len(case.requests), 'prompt')} was saved, and all of that was seen to "
            "leave the process"
        )
    elif saves and all(save.end == SaveEnd.SAVED for save in saves):
        yield CAUSE.not_observed(
            f"{plural(len(saves), 'asynchronous save')} began and came back, none as failed; whether all "
            "that was read for them left the process was not seen"
        )
