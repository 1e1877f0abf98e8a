"""A scheduler's step without vLLM: requests with tokens, block tables a KV cache group, what is computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvtrace.agent.metadata import Admissions, Declared, StepRequests

from .fakes import KVConnectorMetadata

BLOCK = 16


class Meta(KVConnectorMetadata):
    """Metadata with these fields."""

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)

    def __repr__(self) -> str:
        return f"Meta({vars(self)})"


def freeze(value: Any) -> str:
    """All that a metadata holds, as text."""
    if hasattr(value, "__dict__"):
        return repr({name: freeze(item) for name, item in vars(value).items()})
    return repr(value)


@dataclass
class Req:
    """One request: ``tables`` a list of block ids a group; tokens computed ``before`` and in this step."""

    tables: tuple[list[int], ...]
    prompt: int
    before: int = 0
    now: int = 0
    local: int = 0
    awaited: int = 0
    output: int = 0
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.tokens:
            rng = np.random.default_rng(self.tables[0][:1] or 0)
            self.tokens = rng.integers(1000, 150_000, self.prompt + self.output).tolist()


def step(
    requests: dict[str, Req], sizes: tuple[int, ...] = (BLOCK,), before: Admissions | None = None
) -> StepRequests:
    """What is known of the requests when the metadata of a step has been built."""
    admissions = before or Admissions()
    known: dict[str, Any] = {}
    for name, req in requests.items():
        known[name] = SimpleNamespace(
            request_id=name,
            prompt_token_ids=req.tokens[: req.prompt],
            _all_token_ids=req.tokens,
            num_prompt_tokens=req.prompt,
            num_computed_tokens=req.before,
        )
        admissions.looked_up(name, req.local)
        admissions.allocated(name, req.awaited, 1)
    scheduler = SimpleNamespace(
        block_size=sizes[0],
        requests=known,
        kv_cache_manager=SimpleNamespace(
            get_block_ids=lambda name: tuple(list(table) for table in requests[name].tables)
        ),
        kv_cache_config=SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=n)) for n in sizes]
        ),
    )
    output = SimpleNamespace(
        scheduled_new_reqs=[],
        num_scheduled_tokens={name: req.now for name, req in requests.items() if req.now},
    )
    return StepRequests(scheduler, output, admissions, step=1)


def rows(declared: Declared) -> list[tuple[Any, ...]]:
    """(request, direction, start, size) of each entry that has a direction."""
    return sorted(
        (one.req_id or "", int(one.direction), one.start, one.slots if one.slots >= 0 else one.tokens)
        for one in declared.entries
        if one.direction
    )


def slots(ids: list[int], start: int = 0, end: int | None = None, size: int = BLOCK) -> list[int]:
    """The slots of tokens [start, end) in a table of blocks."""
    every = [block * size + at for block in ids for at in range(size)]
    return every[start : len(every) if end is None else end]
