"""loaded-partly: fewer tokens reached the layers than were accepted."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes import load_side
from kvtrace.causes.case import Case
from kvtrace.causes.model import Finding, RuledOut
from kvtrace.ledger.load_model import NOT_LOADED
from kvtrace.ledger.model import LOADED
from kvtrace.words import count, of_all, plural

ID = "loaded-partly"


def rule(case: Case) -> Iterator[Finding | RuledOut]:
    accepted = load_side.accepted(case)
    mine = load_side.not_loaded(case, ID)
    if mine:
        tokens = sum(load_side.tokens_of(case, row, NOT_LOADED + ID) for row in mine)
        whole = sum(row.accepted for row in mine)
        yield load_side.finding(
            case, ID, NOT_LOADED + ID,
            f"{count(tokens)} of {plural(whole, 'accepted token')} did not reach the layers "
            f"({of_all(len(mine), len(accepted), 'load')}): attention ran over KV that was not there.",
            evidence=load_side.seen(mine, ID),
            headline=f"{plural(tokens, 'accepted token')} never written into the layers",
        )  # fmt: skip
        return
    measured = [row for row in accepted if row.measured and row.accounts.get(LOADED)]
    if measured:
        whose = of_all(len(measured), len(accepted), "load")
        yield RuledOut(ID, f"as many slots were written as tokens accepted in {whose}")
