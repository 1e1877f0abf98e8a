"""lookup-clamped: the connector offered more than the scheduler took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from kvtrace.causes.diagnosis import Finding
from kvtrace.causes.evidence import loads
from kvtrace.causes.rule import FAULT, LIMIT, LOADS, NOTE, Case, Cause, LoadEnd, Results
from kvtrace.ledger.loads.outcome import (
    FROM_ANOTHER,
    FULL_HIT,
    NO_BLOCKS,
    ROUNDED,
    SKIPS_CACHE,
    SUB_BLOCK,
    UNEXPLAINED,
    LoadOf,
)
from kvtrace.terms import Grade
from kvtrace.words import count, of_all, plural

CAUSE = Cause(
    id="lookup-clamped",
    severity=LIMIT,
    ledger=LOADS,
    meaning=(
        "The connector offered N tokens, and the scheduler took fewer (prompt_logprobs, full hit less one, "
        "block rounding, no free blocks)."
    ),
    seen_as=(
        "Lookup N, allocation M < N. A fault where N is more than the prompt has behind the GPU's own prefix "
        "cache: the scheduler asserts that it is not (vllm/v1/core/sched/scheduler.py, 0.32.0)."
    ),
    remedy="Depends on the reason, which the finding names where the trace shows it.",
    load_ends=(LoadEnd.CLAMPED,),
)

_REASONS = {
    SKIPS_CACHE: (
        "took none of an offer, as vLLM does for requests that must not read cached prefixes "
        "(prompt_logprobs, skip_reading_prefix_cache)",
        "Do not set prompt_logprobs where the store should be used: these requests need the logits of every "
        "prompt token, so all of them are computed.",
    ),
    FULL_HIT: (
        "kept back the last token of a whole prompt: it is computed again for its logits",
        "Nothing to do: one token of a prompt is always computed.",
    ),
    ROUNDED: ("rounded down to a whole block", "Offer whole blocks."),
    SUB_BLOCK: (
        "took nothing: the offer ends inside a block, and the GPU's own prefix cache reaches further",
        "Nothing to do: the GPU's own prefix cache reaches further.",
    ),
    FROM_ANOTHER: (
        "took none of an offer: another connector inside the same one loaded these tokens",
        "Nothing to do: of several connectors that have the tokens one loads them.",
    ),
    NO_BLOCKS: (
        "found no free KV blocks for the request until it left",
        "Give the KV cache more memory (--gpu-memory-utilization, --kv-cache-memory-bytes), or run fewer "
        "sequences at once (--max-num-seqs), which lowers throughput.",
    ),
    UNEXPLAINED: (
        "took fewer than offered; the trace does not say why",
        "Compare the lookup and update_state_after_alloc of these requests (kvtrace why).",
    ),
}
"""Why the scheduler took fewer, and what to do."""


def rule(case: Case) -> Results:
    if beyond := [row for row in case.run.load_rows if row.local + (row.answer or 0) > row.prompt]:
        yield _beyond(case, beyond)
        return
    yield from _behind_others(case)
    clamped = loads.affected(case, CAUSE)
    if not clamped:
        offered = [row for row in case.run.load_rows if row.offered]
        if offered and all(row.accepted == row.offered for row in offered):
            took = count(sum(row.offered for row in offered))
            yield CAUSE.ruled_out(
                f"the scheduler took all {took} tokens that {plural(len(offered), 'lookup')} offered"
            )
        return
    by_reason: dict[str, list[LoadOf]] = defaultdict(list)
    for row in clamped:
        by_reason[row.clamp or UNEXPLAINED].append(row)
    offered_tokens = sum(row.offered for row in clamped)
    tokens = loads.tokens(case, clamped, CAUSE)
    evidence = []
    for reason, rows in sorted(by_reason.items(), key=lambda item: -len(item[1])):
        lost = loads.tokens(case, rows, CAUSE)
        evidence.append(f"{plural(len(rows), 'request')}, {plural(lost, 'token')}: {_REASONS[reason][0]}")
    first = max(clamped, key=lambda row: loads.lost_by(row, CAUSE))
    evidence.append(
        f"{first.id}: offered {count(first.offered)}, accepted {count(first.accepted)} of "
        f"{count(first.prompt)} prompt tokens ({count(first.local)} local)"
    )
    harmless = set(by_reason) <= {FULL_HIT, SUB_BLOCK, FROM_ANOTHER}
    amount, of = f"{count(tokens)} of {plural(offered_tokens, 'token')}", plural(len(clamped), "request")
    said = f"The scheduler did not take {amount} that the connector offered ({of})."
    if set(by_reason) == {FROM_ANOTHER}:
        said = f"Another connector loaded {amount} that this one offered as well ({of})."
    yield loads.finding(
        case,
        CAUSE,
        said,
        evidence=evidence,
        remedy=[_REASONS[reason][1] for reason in by_reason],
        headline=f"{plural(tokens, 'offered token')} not taken by the scheduler",
        severity=NOTE if harmless else CAUSE.severity,
    )


def _behind_others(case: Case) -> Iterator[Finding]:
    """Of several connectors inside one: those that offered more than the one whose offer was taken."""
    taken = {row.request: row.offered for row in case.run.load_rows if row.answer is not None}
    for part in case.run.parts:
        more = {
            row.request: row.offered - taken[row.request]
            for row in part.run.load_rows
            if row.offered > taken.get(row.request, row.offered) > 0
        }
        if not more:
            continue
        rows = [row for row in part.run.load_rows if row.request in more]
        first = max(rows, key=lambda row: more[row.request])
        finding = loads.finding(
            case,
            CAUSE,
            f"{plural(sum(more.values()), 'token')} that it offered were computed again, as another "
            f"connector was asked first and has fewer ({plural(len(rows), 'request')}). Is that meant?",
            rows,
            tokens=float(sum(more.values())),
            evidence=[
                f"{first.id}: {count(first.offered)} tokens offered, {count(taken[first.request])} taken, of "
                "the other one"
            ],
            remedy=[_FIRST_OF_ALL],
            headline="tokens that it offered were computed again, as another one has fewer",
        )
        yield replace(finding, connector=part.name, title=f"{part.name}: {finding.title}")


_FIRST_OF_ALL = (
    "MultiConnector takes the first in 'connectors' that answers with any tokens: put the one that holds "
    "most of a prompt first."
)


def _beyond(case: Case, rows: list[LoadOf]) -> Finding:
    """Answers of more tokens than there are to load."""
    first = rows[0]
    return loads.finding(
        case,
        CAUSE,
        f"{of_all(len(rows), len(case.run.load_rows), 'lookup')} answered more tokens than the prompt has.",
        rows,
        severity=FAULT,
        grade=Grade.READ,
        evidence=[
            f"{first.id}: {count(first.answer or 0)} tokens offered behind {count(first.local)} that the GPU "
            f"has, of a prompt of {count(first.prompt)}; vLLM's scheduler asserts that this is never so: the "
            "engine ends there"
        ],
        remedy=[loads.FROM_ZERO if first.local else "answer no more tokens than the prompt has"],
        headline="a lookup answers more tokens than the prompt has",
    )
