"""Where one request's tokens ended up: its positions by outcome."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pandas as pd

from kvtrace.causes.assign import assign_pieces
from kvtrace.causes.case import Assigned, Case, make_case
from kvtrace.causes.outcomes import kept, not_saved
from kvtrace.causes.registry import CATALOGUE
from kvtrace.ledger.ends import NOT_SAVED
from kvtrace.ledger.model import PIECE_COLUMNS, Run, Span
from kvtrace.story.model import Range
from kvtrace.terms import NOT_OBSERVED, cause_of


def ranges(run: Run, request: int) -> list[Range]:
    """The positions of a watched request (a row of Run.requests); neighbours that fared alike are one."""
    case = make_case(run)
    by_pairs: dict[tuple[int, ...], list[tuple[int, int, str]]] = defaultdict(list)
    for span in run.spans:
        if span.request == request:
            by_pairs[span.pairs].extend(_named(case, span))
    found: list[Range] = []
    for pairs, parts in by_pairs.items():
        for start, end, outcome in sorted(parts):
            last = found[-1] if found else None
            if last and last.end == start and last.account == outcome and last.pairs == list(pairs):
                last.end = end
            else:
                cause = CATALOGUE.get(cause_of(outcome) or "")
                found.append(Range(start, end, outcome, cause.stage if cause else None, list(pairs)))
    return sorted(found, key=lambda part: (part.start, part.pairs))


def _named(case: Case, span: Span) -> list[tuple[int, int, str]]:
    """(start, end, outcome) of a span; what was not saved gets its cause from the rules."""
    if span.outcome.name != NOT_SAVED:
        return [(span.start, span.end, kept(span.outcome.name, span.outcome.code))]
    request = case.requests[span.request]
    phases = (
        (span.start, min(span.end, request.prompt), "prefill"),
        (max(span.start, request.prompt), span.end, "decode"),
    )
    pieces = [
        (span.request, request.engine, start, end, len(span.pairs), phase, span.chunk, span.step,
         span.outcome.code, span.live, int(span.outcome.grade))
        for start, end, phase in phases
        if start < end
    ]  # fmt: skip
    alone = pd.DataFrame(pieces, columns=list(PIECE_COLUMNS))
    one = replace(
        case, run=replace(case.run, pieces=alone), assigned=defaultdict(Assigned), unheard=Assigned()
    )
    assign_pieces(one)
    found = [(cause, not_saved(cause)) for cause in one.assigned]
    return [
        (start, end, outcome)
        for assigned, outcome in [
            *((one.assigned[cause], outcome) for cause, outcome in found),
            (one.unheard, NOT_OBSERVED),
        ]
        for _, start, end in assigned.samples
    ]
