"""Settings in which two engines differ, where one does not find what the other saved."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

from kvtrace.causes.case import Case
from kvtrace.causes.evidence.loads import KeptBefore
from kvtrace.grouped import leaves
from kvtrace.ledger.run import Engine

_MOST = 4
_LONGEST = 60
_FACTS = {
    "block_size": "block_size",
    "hash_algo": "prefix_caching_hash_algo",
    "model": "model",
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "vllm": "version of vLLM",
}
"""Of an engine's facts those that keys are built on, by vLLM's names for them."""


def differing(case: Case, missed: Iterable[KeptBefore]) -> list[str]:
    """``block_size (64 here, 32 there)``: of the engine that asks, and of the one that had saved. Names of
    kv_connector_extra_config stand in quotes; of what may be a secret a digest is compared."""
    engines = {(one.row.engine, one.by.engine): None for one in missed}
    found: dict[str, None] = {}
    for asks, saved in engines:
        here, there = _settings(case.engines[asks]), _settings(case.engines[saved])
        for name in here | there:
            if here.get(name) != there.get(name):
                found[f"{name} ({_said(here.get(name))} here, {_said(there.get(name))} there)"] = None
    return list(islice(found, _MOST))


def set_alike(settings: list[str]) -> list[str]:
    """What to do about these: at most one remedy."""
    named = ", ".join(settings)
    return [f"first set alike what the engines' keys, or units, may depend on: {named}"] if settings else []


def _settings(engine: Engine) -> dict[str, Any]:
    facts = {said: getattr(engine.facts, name) for name, said in _FACTS.items()}
    dtypes = sorted({str(group.dtype) for group in engine.facts.kv_groups})
    own = {f'"{name}"': value for name, value in leaves(engine.extra) if value != {}}
    return {**facts, "dtype of the KV cache": ", ".join(dtypes), **own}


def _said(value: Any) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
