"""local-hit: never a cause of lost tokens, and suspected of it all the same."""

from __future__ import annotations

from kvtrace.causes.rule import NOTE, Case, Cause, Results
from kvtrace.causes.tables import rows
from kvtrace.terms import LOCAL_HIT
from kvtrace.words import count, percent

CAUSE = Cause(
    id="local-hit",
    severity=NOTE,
    meaning=(
        "Tokens that the GPU's own prefix cache already held are not computed again, so they are not offered "
        "again. They are in the store only if they were stored when they were first computed."
    ),
    seen_as="The tokens that vLLM's prefix cache gave to requests, as the scheduler counts them.",
    remedy="Nothing to do.",
)


def rule(case: Case) -> Results:
    known = [engine for engine in case.run.engines if engine.facts.prefix_caching is not None]
    if not known or not case.requests:
        return
    base = case.run.base
    reuse = base[base["outcome"] == LOCAL_HIT]
    reused = sum(row.amount / max(1, case.engines[row.engine].pairs) for row in rows(reuse))
    if any(engine.facts.prefix_caching for engine in known):
        share = percent(reused, case.total_tokens)
        yield CAUSE.ruled_out(
            f"{count(reused)} tokens ({share}) were reused from the GPU's prefix cache; whether they were "
            "ever stored, the request that computed them says"
        )
    else:
        yield CAUSE.ruled_out(
            f"prefix caching is off; {count(reused)} tokens reused. With it on, fewer tokens would be "
            "offered, not more"
        )
