"""loaded-partly: fewer tokens reached the layers than were accepted."""

from __future__ import annotations

from kvtrace.causes.case import Case
from kvtrace.causes.cause import LOADS, Cause
from kvtrace.causes.evidence import loads
from kvtrace.causes.model import Results
from kvtrace.ledger.ends import LoadEnd
from kvtrace.ledger.load_model import NOT_LOADED
from kvtrace.ledger.model import LOADED
from kvtrace.terms import FAULT
from kvtrace.words import count, of_all, plural

CAUSE = Cause(
    id="loaded-partly",
    stage=None,
    severity=FAULT,
    ledger=LOADS,
    meaning="Fewer tokens reached the layers than were accepted: attention ran over KV that was not there.",
    seen_as=(
        "The slots that the load hooks were seen to write in a layer, or the slots that the metadata "
        "names, against what the scheduler accepted."
    ),
    remedy="Look at the connector's slot mapping: the lookup promised more than it covers.",
    load_ends=(LoadEnd.PARTLY,),
)


def rule(case: Case) -> Results:
    accepted = loads.accepted(case)
    mine = loads.not_loaded(case, CAUSE.id)
    if mine:
        tokens = sum(loads.tokens_of(case, row, NOT_LOADED + CAUSE.id) for row in mine)
        whole = sum(row.accepted for row in mine)
        yield loads.finding(
            case, CAUSE, NOT_LOADED + CAUSE.id,
            f"{count(tokens)} of {plural(whole, 'accepted token')} did not reach the layers "
            f"({of_all(len(mine), len(accepted), 'load')}): attention ran over KV that was not there.",
            evidence=loads.seen(mine, CAUSE.id),
            headline=f"{plural(tokens, 'accepted token')} never written into the layers",
        )  # fmt: skip
        return
    measured = [row for row in accepted if row.measured and row.accounts.get(LOADED)]
    if measured:
        whose = of_all(len(measured), len(accepted), "load")
        yield CAUSE.ruled_out(f"as many slots were written as tokens accepted in {whose}")
