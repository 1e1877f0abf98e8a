"""load-after-use: the attention of a layer ran before its load was waited for."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes import load_side
from kvtrace.causes.case import Case
from kvtrace.causes.model import Finding, RuledOut
from kvtrace.ledger.load_model import NOT_LOADED
from kvtrace.words import of_all, plural

ID = "load-after-use"


def rule(case: Case) -> Iterator[Finding | RuledOut]:
    sync = [row for row in load_side.accepted(case) if not row.asynchronous]
    mine = load_side.not_loaded(case, ID)
    if mine:
        tokens = sum(load_side.tokens_of(case, row, NOT_LOADED + ID) for row in mine)
        yield load_side.finding(
            case, ID, NOT_LOADED + ID,
            f"Attention ran over {plural(tokens, 'token')} before their KV was waited for "
            f"({of_all(len(mine), len(sync), 'load')}).",
            evidence=load_side.seen(mine, ID),
            headline="attention ran before the loaded KV was there",
        )  # fmt: skip
    elif sync:
        yield RuledOut(
            ID, f"in the steps of {plural(len(sync), 'load')} no attention body began before its load hook"
        )
