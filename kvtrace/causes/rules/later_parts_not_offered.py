"""later-parts-not-offered: what a streaming session adds to its prompt, and no metadata holds."""

from __future__ import annotations

from kvtrace.causes.rule import LIMIT, SAVES, Case, Cause, Interval, LostSpan, Results, Stage, Turn
from kvtrace.words import count, of_all, plural

CAUSE = Cause(
    id="later-parts-not-offered",
    stage=Stage.SCHEDULE,
    severity=LIMIT,
    ledger=SAVES,
    meaning=(
        "Streaming input: a prompt comes in parts, with answers in between. The connector offers the first "
        "part, or nothing, and never what a later part adds."
    ),
    seen_as="No store entry of any streaming session in this run reaches past the first part of its prompt.",
    remedy=(
        "in build_connector_meta, offer of a known request what is longer than what was offered before: vLLM "
        "schedules the next part of a session under the same request id, in scheduled_new_reqs, with the "
        "whole prompt."
    ),
)


def _offers_parts(case: Case, tag: int) -> bool:
    sessions = [request for request in case.of_engine(tag) if request.grown_step]
    return any(request.stored_end > request.arrived for request in sessions)


def claim(case: Case, span: LostSpan, unclaimed: list[Interval]) -> list[Interval]:
    request = case.requests[span.request]
    if span.phase == "decode" or not request.grown_step or _offers_parts(case, span.engine):
        return []
    return [(max(start, request.arrived), end) for start, end in unclaimed if end > request.arrived]


CLAIMS = {Turn.POSITION: claim}


def rule(case: Case) -> Results:
    sessions = [request for request in case.requests if request.grown_step]
    rows = case.affected(CAUSE)
    if rows:
        mine = [request for request in sessions if request.engine == rows[0].engine]
        engine = case.engines[rows[0].engine]
        name = engine.connector_name
        affected = of_all(len(rows), len(mine), "streaming session")
        added = count(sum(request.prompt - request.arrived for request in rows))
        yield case.finding(
            CAUSE,
            f"{name} never offers what later parts of a streaming session add to its prompt: {affected}.",
            evidence=[
                f"the first parts have {count(sum(r.arrived for r in rows))} tokens, later ones and the "
                f"answers between them {added}; no store in the metadata reaches past a first part"
            ],
            headline=f"later parts of {plural(len(rows), 'streaming session')} are never offered",
        )
    elif sessions and all(_offers_parts(case, tag) for tag in {one.engine for one in sessions}):
        reach = sum(request.stored_end > request.arrived for request in sessions)
        whose = of_all(reach, len(sessions), "streaming session")
        yield CAUSE.ruled_out(f"store entries of {whose} reach past the first part")
