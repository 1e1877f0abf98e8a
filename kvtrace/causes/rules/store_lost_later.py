"""store-lost-later: KV that was at rest once, and is gone by the end."""

from __future__ import annotations

from kvtrace.causes.evidence import sizes, unstored
from kvtrace.causes.rule import LIMIT, SAVES, Case, Cause, Results, SaveEnd, Stage
from kvtrace.words import plural

CAUSE = Cause(
    id="store-lost-later",
    stage=Stage.COMPLETION,
    severity=LIMIT,
    ledger=SAVES,
    meaning="The KV was at rest once, and the connector removed it before the run ended.",
    seen_as=(
        "The connector itself removed or emptied files that it had written, before the run ended, or wrote "
        "all of them over for prompts that do not share the first block, and not with the next prompt that "
        "it saved (else it is save-lost); of tokens it is said where as many bytes as were read of them had "
        "come to rest there."
    ),
    remedy=(
        "Give the store room for what is to be found again, and key what it holds by all tokens, "
        "the model, the layer and the rank."
    ),
    save_ends=(SaveEnd.LOST_LATER,),
)


def rule(case: Case) -> Results:
    hit = case.affected(CAUSE)
    if hit:
        yield case.finding(
            CAUSE,
            f"The connector removed, or wrote over, what it had stored of {plural(len(hit), 'request')} "
            "before the run ended. Is that meant?",
            evidence=unstored.where(case, CAUSE),
            headline="KV that was stored is gone by the end of the run",
        )
        return
    removed = list(sizes.removed(case))
    if removed:
        yield case.finding(
            CAUSE,
            "The connector removed files that it had written before the run ended. Is that meant?",
            evidence=[sizes.removed_in_words(one) for one in removed[:3]],
            headline="the connector removed files that it had written",
            in_files=float(sum(map(sizes.tokens_removed, removed))),
        )
