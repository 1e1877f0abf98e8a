"""ranks-diverge: ranks that saved different amounts of the same layer of one request."""

from __future__ import annotations

from kvtrace.causes.case import CaseRequest
from kvtrace.causes.rule import FAULT, NOTE, SAVES, Case, Cause, Event, Results, Stage
from kvtrace.terms import Grade
from kvtrace.words import of_all, plural

CAUSE = Cause(
    id="ranks-diverge",
    stage=Stage.COMPLETION,
    severity=FAULT,
    ledger=SAVES,
    meaning="Ranks of one engine saved different amounts for the same request.",
    seen_as=(
        "The ledger, rank by rank: one saved what another is known not to have saved. A note where the cause "
        "of what single ranks lost is known."
    ),
    remedy="Look at the causes that are found on the rank that saved less.",
)


def _unknown(request: CaseRequest) -> bool:
    """Whether it was not seen of each rank what it saved: what metadata says, it says for all of them."""
    return request.unseen or (request.saved > 0 and (request.grade or Grade.DECLARED) < Grade.READ)


_UNEXPLAINED = frozenset({"metadata-has-no-store"})


def _explained(case: Case) -> bool:
    """Whether a cause is known of what some pairs alone lost: then this is what it looks like from afar."""
    return any(
        span.pairs < case.engines[span.engine].pairs
        for ident, assigned in case.assigned.items()
        if ident not in _UNEXPLAINED
        for span, _, _ in assigned.samples
    )


def rule(case: Case) -> Results:
    requests = case.run.requests
    if not requests:
        return
    apart = [row for row, one in enumerate(requests) if one.diverged]
    ranks = max((len(engine.workers) for engine in case.run.engines), default=0)
    if apart:
        rows = [case.requests[row] for row in apart[:3]]
        yield case.finding(
            CAUSE,
            f"Ranks saved different amounts of {of_all(len(apart), len(requests), 'request')}.",
            severity=NOTE if _explained(case) else FAULT,
            evidence=["the other findings name the stage at which single ranks lost their tokens"],
            events=[
                Event(r.id, r.chunk_step, "not the same positions of a layer saved on every rank")
                for r in rows
            ],
            headline="ranks saved different amounts of the same request",
            requests=len(apart),
        )
    elif ranks > 1 and any(r.saved for r in case.requests) and not any(map(_unknown, case.requests)):
        both = "both ranks" if ranks == 2 else f"all {ranks} ranks"
        yield CAUSE.ruled_out(f"{both} saved the same tokens of {plural(len(requests), 'request')}")
