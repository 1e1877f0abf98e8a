"""Which blocks of KV a step filled with prompt tokens, from what the scheduler hands to a worker.

Only requests whose prompt is not yet through are kept: a decode step costs one look at two lists. A request
that is resumed after its prompt was through is not taken up again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvtrace.agent.steps.block_tables import groups_of, resumed_of

LOADED_ATTRIBUTE = "_kvtrace_loaded"
"""Of a SchedulerOutput: the requests that it admits for which the connector loads, if any."""
_MOST_REQUESTS = 4096


class Filled(NamedTuple):
    """Blocks of one request and KV cache group that are full of prompt tokens and were not yet named:
    ``blocks[i]`` stands at place ``first + i`` of its table."""

    request: str
    group: int
    first: int
    blocks: list[int]

    def came(self, loaded: Mapping[str, int], size: int) -> int:
        """How many of its first blocks the connector loads, or they were there already.

        Args:
            loaded: requests for which the connector loads -> leading tokens that the step did not compute.
            size: tokens in a block.
        """
        return min(len(self.blocks), max(0, loaded.get(self.request, 0) // size - self.first))


@dataclass
class _Prompt:
    tokens: int
    tables: list[list[int]]
    named: list[int]
    """Places of each table that were named."""
    ids: Sequence[int]
    """Its tokens' ids; empty where more than these goes into the model."""


class PromptBlocks:
    """The requests whose prompts are being computed."""

    def __init__(self) -> None:
        self._prompts: dict[str, _Prompt] = {}
        self.ids: dict[str, Sequence[int]] = {}
        """Token ids of the prompts that the latest step computes, of those that are nothing else."""

    @property
    def any(self) -> bool:
        """Whether :meth:`scheduled` has anything to do in a step that admits nobody."""
        return bool(self._prompts)

    def scheduled(self, output: Any, sizes: Sequence[int], wanted: bool) -> list[Filled]:
        """What the step of that SchedulerOutput fills, once it has run.

        Args:
            sizes: the groups' block sizes, 0 for a group that is of no interest.
            wanted: False: nothing is named in this step; what it fills is named in a later one, if there
                is one before the prompt is through.
        """
        self.ids = {}
        new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
        for req_id in output.finished_req_ids:
            self._prompts.pop(req_id, None)
        before: dict[str, int] = {}
        for one in new:
            tokens = _length(one)
            if tokens and len(self._prompts) < _MOST_REQUESTS:
                tables = [list(blocks) for blocks in groups_of(one.block_ids)]
                self._prompts[one.req_id] = _Prompt(tokens, tables, [0] * len(tables), _ids(one))
                before[one.req_id] = one.num_computed_tokens
        for req_id, blocks, anew, computed in _running(cached):
            prompt = self._prompts.get(req_id)
            if prompt is not None:
                _extend(prompt, blocks, anew)
                before[req_id] = computed
        filled: list[Filled] = []
        for req_id, computed in before.items():
            prompt = self._prompts[req_id]
            end = computed + output.num_scheduled_tokens.get(req_id, 0)
            if wanted:
                filled += _named(req_id, prompt, computed, min(end, prompt.tokens), sizes)
                self.ids |= {req_id: prompt.ids} if prompt.ids else {}
            if end >= prompt.tokens:
                del self._prompts[req_id]
        return filled


def _length(new: Any) -> int:
    tokens = getattr(new, "prompt_token_ids", None)
    return len(tokens) if tokens is not None else 0


_MORE = ("mm_features", "mm_kwargs", "mm_inputs", "prompt_embeds", "lora_request")
"""What else may go into the model of a request: then equal ids are no equal tokens."""


def _ids(new: Any) -> Sequence[int]:
    more = [getattr(new, name, None) for name in _MORE]
    plain = all(one is None or (isinstance(one, list | tuple) and not one) for one in more)
    return new.prompt_token_ids if plain and isinstance(new.prompt_token_ids, list) else ()


def _running(cached: Any) -> Iterator[tuple[str, Any, bool, int]]:
    """(request, its new blocks or None, whether they are the whole table, tokens computed before)."""
    resumed = resumed_of(cached)
    columns = cached.req_ids, cached.new_block_ids, cached.num_computed_tokens
    for req_id, blocks, computed in zip(*columns, strict=True):
        yield req_id, blocks, req_id in resumed, computed


def _extend(prompt: _Prompt, blocks: Any, anew: bool) -> None:
    if anew:
        prompt.tables = [[] for _ in prompt.tables]
        prompt.named = [0] * len(prompt.tables)
    for table, own in zip(prompt.tables, groups_of(blocks) if blocks else (), strict=False):
        table.extend(own)


def _named(req_id: str, prompt: _Prompt, computed: int, end: int, sizes: Sequence[int]) -> Iterator[Filled]:
    for group, (size, table) in enumerate(zip(sizes, prompt.tables, strict=False)):
        if not size:
            continue
        # What could not be loaded is computed again: then the count goes back.
        first = min(prompt.named[group], computed // size)
        full = min(end // size, len(table))
        if full > first:
            prompt.named[group] = full
            yield Filled(req_id, group, first, table[first:full])
