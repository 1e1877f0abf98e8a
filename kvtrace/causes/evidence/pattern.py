"""What all requests of a finding have in common, in a few words: for the first screen."""

from __future__ import annotations

from kvtrace.causes.case import Case
from kvtrace.causes.cause import LOADS, Cause
from kvtrace.causes.evidence import loads, unlike
from kvtrace.causes.evidence.unstored import part_of_prompts


def pattern(case: Case, cause: Cause) -> str:
    """``not the first that loads in its step``; "" where nothing is told."""
    if cause.ledger == LOADS:
        rows = loads.affected(case, cause)
        told = [*unlike.words_of(loads.what_fails(case, rows)), *loads.part_of_loads(rows, cause)]
    elif cause.id in case.assigned:
        told = [*unlike.words_of(unlike.of_saves(case, cause)), *part_of_prompts(case, cause)]
    else:
        told = []
    return next(iter(told), "")
