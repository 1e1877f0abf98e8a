"""Answers of ``get_num_new_matched_tokens`` that count something else than the tokens to load behind those
that the GPU has (vllm/distributed/kv_transfer/kv_connector/v1/base.py, 0.32.0)."""

from __future__ import annotations

from collections.abc import Sequence

from kvtrace.causes.case import Case
from kvtrace.ledger.loads.outcome import LoadOf
from kvtrace.words import count, sentence

FROM_ZERO = (
    "get_num_new_matched_tokens must answer how many tokens are found behind num_computed_tokens, not from "
    "the first one on"
)
_IN_BLOCKS = (
    "get_num_new_matched_tokens must answer in tokens, not in blocks: it answered {} where {} tokens, {} "
    "blocks of {}, are like an earlier prompt's."
)


def beyond(case: Case) -> list[LoadOf]:
    """Lookups that answered more tokens than the prompt has behind the GPU's own prefix cache."""
    return [row for row in case.run.load_rows if row.local + (row.answer or 0) > row.prompt]


def miscounted(case: Case, rows: Sequence[LoadOf]) -> list[str]:
    """What to change in the lookup, where its own numbers show that it counts something else; ``rows``: loads
    that came to nothing, or in part."""
    if any(row.local for row in beyond(case)):
        return [f"{sentence(FROM_ZERO)}."]
    sizes = {case.engines[row.engine].block_size for row in rows}
    size = sizes.pop() if len(sizes) == 1 else 0
    if size > 1 and all(row.offered > 0 and row.offered * size == row.shared - row.local for row in rows):
        first = max(rows, key=lambda row: row.offered)
        blocks = count(first.offered)
        return [_IN_BLOCKS.format(blocks, count(first.offered * size), blocks, count(size))]
    return []
