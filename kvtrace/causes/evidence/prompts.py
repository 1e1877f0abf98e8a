"""What is known of single requests: held by the store, offered in part, ended or preempted too early."""

from __future__ import annotations

from collections.abc import Container, Sequence

from kvtrace.causes.case import Case, CaseRequest, kept_before
from kvtrace.words import count, plural

ABORTED = "FINISHED_ABORTED"
_LEAST_OFFERED = 2
"""Chunked prompts that tell how a connector offers."""


def held(case: Case, request: CaseRequest) -> int:
    """Leading positions that the connector holds: by an earlier store of a prompt that begins with them, or
    by its own answer at the lookup. That a store begins behind others says nothing of these: it may leave
    them out."""
    return max(answered(request), kept_before(case, request))


def answered(request: CaseRequest) -> int:
    """Leading positions that are there by the answer at the lookup."""
    found = request.local + request.offered if request.offered > 0 else 0
    if found == request.prompt - 1 and request.block and found % request.block:
        return request.prompt  # vLLM computes one token at least: a store of all of it answers so
    return found


def first_chunk_alone(request: CaseRequest) -> bool:
    """Several chunks, and every store entry in the step of the first one."""
    return (
        request.chunks >= 2
        and not request.grown_step
        and request.stored_end > 0
        and all(entry.step <= request.chunk_step for entry in request.entries)
    )


def offered_once(case: Case, request: CaseRequest) -> bool:
    """Several chunks, and one offer, of the first unit that they filled, before the last of them. So do all
    chunked prompts of its engine that were offered, and one of them would have filled another unit."""
    tag = request.engine
    return _one_early_offer(request) and case.once(
        ("offered once", tag), lambda: _all_offered_once(case, tag)
    )


def _one_early_offer(request: CaseRequest) -> bool:
    stores = [entry for entry in request.entries if entry.slots > 0]
    early = all(entry.available < request.prompt for entry in stores)
    chunked = request.chunks >= 2 and not request.grown_step
    return chunked and request.stored_end > 0 and early and len({e.step for e in stores}) == 1


def _all_offered_once(case: Case, tag: int) -> bool:
    unit = case.units.get(tag)
    offered = [r for r in case.of_engine(tag) if r.chunks >= 2 and r.stored_end > 0]
    if unit is None or len(offered) < _LEAST_OFFERED or not all(map(_one_early_offer, offered)):
        return False
    # More than one unit at once, or less than there was, is a limit on what is stored of a prompt.
    first = all(r.stored_end <= unit.value or first_chunk_alone(r) for r in offered)
    limited = any(
        min(unit.aligned(r.prompt), e.available // unit.value * unit.value) > r.stored_end
        for r in case.of_engine(tag)
        for e in r.entries
    )
    return first and not limited and any(unit.aligned(r.prompt) > r.stored_end for r in offered)


def nothing_else_explains(case: Case, request: CaseRequest) -> bool:
    """Whether requests that were not disturbed were offered in full, so that only this one's abort or
    preemption explains what it lacks."""
    tag = request.engine
    others = case.once(("offered in full", tag), lambda: _offered_in_full(case, tag))
    if first_chunk_alone(request):
        # Stores in the first chunk's step alone: is that how this connector works?
        later = (r.chunks >= 2 and not first_chunk_alone(r) for r in others)
        return case.once(("stored after the first chunk", tag), lambda: any(later))
    return bool(others)


def _offered_in_full(case: Case, tag: int) -> list[CaseRequest]:
    """Requests that ran to their end at once, and whose prompt was offered as far as the unit goes; none
    where another one's was not: then something else leaves prompts out."""
    unit = case.units.get(tag)
    found = []
    for request in case.of_engine(tag):
        if request.preemptions or request.status == ABORTED:
            continue
        wanted = unit.aligned(request.prompt) if unit else request.prompt - max(1, request.block)
        if request.stored_end > 0 and request.stored_end >= wanted:
            found.append(request)
        elif wanted > max(request.stored_end, held(case, request)):
            return []
    return found


def offered_of_others(case: Case, rows: Sequence[CaseRequest]) -> list[str]:
    """How many other requests of the engine of ``rows`` the metadata names."""
    mine = {request.row for request in rows}
    others = [request for request in case.of_engine(rows[0].engine) if request.row not in mine]
    named = sum(request.stored_end > 0 for request in others)
    return [f"of the {plural(len(others), 'other request')} the metadata names a store of {count(named)}"]


def unexplained(case: Case) -> Container[int]:
    """Rows of the requests that lost tokens, nobody knows why."""
    assigned = case.assigned.get("metadata-has-no-store")
    return assigned.requests if assigned else ()
