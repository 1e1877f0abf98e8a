"""decode-not-offered: output tokens that no metadata holds."""

from __future__ import annotations

from kvtrace.causes.rule import LIMIT, SAVES, Case, Cause, Interval, Piece, Results, Stage, Turn
from kvtrace.words import count, plural

CAUSE = Cause(
    id="decode-not-offered",
    stage=Stage.SCHEDULE,
    severity=LIMIT,
    ledger=SAVES,
    meaning="Output tokens, computed in decode, are not offered for saving by this connector.",
    seen_as="No store entry in this run reaches past a prompt.",
    remedy="By design in most connectors; some have an option for it (LMCache: save_decode_cache).",
)


def claim(case: Case, piece: Piece, left: list[Interval]) -> list[Interval]:
    if piece.phase != "decode" or case.engines[piece.engine].decode_entries:
        return []
    return left


CLAIMS = {Turn.POSITION: claim}


def rule(case: Case) -> Results:
    if not case.affected(CAUSE):
        offered = sum(engine.decode_entries for engine in case.run.engines)
        if offered:
            yield CAUSE.ruled_out(f"{plural(offered, 'store')} of this run reach past a prompt")
        return
    stores = sum(engine.store_entries for engine in case.run.engines)
    yield case.finding(
        CAUSE,
        "This connector never offers output tokens for saving.",
        evidence=[
            f"{count(case.tokens(CAUSE))} output tokens were computed in decode; 0 of {count(stores)} "
            "store entries reach past a prompt"
        ],
        events=case.events(CAUSE, "output tokens after the prompt, in no metadata"),
        headline="output tokens are never offered for saving",
    )
