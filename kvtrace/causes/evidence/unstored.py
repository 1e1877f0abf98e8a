"""What several causes say of KV that was read and is not in the store as it should be."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace

from kvtrace.causes.case import Case, CaseRequest
from kvtrace.causes.cause import Cause
from kvtrace.causes.diagnosis import Finding
from kvtrace.causes.evidence import unlike
from kvtrace.causes.evidence.part import PROMPTS, part_of_each
from kvtrace.ledger.run import Engine, LostSpan, Swallowed
from kvtrace.terms import LIMIT
from kvtrace.trace.format import STEP_MASK
from kvtrace.words import count, listed, of_all, plural

MAX_EXCEPTIONS = 3


def spans_of(case: Case, cause: Cause) -> list[tuple[LostSpan, int, int]]:
    """The positions that a cause took, each with the span that they are of; the first few of a long run."""
    assigned = case.assigned.get(cause.id)
    return assigned.samples if assigned else []


def where(case: Case, cause: Cause) -> list[str]:
    """What tells the requests that a cause took tokens of from others; how much of them, in how many (layer,
    rank) pairs and in which steps."""
    pieces = spans_of(case, cause)
    hit = case.affected(cause)
    tokens = case.tokens(cause)
    whole = sum(request.computed for request in hit)
    pairs = sorted({span.pairs for span, _, _ in pieces})
    of = max(case.engines[request.engine].pairs for request in hit)
    steps = sorted({span.step & STEP_MASK for span, _, _ in pieces if span.step})
    least = "at least " * any(request.unseen for request in hit)
    parts = [f"{least}{count(tokens)} of {plural(whole, 'token')} of {plural(len(hit), 'request')}"]
    spread = count(pairs[0]) if len(pairs) == 1 else f"{count(pairs[0])} to {count(pairs[-1])}"
    parts.append(f"in {spread} of {plural(of, '(layer, rank) pair')}")
    if steps:
        parts.append(f"computed in step{'s' if len(steps) > 1 else ''} {listed(map(str, steps), 6)}")
    return [*unlike.of_saves(case, cause).values(), *part_of_prompts(case, cause), ", ".join(parts)]


def part_of_prompts(case: Case, cause: Cause) -> list[str]:
    """Which part of each prompt a cause took, where it is the same of all."""
    at = case.assigned[cause.id].at
    lost = (
        ([(start, end) for start, end, _ in parts], (0, case.requests[row].prompt))
        for row, parts in at.items()
    )
    return part_of_each(lost, PROMPTS)


def caught_there(case: Case, cause: Cause) -> list[Swallowed]:
    """Exceptions of the steps in which these positions were computed or stored, or of no known step; the
    first few."""
    steps = {span.step for span, _, _ in spans_of(case, cause)}
    steps |= {entry.step for request in case.affected(cause) for entry in request.entries if entry.slots > 0}
    facts = [fact for fact in case.run.swallowed if _at(fact, steps)]
    facts.sort(key=lambda fact: -fact.count)
    return facts[:MAX_EXCEPTIONS]


def look_there(caught: Sequence[Swallowed]) -> list[str]:
    """What to look at first, of :func:`caught_there`: not that by which code finds out, nor what was only
    logged, and has no place."""
    places = [(fact.where, fact.type) for fact in caught if fact.where and not fact.harmless]
    return [f"Look at {place}: what was to be stored raises {error} there" for place, error in places[:1]]


def _at(fact: Swallowed, steps: set[int]) -> bool:
    return not fact.went_on and (not fact.step or any(step in steps for step, _ in fact.places))


def metadata_unread(engine: Engine, requests: Sequence[CaseRequest]) -> int:
    """Of how many requests of an engine the metadata of a step was not understood, and nothing read there."""
    steps = sorted(engine.watched_steps)
    return sum(bisect_left(steps, r.first_step) < bisect_right(steps, r.last_step) for r in requests)


def said_of_unread(unread: int, requests: Sequence[CaseRequest]) -> list[str]:
    """``unread``: as of :func:`metadata_unread`."""
    whose = of_all(unread, len(requests), "prompt")
    return [f"the metadata of {whose} {_NOT_UNDERSTOOD}"] if unread else []


_NOT_UNDERSTOOD = "is not understood: whether it names these tokens is not known, only that nobody read them"


_ANSWERED = (
    "its workers answer the scheduler's side (build_connector_worker_meta): what they leave out they may say "
    "there"
)
_TELL = "See that what a worker leaves out is told to the scheduler's side, and that no lookup promises it"


def answered(case: Case) -> bool:
    """Whether what was lost may have been taken back, by a connector that was seen to save at other times."""
    return bool(case.seen_saves) and any(engine.answers_back for engine in case.run.engines)


def perhaps_taken_back(case: Case, found: Finding) -> Finding:
    """The finding; a choice to confirm where what it counts may have been taken back."""
    if not answered(case):
        return found
    return replace(
        found,
        severity=LIMIT,
        title=f"{found.title} Is that meant?",
        evidence=[_ANSWERED, *found.evidence],
        remedy=[_TELL, *found.remedy],
    )
