"""Where one request's tokens ended up: its positions by outcome."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from kvtrace.causes.assign import assign_spans
from kvtrace.causes.case import Assigned, Case, make_case
from kvtrace.causes.outcomes import kept, not_saved
from kvtrace.causes.registry import CATALOGUE
from kvtrace.ledger.ends import NOT_SAVED, SaveEnd
from kvtrace.ledger.run import LostSpan, Run, Span
from kvtrace.story.story import Range
from kvtrace.terms import NOT_OBSERVED, Grade, cause_of


def ranges(run: Run, request: int) -> list[Range]:
    """The positions of a watched request (a row of Run.requests); neighbours that fared alike are one."""
    case, inside = make_case(run), [make_case(part.run) for part in run.parts]
    by_pairs: dict[tuple[int, ...], list[_Named]] = defaultdict(list)
    for span in run.spans:
        if span.request == request:
            by_pairs[span.pairs].extend(_named(case, inside, span))
    found: list[Range] = []
    for pairs, parts in by_pairs.items():
        for start, end, outcome, grade, sent_to in sorted(parts):
            cause = CATALOGUE.get(cause_of(outcome) or "")
            stage = cause.stage if cause else None
            one = Range(start, end, outcome, stage, list(pairs), grade.label, sent_to)
            if found and found[-1] == replace(one, start=found[-1].start, end=start):
                found[-1].end = end
            else:
                found.append(one)
    return sorted(found, key=lambda part: (part.start, part.pairs))


_Named = tuple[int, int, str, Grade, str]


def _named(case: Case, inside: Sequence[Case], span: Span) -> list[_Named]:
    """(start, end, outcome, grade, peer of what was only sent) of a span; what was not saved gets its cause
    from the rules, on the case of the connector that lost it."""
    outcome = span.outcome
    if outcome.name != NOT_SAVED:
        name = kept(outcome.name, outcome.code)
        return [(span.start, span.end, name, outcome.grade, outcome.sent_to)]
    request = case.requests[span.request]
    phases = (
        (span.start, min(span.end, request.prompt), "prefill"),
        (max(span.start, request.prompt), span.end, "decode"),
    )
    pieces = [
        LostSpan(
            span.request, request.engine, start, end, len(span.pairs), phase, span.step,
            SaveEnd(outcome.code), span.live, outcome.grade, span.part,
        )
        for start, end, phase in phases
        if start < end
    ]  # fmt: skip
    one = replace(
        case, run=replace(case.run, lost=pieces), assigned=defaultdict(Assigned), unheard=Assigned()
    )
    assign_spans(one, inside)
    found = [
        (start, end, not_saved(cause), outcome.grade, "")
        for cause, assigned in one.assigned.items()
        for _, start, end in assigned.samples
    ]
    unheard = [(start, end, NOT_OBSERVED, Grade.NOT_OBSERVED, "") for _, start, end in one.unheard.samples]
    return found + unheard
