"""decode-not-offered: output tokens that no metadata holds."""

from __future__ import annotations

from kvtrace.causes.rule import LIMIT, SAVES, Case, Cause, Interval, LostSpan, Results, Stage, Turn
from kvtrace.words import count, plural

CAUSE = Cause(
    id="decode-not-offered",
    stage=Stage.SCHEDULE,
    severity=LIMIT,
    ledger=SAVES,
    meaning="Output tokens, computed in decode, are not offered for saving by this connector.",
    seen_as=(
        "No store entry in this run reaches past a prompt; or tokens were seen to be read, and none of these."
    ),
    remedy="By design in most connectors; some have an option for it (LMCache: save_decode_cache).",
)


def claim(case: Case, span: LostSpan, unclaimed: list[Interval]) -> list[Interval]:
    """What no metadata names of generated tokens; or seems to name, and was not read, as none of the run
    was."""
    return [] if span.phase != "decode" or case.offers_decode(span.engine) else unclaimed


CLAIMS = {Turn.UNREAD: claim, Turn.POSITION: claim}


def rule(case: Case) -> Results:
    if not case.affected(CAUSE):
        offered = sum(engine.decode_entries for engine in case.run.engines)
        if offered:
            yield CAUSE.ruled_out(f"{plural(offered, 'store')} of this run reach past a prompt")
        return
    stores = sum(engine.store_entries for engine in case.run.engines)
    past = sum(engine.decode_entries for engine in case.run.engines)
    tokens = count(case.tokens(CAUSE))
    unread = f"{tokens} output tokens were not read for saving."
    yield case.finding(
        CAUSE,
        unread if past else "No output token was offered for saving.",
        evidence=[
            f"{tokens} output tokens were computed in decode; {count(past)} of {count(stores)} stores reach "
            "past a prompt" + (", and these tokens were not seen to be read" if past else "")
        ],
        headline="no output token was offered for saving",
    )
