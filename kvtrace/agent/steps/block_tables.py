"""Which KV cache blocks stand where in a request's block table: BLOCKS records, by the scheduler.

Read from what the scheduler hands to its workers in each step: the whole table of a request that is
admitted or resumed, and the blocks that were appended since for one that runs. A load that goes on in the
background gets its blocks steps before its request is first scheduled: there the table is asked for once, at
the end of the ``schedule()`` that allocated it. A step that gives out no block costs one look at a list.

The null block (0), by which vLLM fills places that a sliding window has left, is not written. Blocks that
such a window gives back later are not taken out of the table: the connector does not hear of it either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvtrace.agent.state import AGENT
from kvtrace.trace.format import Flag, Kind, Role, pack_head
from kvtrace.trace.rows import BlocksGiven

NULL = 0
"""The null block."""
_FIRST, _RESUMED = int(Flag.FIRST), int(Flag.FIRST | Flag.RESUMED)

Groups = Sequence[Sequence[int]]
"""The block ids of each KV cache group."""


class RecordedTables:
    """The length of each live request's block table, as far as it was recorded."""

    def __init__(self) -> None:
        self._lengths: dict[str, list[int]] = {}

    def scheduled(self, scheduler: Any, output: Any, allocated: list[str], step: int, t: int) -> None:
        """Record what a ``schedule()`` gave out.

        Args:
            allocated: requests for which the connector was told of an allocation in it.
            t: host time, ns.
        """
        admitted = output.scheduled_new_reqs
        for new in admitted:
            request = scheduler.requests.get(new.req_id)
            again = getattr(request, "num_preemptions", 0)
            self._begins(new.req_id, groups_of(new.block_ids), _RESUMED if again else _FIRST, step, t)
        cached = output.scheduled_cached_reqs
        if isinstance(cached, list):  # 0.8.5: an object a request
            self._continue([one.req_id for one in cached], [one.new_block_ids for one in cached],
                           resumed_of(cached), step, t)  # fmt: skip
        elif any(cached.new_block_ids):
            self._continue(cached.req_ids, cached.new_block_ids, resumed_of(cached), step, t)
        if allocated:
            scheduled = output.num_scheduled_tokens
            for req_id in allocated:
                if req_id not in scheduled and req_id in scheduler.requests:
                    table = scheduler.kv_cache_manager.get_block_ids(req_id)
                    self._begins(req_id, groups_of(table), _FIRST, step, t)

    def forget(self, req_id: str) -> None:
        self._lengths.pop(req_id, None)

    def _continue(self, req_ids: list[str], given: list[Any], resumed: set[str], step: int, t: int) -> None:
        for req_id, blocks in zip(req_ids, given, strict=True):
            if not blocks:
                continue
            groups = groups_of(blocks)
            if req_id in resumed or req_id not in self._lengths:
                self._begins(req_id, groups, _RESUMED, step, t)
            else:
                self._write(req_id, groups, 0, step, t)

    def _begins(self, req_id: str, groups: Groups, flags: int, step: int, t: int) -> None:
        self._lengths[req_id] = [0] * len(groups)
        self._write(req_id, groups, flags, step, t)

    def _write(self, req_id: str, groups: Groups, flags: int, step: int, t: int) -> None:
        lengths = self._lengths[req_id]
        ident = AGENT.request_id(req_id)
        head = pack_head(Kind.BLOCKS, Role.SCHEDULER, 0, 0, flags, AGENT.thread())
        for group, blocks in enumerate(groups):
            start = lengths[group]
            for place, block, count in runs(blocks):
                AGENT.add(BlocksGiven(head, t, ident, step, group, start + place, block, count))
            lengths[group] = start + len(blocks)


def runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(place, block, count) of the longest runs of ids that rise or fall by one; a falling run has a
    negative count. The null block is in none."""
    at, end = 0, len(blocks)
    while at < end:
        first = blocks[at]
        if first == NULL:
            at += 1
            continue
        stop = at + 1
        by = blocks[stop] - first if stop < end and blocks[stop] != NULL else 0
        if by not in (1, -1):
            by = 1
        while stop < end and blocks[stop] == first + by * (stop - at) and blocks[stop] != NULL:
            stop += 1
        yield at, first, by * (stop - at)
        at = stop


def groups_of(blocks: Any) -> Groups:
    """A request's block ids by group; before groups had tables of their own it was one list."""
    return (blocks,) if blocks and isinstance(blocks[0], int) else blocks


def resumed_of(cached: Any) -> set[str]:
    """The requests of ``scheduled_cached_reqs`` that run again after a preemption; none of None."""
    if cached is None or isinstance(cached, list):
        return {one.req_id for one in cached or () if one.resumed_from_preemption}
    resumed = getattr(cached, "resumed_req_ids", None)  # 0.11.1+
    if resumed is not None:
        return set(resumed)
    flags = cached.resumed_from_preemption
    return {req_id for req_id, flag in zip(cached.req_ids, flags, strict=True) if flag}
