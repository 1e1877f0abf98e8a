"""first-chunk-only: chunked prefill, and a store for the first chunk alone."""

from __future__ import annotations

from kvtrace.causes.case import CaseRequest
from kvtrace.causes.evidence.loads import whole_size
from kvtrace.causes.evidence.prompts import first_chunk_alone, held, offered_once
from kvtrace.causes.evidence.unstored import metadata_unread, said_of_unread
from kvtrace.causes.rule import LIMIT, SAVES, Case, Cause, Interval, LostSpan, Results, Stage, Turn
from kvtrace.terms import Grade
from kvtrace.words import count, of_all, plural

CAUSE = Cause(
    id="first-chunk-only",
    stage=Stage.SCHEDULE,
    severity=LIMIT,
    ledger=SAVES,
    meaning=(
        "Chunked prefill: the connector offers the first scheduled chunk of a prompt, or the first chunks "
        "that fill its unit, and no later one."
    ),
    seen_as=(
        "Prefill chunks of a request against the store entries in its steps. Where the offer is not in the "
        "first chunk's step: one offer for each chunked prompt, of its first unit, before its last chunk."
    ),
    remedy=(
        "Offer later chunks too: in build_connector_meta, scheduled_cached_reqs of prompts still in "
        "prefill. Until then raise --max-num-batched-tokens above the longest prompt: longer steps, and "
        "more memory for activations, in the whole engine."
    ),
)


def _left_after_first(case: Case, request: CaseRequest) -> bool:
    """Whether later chunks hold something that the connector's unit allows and that is not stored yet."""
    unit = case.units.get(request.engine)
    wanted = unit.aligned(request.prompt) if unit else request.prompt
    return wanted > max(request.first_end, held(case, request))


def claim(case: Case, span: LostSpan, unclaimed: list[Interval]) -> list[Interval]:
    request = case.requests[span.request]
    if span.phase == "decode" or not (first_chunk_alone(request) or offered_once(case, request)):
        return []
    if request.first_end - request.stored_end > whole_size(case, request)[1]:
        return []  # its store ends before its first chunk does: not for the chunk
    if case.once(("chunk by chunk", span.engine), lambda: _any_chunk_by_chunk(case, span.engine)):
        return []
    if span.grade >= Grade.READ and (request.grade or Grade.PROVED) < Grade.READ:
        return []  # of the first chunk the metadata alone speaks, and it is read wrongly
    at = request.stored_end
    return [(max(start, at), end) for start, end in unclaimed if end > at]


def _any_chunk_by_chunk(case: Case, tag: int) -> bool:
    """Whether of any prompt of an engine several chunks were offered, each in a step: then it is not the
    first one alone that is stored."""
    return any(
        len({e.step for e in r.entries if e.slots > 0 and e.start < r.prompt}) > 1 and not r.grown_step
        for r in case.of_engine(tag)
    )


CLAIMS = {Turn.REQUEST: claim}


def rule(case: Case) -> Results:
    rows = case.affected(CAUSE)
    if rows:
        lost = case.assigned[CAUSE.id].requests
        rows.sort(key=lambda r: -lost[r.row])
        engine = case.engines[rows[0].engine]
        chunked = [r for r in case.of_engine(engine.tag) if r.chunks >= 2 and not r.grown_step]
        name = engine.connector_name
        affected = of_all(len(rows), len(chunked), "chunked prompt")
        what = "first chunk" if all(map(first_chunk_alone, rows)) else "first chunks"
        chunks = plural(sum(r.chunks for r in rows), "prefill chunk")
        yield case.finding(
            CAUSE,
            f"{name} stores the {what} of a prompt only: {affected} lost all later chunks.",
            evidence=[
                f"{chunks} of {plural(len(rows), 'prompt')}: each was offered in one step, that of the "
                f"{what}, and in none after it",
                f"a step computes at most {engine.facts.max_num_batched_tokens or 0} tokens "
                "(--max-num-batched-tokens)",
                *said_of_unread(metadata_unread(engine, rows), rows),
            ],
            headline=f"{affected} had only the {what} stored",
        )
        return
    chunked = [r for r in case.requests if r.chunks >= 2 and not r.grown_step]
    wanting = [r for r in chunked if _left_after_first(case, r)]
    if case.requests and all(map(_stores_later, wanting)):
        past = f"; all {count(len(wanting))} with more to store have stores past the first" if wanting else ""
        whose = of_all(len(chunked), len(case.requests), "prompt")
        yield CAUSE.ruled_out(f"{whose} computed in several chunks{past}")


def _stores_later(request: CaseRequest) -> bool:
    """Whether a later step's store entry reaches past the first chunk, and no more is known to be kept."""
    reaches = any(e.step > request.chunk_step and e.end > request.first_end for e in request.entries)
    return reaches and (request.taken is None or request.taken > request.first_end)
