"""Requests that left, or had to start again, before their tokens were offered for saving."""

from __future__ import annotations

from kvtrace.causes.case import Case, Request
from kvtrace.causes.rules.first_chunk_only import only_first

ABORTED = "FINISHED_ABORTED"


def undisturbed(case: Case, tag: int) -> list[Request]:
    """Requests that ran to their end at once, and whose prompt was offered as far as the unit goes."""
    unit = case.units.get(tag)
    found = []
    for request in case.of_engine(tag):
        if request.preemptions or request.status == ABORTED or not request.entries:
            continue
        wanted = unit.aligned(request.prompt) if unit else request.prompt - max(1, request.block)
        if request.stored_end > 0 and request.stored_end >= wanted:
            found.append(request)
    return found


def only_this_one(case: Case, request: Request) -> bool:
    """Whether nothing but its fate explains that a request was not offered (further)."""
    others = undisturbed(case, request.engine)
    if only_first(request):
        # Stores in the first chunk's step alone: is that how this connector works?
        return any(r.chunks >= 2 and not only_first(r) for r in others)
    return bool(others)
