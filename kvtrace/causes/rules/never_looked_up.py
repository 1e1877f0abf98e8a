"""never-looked-up: the scheduler let a request in and never asked the connector."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes import load_side
from kvtrace.causes.case import Case
from kvtrace.causes.model import Finding, RuledOut
from kvtrace.ledger.model import MISSED
from kvtrace.words import count, of_all, plural

ID = "never-looked-up"


def rule(case: Case) -> Iterator[Finding | RuledOut]:
    rows = case.run.load_rows
    if not rows:
        return
    mine = load_side.with_account(case, MISSED + ID)
    if mine:
        known = {case.engines[row.engine].facts.scheduler for row in mine} - {None}
        evidence = [
            "no call of get_num_new_matched_tokens for them, though their prompts were computed",
        ]
        if known:
            evidence.append(f"scheduler: {', '.join(sorted(filter(None, known)))}")
        tokens = sum(load_side.tokens_of(case, row, MISSED + ID) for row in mine)
        yield load_side.finding(
            case, ID, MISSED + ID,
            f"The scheduler never asked the connector for {of_all(len(mine), len(rows), 'request')}: "
            f"{plural(tokens, 'prompt token')} computed without a lookup.",
            evidence=evidence,
            headline=f"{plural(len(mine), 'request')} never looked up in the connector",
        )  # fmt: skip
        return
    yield RuledOut(ID, f"the connector was asked for {of_all(len(rows), len(rows), 'request')}"
                   f" ({count(sum(row.prompt for row in rows))} prompt tokens)")  # fmt: skip
