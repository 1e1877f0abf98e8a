"""loaded-partly: fewer tokens reached the layers than were accepted."""

from __future__ import annotations

from kvtrace.causes.evidence import loads
from kvtrace.causes.rule import FAULT, LOADS, Case, Cause, LoadEnd, Results
from kvtrace.words import count, of_all, plural

CAUSE = Cause(
    id="loaded-partly",
    severity=FAULT,
    ledger=LOADS,
    wrong_data=True,
    meaning="Fewer tokens reached the layers than were accepted: attention ran over KV that was not there.",
    seen_as=(
        "The slots that the load hooks were seen to write in a layer, against what the scheduler accepted. "
        "Or, by the fingerprints, whoever was to write: of a load some blocks hold what their tokens compute "
        "to, and others what they had held before."
    ),
    remedy=(
        "Look at the connector's lookup and slot mapping: the lookup promises more than is stored, or than "
        "the mapping covers; or a read failed, and its blocks were not reported "
        "(get_block_ids_with_load_errors)."
    ),
    load_ends=(LoadEnd.PARTLY,),
)


def rule(case: Case) -> Results:
    accepted = loads.accepted(case)
    lost = loads.affected(case, CAUSE)
    if lost:
        tokens, where = loads.tokens(case, lost, CAUSE), loads.where(case, lost, CAUSE)
        promised = sum(row.accepted for row in lost)
        yield loads.finding(
            case,
            CAUSE,
            f"{count(tokens)} of {plural(promised, 'accepted token')} had not reached {where} when attention "
            f"ran ({of_all(len(lost), len(accepted), 'load')}): it used what was there.",
            evidence=loads.reasons_and_places(case, lost, CAUSE),
            headline=f"{plural(tokens, 'accepted token')} not in {where} when attention ran",
            remedy=loads.remedy(case, lost, CAUSE),
        )
        return
    measured = [row for row in accepted if row.measured and loads.came(case, row)]
    if measured and len(measured) == len(accepted):
        whose = of_all(len(measured), len(accepted), "load")
        yield CAUSE.ruled_out(
            f"as many slots were written as tokens accepted in {whose}{loads.windows(case, measured)}"
        )
