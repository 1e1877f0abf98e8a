"""Whether nothing of a run is left that a cause out of sight could explain: what some rule-outs rest on."""

from __future__ import annotations

from kvtrace.causes.case import Case
from kvtrace.terms import Grade

_BY_DESIGN = frozenset({"below-save-granularity", "decode-not-offered"})
"""What a connector leaves out of each prompt alike."""


def all_accounted(case: Case) -> bool:
    """Whether every token's outcome was seen, and none was lost but by design."""
    unseen = case.unheard.requests or any(request.unseen for request in case.requests)
    return not unseen and any(r.saved for r in case.requests) and _BY_DESIGN.issuperset(case.assigned)


def all_written(case: Case) -> bool:
    """:func:`all_accounted`, and all that was saved was seen to leave the process."""
    saved = [request for request in case.requests if request.saved]
    return all_accounted(case) and all((request.grade or 0) >= Grade.WRITTEN for request in saved)
