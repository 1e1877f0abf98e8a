"""decode-not-offered: tokens made in decode stand in no metadata."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes.case import Case, Piece
from kvtrace.causes.model import Finding, RuledOut
from kvtrace.ledger.intervals import Interval
from kvtrace.words import count, plural

ID = "decode-not-offered"


def claim(case: Case, piece: Piece, left: list[Interval]) -> list[Interval]:
    if piece.phase != "decode" or case.engines[piece.engine].decode_entries:
        return []
    return left


def rule(case: Case) -> Iterator[Finding | RuledOut]:
    booked = case.booked.get(ID)
    if booked is None:
        offered = sum(engine.decode_entries for engine in case.run.engines)
        if offered:
            yield RuledOut(ID, f"{plural(offered, 'store')} of this run reach past a prompt")
        return
    stores = sum(engine.store_entries for engine in case.run.engines)
    yield case.finding(
        ID,
        "This connector never offers tokens made in decode.",
        evidence=[
            f"{count(case.tokens(ID))} tokens were made in decode; 0 of {count(stores)} store entries "
            "reach past a prompt"
        ],
        events=case.events(ID, "decode tokens after the prompt, in no metadata"),
        headline="tokens made in decode are never offered",
    )
