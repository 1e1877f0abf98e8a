"""local-hit: never a cause of lost tokens, and suspected of it all the same."""

from __future__ import annotations

from kvtrace.causes.case import CaseRequest
from kvtrace.causes.rule import NOTE, Case, Cause, Results
from kvtrace.causes.rules.already_stored import there_before
from kvtrace.ledger.intervals import intersect, length, union
from kvtrace.terms import LOCAL_HIT
from kvtrace.words import count, percent

CAUSE = Cause(
    id="local-hit",
    severity=NOTE,
    asks=False,
    meaning=(
        "Tokens that the GPU's own prefix cache already held are not computed again, so they are not offered "
        "again. They are in the store only if they were stored when they were first computed."
    ),
    seen_as="The tokens that vLLM's prefix cache gave to requests, as the scheduler counts them.",
    remedy="Nothing to do.",
)


def _stored(case: Case, request: CaseRequest) -> int:
    """Tokens that a request reused and that were seen to be saved before: of an earlier prompt that begins
    with them, or as its own before it was preempted."""
    own = (request.taken or 0) if request.preemptions else 0
    return length(intersect([(0, request.local)], union([(0, own), *there_before(case, request)])))


def rule(case: Case) -> Results:
    known = [engine for engine in case.run.engines if engine.facts.prefix_caching is not None]
    if not known or not case.requests:
        return
    reused = case.whole.tokens.get(LOCAL_HIT, 0)
    share = percent(reused, case.total_tokens)
    stored = min(reused, sum(_stored(case, r) for r in case.requests if r.local))
    found = f"; a save of {count(stored)} of these is known" if reused else ""
    yield CAUSE.ruled_out(f"{count(reused)} tokens ({share}) were reused from the GPU's prefix cache{found}")
