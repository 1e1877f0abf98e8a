"""load-never-finished: an asynchronous load of which nobody ever heard again."""

from __future__ import annotations

from kvtrace.causes.case import Case
from kvtrace.causes.cause import LOADS, Cause
from kvtrace.causes.evidence import loads
from kvtrace.causes.model import Results
from kvtrace.ledger.ends import LoadEnd
from kvtrace.ledger.load_model import NOT_LOADED
from kvtrace.ledger.model import PENDING
from kvtrace.terms import FAULT
from kvtrace.words import of_all, plural

CAUSE = Cause(
    id="load-never-finished",
    stage=None,
    severity=FAULT,
    ledger=LOADS,
    meaning="The request waits for remote KV for ever.",
    seen_as=(
        "An asynchronous load that was accepted, of which no get_finished tells and after which the "
        "request never ran: open for 5 s or more when the request was aborted, or for 60 s or more when "
        "the trace ends."
    ),
    remedy=(
        "Look at get_finished on the ranks named here: every rank must report the request, also when its "
        "load failed (then together with get_block_ids_with_load_errors)."
    ),
    load_ends=(LoadEnd.NOT_FINISHED,),
)


def rule(case: Case) -> Results:
    asynchronous = [row for row in loads.accepted(case) if row.asynchronous]
    mine = loads.not_loaded(case, CAUSE.id)
    if mine:
        longest = max(row.waited_ns for row in mine) / 1e9
        others = [row.waited_ns / 1e9 for row in asynchronous if row not in mine and row.waited_ns >= 0]
        evidence = loads.reasons(mine, CAUSE.id)
        evidence.append("no worker and no scheduler record says that it finished; the request never ran")
        if others:
            evidence.append(f"the longest of {plural(len(others), 'other load')} took {max(others):.2f} s")
        yield loads.finding(
            case, CAUSE, NOT_LOADED + CAUSE.id,
            f"Nobody heard again of {of_all(len(mine), len(asynchronous), 'asynchronous load')}: the longest "
        f"was open for {longest:.1f} s.",
            evidence=evidence,
            headline=f"{plural(len(mine), 'request')} waited for a load that never finished",
        )  # fmt: skip
    elif asynchronous:
        still = sum(bool(row.accounts.get(PENDING)) for row in asynchronous)
        rest = f"; {plural(still, 'load')} open for a short time at the end" if still else ""
        yield CAUSE.ruled_out(f"{of_all(len(asynchronous) - still, len(asynchronous), 'asynchronous load')} "
                       f"finished{rest}")  # fmt: skip
