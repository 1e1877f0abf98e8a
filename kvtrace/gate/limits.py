"""What a report cannot say, in the sentences that ``check``, ``diff`` and ``baseline`` add to theirs."""

from __future__ import annotations

from kvtrace.report.model import Report
from kvtrace.terms import NOT_OBSERVED
from kvtrace.words import count, plural

_MOST_SPOOLS = 3
_MOST_NOTES = 8


def limits_of(report: Report) -> list[str]:
    """One sentence each: an incomplete recording, what is damaged, tokens and causes that were not
    observed; [] of a run that was seen whole. At most 8 of the report's own notes are quoted."""
    limits, notes = report["limits"], report["limits"]["notes"]
    found = list(notes[:_MOST_NOTES])
    if len(notes) > _MOST_NOTES:
        found.append(f"{plural(len(notes) - _MOST_NOTES, 'more limit')} of this run: see kvtrace explain -v")
    if limits["lost_records"]:
        found.append(
            f"{plural(limits['lost_records'], 'record')} of the trace were lost: what they held is missing"
        )
    for one in limits["damaged"][:_MOST_SPOOLS]:
        found.append(f"{one['spool']}: {one['detail']}")
    if len(limits["damaged"]) > _MOST_SPOOLS:
        found.append(f"and {len(limits['damaged']) - _MOST_SPOOLS} more damaged spools")
    for what, ledger in (("saves", report["ledger"]["saves"]), ("loads", report["ledger"]["loads"])):
        if ledger["accounts"].get(NOT_OBSERVED):
            tokens = count(ledger["tokens"].get(NOT_OBSERVED, 0))
            found.append(f"{what}: {tokens} of {count(ledger['total_tokens'])} tokens not observed")
    if unseen := report["not_observed"]:
        names = ", ".join(dict.fromkeys(one["id"] for one in unseen))
        found.append(f"not observed (kvtrace explain -v says why): {names}")
    return found
