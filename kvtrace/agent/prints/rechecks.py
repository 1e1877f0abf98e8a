"""Which loaded blocks are looked at once more, and when.

A block into which a load was to write, and that holds when attention has used it what it held before, was not
written, or is written too late. Which of both shows later: nobody computes what was loaded, so that what
changes in such a block after its use is a late write. All blocks that were loaded for its request are
looked at again, 1, 2, 4, ... steps later, when the request ends, before one of them is given to another
request, and when the connector is shut down. A request's blocks keep their content after its end, until they
are given out anew.

Without such a load nothing is kept but the latest fingerprint of each block, and a step costs one look at an
empty list.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtrace.agent.steps.block_tables import NULL, groups_of
from kvtrace.agent.steps.prompts import Filled

MOST_WAITING = 256
"""Requests and KV cache groups."""
MOST_LOOKS = 12
"""At blocks of one request: so the last is 2048 steps after their use. Those at its end come on top."""
MOST_KNOWN = 1 << 19
"""Layers of blocks whose latest fingerprint is kept: 8 bytes each."""


@dataclass
class Waiting:
    """Blocks of one request that look as if nothing had been loaded. ``due``: the next step after which they
    are looked at; ``wait``: steps from then to the one after it."""

    filled: Filled
    due: int
    wait: int = 1
    looks: int = 0


class Rechecks:
    """Of this process's worker."""

    def __init__(self) -> None:
        self.waiting: list[Waiting] = []
        self.step = 0
        """That begins, or began last."""
        self._known: dict[tuple[int, int], array[int]] = {}
        """(group, block) -> its latest fingerprints, one a layer."""

    def printed(
        self,
        step: int,
        filled: Sequence[Filled],
        values: Iterable[Sequence[int]],
        loaded: Mapping[str, int],
        sizes: Sequence[int],
    ) -> None:
        """Blocks have their fingerprints, at the end of ``step``.

        Args:
            values: of each block of ``filled``, in their order, one a layer.
            loaded: requests for which the connector loads -> leading tokens that the step did not compute.
            sizes: the groups' block sizes.
        """
        own, layers = iter(values), 1
        for one in filled:
            prints = [array("q", next(own)) for _ in one.blocks]
            layers = max(layers, *map(len, prints))
            count = one.came(loaded, sizes[one.group])
            loads = zip(one.blocks[:count], prints, strict=False)
            if any(self._unchanged(one.group, block, of_block) for block, of_block in loads):
                self.waiting.append(Waiting(one._replace(blocks=one.blocks[:count]), step + 1))
            for block, of_block in zip(one.blocks, prints, strict=True):
                self._known.pop((one.group, block), None)  # so that it is the newest
                self._known[one.group, block] = of_block
        while len(self._known) * layers > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        del self.waiting[:-MOST_WAITING]

    def _unchanged(self, group: int, block: int, prints: Sequence[int]) -> bool:
        """Whether some layer of a block holds what it held before."""
        known = self._known.get((group, block)) or [0] * len(prints)
        return block != NULL and any(
            value in (0, before) for value, before in zip(prints, known, strict=True)
        )

    def due(self) -> list[Filled]:
        """What is to be looked at now that the step is over."""
        found = [one for one in self.waiting if one.due <= self.step]
        for one in found:
            one.due, one.wait, one.looks = self.step + one.wait * 2, one.wait * 2, one.looks + 1
            if one.looks >= MOST_LOOKS:
                one.due = 1 << 63
        return [one.filled for one in found]

    def leaving(self, output: Any) -> list[Filled]:
        """What is to be looked at before the step of that SchedulerOutput runs: its request ends, or some of
        it is given out anew. Of that nothing is to be seen later."""
        new = set(_given(output))
        gone = [one for one in self.waiting if not new.isdisjoint(_blocks(one.filled))] if new else []
        self.waiting = [one for one in self.waiting if one not in gone]
        ended = [one for one in self.waiting if one.filled.request in output.finished_req_ids]
        return [one.filled for one in (*gone, *ended)]

    def remaining(self) -> list[Filled]:
        """What is to be looked at when nothing comes after it."""
        return [one.filled for one in self.waiting]


def _blocks(filled: Filled) -> Iterator[tuple[int, int]]:
    return ((filled.group, block) for block in filled.blocks)


def _given(output: Any) -> Iterator[tuple[int, int]]:
    """(group, block) of all that a step gives out."""
    cached = output.scheduled_cached_reqs
    tables = [new.block_ids for new in output.scheduled_new_reqs]
    tables += [one.new_block_ids for one in cached] if isinstance(cached, list) else cached.new_block_ids
    for table in tables:
        for group, own in enumerate(groups_of(table) if table else ()):
            yield from ((group, block) for block in own)
