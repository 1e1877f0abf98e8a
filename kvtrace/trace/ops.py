"""vLLM's attention and KV-cache ops that kvtrace records: one table, a row each.

Standard library only: this module is imported inside vLLM's processes. The ops are registered in
``vllm/model_executor/layers/attention/`` (from 0.16.0 on; ``vllm/attention/layer.py`` before).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Op:
    """One op. ``code``: its number in records (append, never renumber). ``updates_cache``: it writes the
    KV cache and is no attention; vLLM calls no connector hook around it."""

    name: str
    code: int
    updates_cache: bool = False


ATTENTION_WITH_OUTPUT = Op("unified_attention_with_output", 2)
KV_CACHE_UPDATE = Op("unified_kv_cache_update", 5, updates_cache=True)

TABLE: tuple[Op, ...] = (
    Op("unified_attention", 1),
    ATTENTION_WITH_OUTPUT,
    Op("unified_mla_attention", 3),
    Op("unified_mla_attention_with_output", 4),
    KV_CACHE_UPDATE,
    Op("unified_mla_kv_cache_update", 6, updates_cache=True),
    Op("dummy_attention", 7),
)

BY_NAME: dict[str, Op] = {op.name: op for op in TABLE}
BY_CODE: dict[int, Op] = {op.code: op for op in TABLE}
NAMES: tuple[str, ...] = tuple(op.name for op in TABLE)
CODES = max(BY_CODE) + 1
"""One more than the greatest code: the size of a table by code."""

UPDATES = tuple(op for op in TABLE if op.updates_cache)


def name_of(code: int) -> str:
    """The name of a code, "" where this version has none."""
    op = BY_CODE.get(code)
    return op.name if op is not None else ""
