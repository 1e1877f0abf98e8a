"""load-not-injected: accepted, and not written into the layers."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes import load_side
from kvtrace.causes.case import Case
from kvtrace.causes.model import Finding, NotObserved, RuledOut
from kvtrace.ledger.load_model import NOT_LOADED
from kvtrace.words import count, of_all, plural

ID = "load-not-injected"


def rule(case: Case) -> Iterator[Finding | RuledOut | NotObserved]:
    accepted = load_side.accepted(case)
    mine = load_side.not_loaded(case, ID)
    if mine:
        tokens = sum(load_side.tokens_of(case, row, NOT_LOADED + ID) for row in mine)
        yield load_side.finding(
            case, ID, NOT_LOADED + ID,
            f"{plural(tokens, 'token')} accepted from the connector never reached the layers "
            f"({of_all(len(mine), len(accepted), 'load')}): attention ran over KV that was not there.",
            evidence=load_side.seen(mine, ID),
            headline=f"{plural(tokens, 'accepted token')} never written into the layers",
        )  # fmt: skip
        return
    measured = [row for row in accepted if row.measured]
    if measured:
        yield RuledOut(
            ID, f"the load hooks wrote the slots of {of_all(len(measured), len(accepted), 'load')}"
            f" ({count(sum(row.accepted for row in measured))} tokens, measured in every layer)",
        )  # fmt: skip
    elif accepted:
        yield NotObserved(ID, "what the load hooks wrote into the layers was not seen: threads, native code, "
                          "or not sampled")  # fmt: skip
