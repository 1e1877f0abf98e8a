"""load-failed: the connector reported blocks that it could not load, or its load hook raised."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes import load_side
from kvtrace.causes.case import Case
from kvtrace.causes.model import Finding, RuledOut
from kvtrace.ledger.load_model import NOT_LOADED
from kvtrace.words import of_all, plural

ID = "load-failed"
_HOOKS = ("start_load_kv", "wait_for_layer_load")


def rule(case: Case) -> Iterator[Finding | RuledOut]:
    accepted = load_side.accepted(case)
    mine = load_side.not_loaded(case, ID)
    if not mine:
        if accepted:
            loads = plural(len(accepted), "load")
            yield RuledOut(ID, f"no block was reported as not loaded, and no load hook raised ({loads})")
        return
    tokens = sum(load_side.tokens_of(case, row, NOT_LOADED + ID) for row in mine)
    evidence = load_side.reasons(mine, ID)
    evidence += [
        f"{e.hook}: {e.type}: {e.message} (at {e.where})" for e in case.run.exceptions if e.hook in _HOOKS
    ][:2]
    after: dict[str, int] = {}
    for row in mine:
        status = case.requests[row.request].status or "no end in the trace"
        after[status] = after.get(status, 0) + 1
    evidence.append("how these requests ended: " + ", ".join(f"{status} {n}" for status, n in after.items()))
    yield load_side.finding(
        case, ID, NOT_LOADED + ID,
        f"Loading failed for {plural(tokens, 'token')} of {of_all(len(mine), len(accepted), 'load')}: the "
        "connector said so, or its hook raised.",
        evidence=evidence,
        headline=f"loading failed for {plural(len(mine), 'request')}",
    )  # fmt: skip
