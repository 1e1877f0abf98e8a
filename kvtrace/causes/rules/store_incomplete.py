"""store-incomplete: less came to rest than was read, or nothing at all."""

from __future__ import annotations

from kvtrace.causes.evidence import sizes, unstored
from kvtrace.causes.evidence.logs import exception_line
from kvtrace.causes.rule import FAULT, LIMIT, SAVES, Case, Cause, LoadEnd, Results, SaveEnd, Stage
from kvtrace.terms import SAVED
from kvtrace.words import plural

CAUSE = Cause(
    id="store-incomplete",
    stage=Stage.COMPLETION,
    severity=FAULT,
    ledger=SAVES,
    meaning="The KV was read, and nothing of it, or much less than was read, came to rest.",
    seen_as=(
        "Files were opened for it and none ever held a byte: a fault, or a choice to confirm where it is not "
        "known what was read for them. Or the files together got less than nine tenths of the bytes that "
        "were read: narrower numbers, compression, a part kept in memory, places that are used again, KV "
        "that the store had already and a loss look alike from outside, so this is a choice to confirm; "
        "where KV came back as other numbers, kv-altered asks it."
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
        caught = unstored.caught_there(case, CAUSE)
        yield case.finding(
            CAUSE,
            f"Nothing of {plural(len(hit), 'request')} came to rest: the files that were opened are empty.",
            evidence=[*unstored.where(case, CAUSE), *map(exception_line, caught)],
            headline="what came to rest is empty",
            remedy=[*unstored.look_there(caught), CAUSE.remedy],
        )
        return
    wrote = [one for one in case.run.outside if one.files or one.went]
    if wrote and all(one.empty for one in wrote):  # on every rank
        empty = sum(one.files for one in wrote)
        yield case.finding(
            CAUSE,
            f"Of {plural(empty, 'file')} that the connector opened to write none ever held a byte. Is that "
            "meant?",
            severity=LIMIT,
            evidence=["no byte went to a peer either; what was read from the KV cache for them is not known"],
            headline="the files that it opened to write are empty",
            in_files=float(case.whole.tokens.get(SAVED, 0)),  # any of what is called saved
            remedy=["if KV is to stand in them, see whether what is written is flushed, and where it fails"],
        )
        return
    # What came back the same is there, whatever the sizes say.
    saved = [one for one in case.requests if one.saved]
    back = bool(saved) and all(one.proved >= one.saved for one in saved)
    narrower = [] if back else list(sizes.narrower(case))
    harmful = [fact for fact in case.run.swallowed if not fact.harmless]
    missing = sum(map(sizes.never_came, narrower))
    # What came back as other numbers were narrower ones: that is asked there.
    altered = not missing and any(row.ends.get(LoadEnd.ALTERED) for row in case.run.load_rows)
    if narrower and not (altered or case.run.exceptions or harmful):  # else that is why
        amount = f": those of about {plural(missing, 'token')} came to no file" if missing else ""
        yield case.finding(
            CAUSE,
            f"Fewer bytes came to rest than were read{amount}. Is that meant: narrower numbers, "
            "compression, a part kept in memory, places that are used again, KV that was read twice, or KV "
            "that the store had already?",
            severity=LIMIT,
            evidence=[sizes.in_words(one) for one in narrower[:3]],
            headline="fewer bytes came to rest than were read",
            in_files=float(sum(map(sizes.tokens_gone, narrower))),
            remedy=["if it is not meant, kvtrace verify tells whether what was stored comes back"],
        )
