"""Who holds which KV in a step: what the scheduler knows when ``build_connector_meta`` returns.

Block tables of the requests, one list a KV cache group with its own block size; how far each request is
computed and what it awaits from outside; its token ids. All of it is looked up when it is first asked for:
most steps never ask.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from kvtrace.agent.steps.block_tables import groups_of, resumed_of

Interval = tuple[int, int]
"""Token positions [start, end) in a request."""

_REMEMBERED = 512


@dataclass
class Admissions:
    """What lookups and allocations tell of requests, and the block tables of the last ones that finished.

    ``local``: tokens that the GPU's own prefix cache held at a request's admission. ``awaited``: the step of
    its allocation, and the positions that the scheduler accepted from the connector. ``given``: block tables
    as their blocks were given out, as far as that was looked at, whatever a sliding window has left since.
    """

    local: dict[str, int] = field(default_factory=dict)
    awaited: dict[str, tuple[int, Interval]] = field(default_factory=dict)
    gone: OrderedDict[str, list[list[int]]] = field(default_factory=OrderedDict)
    given: dict[str, list[list[int]]] = field(default_factory=dict)

    def looked_up(self, req_id: str, local: int) -> None:
        self.local[req_id] = local

    def allocated(self, req_id: str, external: int, step: int) -> None:
        """``update_state_after_alloc``. A load in the background comes again, with 0, when it is done."""
        if external > 0:
            local = self.local.get(req_id, 0)
            self.awaited[req_id] = (step, (local, local + external))
        else:
            self.awaited.pop(req_id, None)

    def ran(self, scheduled: dict[str, int]) -> None:
        """A step's metadata has been built: what runs in it has what it waited for."""
        for req_id in [one for one in self.awaited if one in scheduled]:
            del self.awaited[req_id]

    def freed(self, req_id: str, tables: list[list[int]]) -> None:
        """A request leaves: a save that comes after it may still name it by its id."""
        self.local.pop(req_id, None)
        self.awaited.pop(req_id, None)
        self.given.pop(req_id, None)
        self.gone[req_id] = tables
        while len(self.gone) > _REMEMBERED:
            self.gone.popitem(last=False)


class StepRequests:
    """What the requests of one step hold.

    Args:
        scheduler: vLLM's Scheduler, or None.
        output: the SchedulerOutput that the metadata was built from, or None.
        admissions: what is known from before; None for nothing.
        step: number of this step, as given to ``Admissions.allocated``.
    """

    def __init__(
        self, scheduler: Any, output: Any, admissions: Admissions | None = None, step: int = 0
    ) -> None:
        self._scheduler = scheduler
        self._admissions = admissions or Admissions()
        self._step = step
        self.new_reqs: list[str] = []
        self._tables: dict[str, list[list[int]]] = {}
        self._views: dict[str, tuple[list[list[int]], ...]] = {}
        scheduled = getattr(output, "num_scheduled_tokens", None)
        self.scheduled: dict[str, int] = scheduled if isinstance(scheduled, dict) else {}
        for new in getattr(output, "scheduled_new_reqs", None) or ():
            self.new_reqs.append(new.req_id)
            self._tables[new.req_id] = self._admissions.given[new.req_id] = _groups(new.block_ids)
        for req_id in resumed_of(getattr(output, "scheduled_cached_reqs", None)):
            self._admissions.given.pop(req_id, None)
        requests = getattr(scheduler, "requests", None)
        self.requests: dict[str, Any] = requests if isinstance(requests, dict) else {}
        self.sizes = _block_sizes(scheduler)
        self._owners: dict[int, str] | None = None
        self._shared: dict[int, list[str]] = {}
        self._all_indexed = False

    def __bool__(self) -> bool:
        """Whether anything is known of the step's requests."""
        return bool(self.requests) or bool(self._tables)

    def knows(self, text: str) -> bool:
        return text in self.requests or text in self._tables or text in self._admissions.gone

    def size(self, group: int) -> int:
        """Tokens in a block of a group; 0 where unknown."""
        return self.sizes[group] if group < len(self.sizes) else self.sizes[0] if self.sizes else 0

    def tables(self, req_id: str) -> list[list[int]]:
        """Block ids of a request, a list a KV cache group, in order of position; 0 is vLLM's null block."""
        known = self._tables.get(req_id)
        if known is None:
            known = read_tables(self._scheduler, req_id) if req_id in self.requests else []
            if not any(known):
                known = self._admissions.gone.get(req_id, known)
            self._tables[req_id] = known
        return known

    def views(self, req_id: str) -> tuple[list[list[int]], ...]:
        """The tables and, where a sliding window has left blocks, the tables with these: who is told of new
        blocks alone, as connectors are, goes on naming them. Once a step and request."""
        if req_id not in self._views:
            known, before = self.tables(req_id), self._admissions.given.get(req_id, [])
            nothing: list[int] = []
            given = [
                [block or was for block, was in zip_longest(now, then, fillvalue=0)] if 0 in now else now
                for now, then in zip_longest(known, before[: len(known)], fillvalue=nothing)
            ]
            self._views[req_id] = (known,) if given == known else (known, given)
            if req_id in self.requests:
                self._admissions.given[req_id] = given
        return self._views[req_id]

    # --- how far a request is ------------------------------------------------------------------

    def computed(self, req_id: str) -> Interval | None:
        """(tokens with KV before this step, after it); None where unknown."""
        before = getattr(self.requests.get(req_id), "num_computed_tokens", None)
        if not isinstance(before, int):
            return None
        return before, before + self.scheduled.get(req_id, 0)

    def awaited(self, req_id: str) -> Interval | None:
        """Positions that are to come from the connector and are not there yet."""
        step, interval = self._admissions.awaited.get(req_id, (0, (0, 0)))
        # A request that runs has what it waited for, but for what this very step accepted.
        over = req_id in self.scheduled and step != self._step
        return None if over or interval[1] <= interval[0] else interval

    def local(self, req_id: str) -> int:
        """Tokens at its beginning that it found in the GPU's own prefix cache."""
        return self._admissions.local.get(req_id, 0)

    def prompt(self, req_id: str) -> int:
        """Tokens of its prompt, -1 unknown."""
        count = getattr(self.requests.get(req_id), "num_prompt_tokens", None)
        return count if isinstance(count, int) else -1

    def tokens(self, req_id: str) -> list[int]:
        """Its token ids, output included; empty where unknown. Not to be changed."""
        request = self.requests.get(req_id)
        for name in ("_all_token_ids", "prompt_token_ids"):
            known = getattr(request, name, None)
            if isinstance(known, list):
                return known
        return []

    # --- who holds a block ----------------------------------------------------------------------

    def holders(self, block: int) -> list[str]:
        """The requests that hold a block: those of this step, or else any. A block that was freed is
        nobody's: what was the number of a finished request's block may be anything else as well."""
        if block <= 0:
            return []
        if self._owners is None:
            self._owners = {}
            self._index([req for req in self.scheduled or self._tables if self.knows(req)])
        if block not in self._owners and not self._all_indexed:
            self._all_indexed = True
            done = set(self.scheduled or self._tables)
            self._index([req for req in self.requests if req not in done])
        owner = self._owners.get(block)
        return self._shared.get(block) or ([] if owner is None else [owner])

    def _index(self, req_ids: list[str]) -> None:
        owners = self._owners
        assert owners is not None
        for req_id in req_ids:
            for table in self.tables(req_id):
                blocks = dict.fromkeys(table, req_id)
                blocks.pop(0, None)
                for block in owners.keys() & blocks.keys():
                    self._shared.setdefault(block, [owners[block]]).append(req_id)
                owners.update(blocks)


def read_tables(scheduler: Any, req_id: str) -> list[list[int]]:
    """A request's block tables from vLLM's own; empty where there are none."""
    manager = getattr(scheduler, "kv_cache_manager", None)
    if manager is None:
        return []
    try:
        return _groups(manager.get_block_ids(req_id))
    except Exception:
        return []


def _groups(block_ids: Any) -> list[list[int]]:
    """One list a KV cache group; none of what is no block table."""
    return [list(group) for group in groups_of(block_ids)] if isinstance(block_ids, (list, tuple)) else []


def _block_sizes(scheduler: Any) -> list[int]:
    """Tokens in a block of each KV cache group."""
    coordinator = getattr(getattr(scheduler, "kv_cache_manager", None), "coordinator", None)
    managers = getattr(coordinator, "single_type_managers", None) or ()
    sizes = [getattr(manager, "block_size", 0) for manager in managers]
    if not sizes:
        groups = getattr(getattr(scheduler, "kv_cache_config", None), "kv_cache_groups", None) or ()
        sizes = [getattr(getattr(group, "kv_cache_spec", None), "block_size", 0) for group in groups]
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        size = getattr(scheduler, "block_size", None)
        sizes = [size] if isinstance(size, int) and size > 0 else []
    return sizes
