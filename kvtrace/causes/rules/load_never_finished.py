"""load-never-finished: an asynchronous load of which nobody ever heard again."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes import load_side
from kvtrace.causes.case import Case
from kvtrace.causes.model import Finding, RuledOut
from kvtrace.ledger.load_model import NOT_LOADED
from kvtrace.ledger.model import PENDING
from kvtrace.words import of_all, plural

ID = "load-never-finished"


def rule(case: Case) -> Iterator[Finding | RuledOut]:
    asynchronous = [row for row in load_side.accepted(case) if row.asynchronous]
    mine = load_side.not_loaded(case, ID)
    if mine:
        longest = max(row.waited_ns for row in mine) / 1e9
        others = [row.waited_ns / 1e9 for row in asynchronous if row not in mine and row.waited_ns >= 0]
        evidence = load_side.reasons(mine, ID)
        evidence.append("no worker and no scheduler record says that it finished; the request never ran")
        if others:
            evidence.append(f"the longest of {plural(len(others), 'other load')} took {max(others):.2f} s")
        yield load_side.finding(
            case, ID, NOT_LOADED + ID,
            f"Nobody heard again of {of_all(len(mine), len(asynchronous), 'asynchronous load')}: the longest "
        f"was open for {longest:.1f} s.",
            evidence=evidence,
            headline=f"{plural(len(mine), 'request')} waited for a load that never finished",
        )  # fmt: skip
    elif asynchronous:
        still = sum(bool(row.accounts.get(PENDING)) for row in asynchronous)
        rest = f"; {plural(still, 'load')} open for a short time at the end" if still else ""
        yield RuledOut(ID, f"{of_all(len(asynchronous) - still, len(asynchronous), 'asynchronous load')} "
                       f"finished{rest}")  # fmt: skip
