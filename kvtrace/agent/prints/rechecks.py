"""Which loaded blocks are looked at once more, and when.

Nobody computes what was loaded: what changes in such a block after its use is a late write. So loaded blocks
are looked at again before one of them is given to another request, and when the connector is shut down: a
request's blocks keep their content after its end, until they are given out anew.

Where a layer of a block holds, when attention has used it, what it held before, it was not written, or is
written too late. The blocks of such a load are looked at 1, 2, 4, ... steps later as well, and when the
request ends.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtrace.agent.steps.block_tables import NULL, groups_of
from kvtrace.agent.steps.prompts import LOADED_ATTRIBUTE, Filled

MOST_WAITING = 1 << 14
"""Blocks."""
MOST_UNCHANGED = 256
"""Requests and KV cache groups."""
MOST_LOOKS = 12
"""At blocks of one request: so the last is 2048 steps after their use. Those at its end come on top."""
MOST_KNOWN = 1 << 19
"""Layers of blocks whose latest fingerprint is kept: 8 bytes each."""


@dataclass(eq=False)
class Waiting:
    """Loaded blocks of one request. ``due``: the next step after which they are looked at, where they look as
    if nothing had been loaded; ``wait``: steps from then to the one after it."""

    filled: Filled
    due: int
    wait: int = 1
    looks: int = 0


class Rechecks:
    """Of this process's worker."""

    def __init__(self) -> None:
        self.step = 0
        """That begins, or began last."""
        self.waiting: dict[tuple[int, int], Waiting] = {}
        """(group, block) -> the load that it is of."""
        self.unchanged: list[Waiting] = []
        """Of these, those that look as if nothing had been loaded."""
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
            if count:
                waits = Waiting(one._replace(blocks=one.blocks[:count]), step + 1)
                own_blocks = (block for block in _blocks(waits.filled) if block[1] != NULL)
                self.waiting |= dict.fromkeys(own_blocks, waits)
                if any(map(self._unchanged, _blocks(waits.filled), prints)):
                    self.unchanged.append(waits)
            for block, of_block in zip(_blocks(one), prints, strict=True):
                self._known.pop(block, None)  # so that it is the newest
                self._known[block] = of_block
        while len(self._known) * layers > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        while len(self.waiting) > MOST_WAITING:
            self._drop([next(iter(self.waiting.values()))])
        del self.unchanged[:-MOST_UNCHANGED]

    def _unchanged(self, block: tuple[int, int], prints: Sequence[int]) -> bool:
        """Whether some layer of a block holds what it held before."""
        known = self._known.get(block) or [0] * len(prints)
        return block[1] != NULL and any(
            value in (0, before) for value, before in zip(prints, known, strict=True)
        )

    def due(self) -> list[Filled]:
        """What is to be looked at now that the step is over."""
        found = [one for one in self.unchanged if one.due <= self.step]
        for one in found:
            one.due, one.wait, one.looks = self.step + one.wait * 2, one.wait * 2, one.looks + 1
            if one.looks >= MOST_LOOKS:
                one.due = 1 << 63
        return [one.filled for one in found]

    def leaving(self, output: Any, sizes: Sequence[int]) -> list[Filled]:
        """What is to be looked at before the step of that SchedulerOutput runs: some of it is given out anew,
        and of that nothing is to be seen later; or it looked as if nothing had been loaded, and its request
        ends. ``sizes``: the groups' block sizes."""
        gone = self._loads(block for block in _given(output, sizes) if block in self.waiting)
        self._drop(gone)
        ended = [one for one in self.unchanged if one.filled.request in output.finished_req_ids]
        return [one.filled for one in (*gone, *ended)]

    def remaining(self) -> list[Filled]:
        """What is to be looked at when nothing comes after it."""
        return [one.filled for one in self._loads(self.waiting)]

    def _loads(self, blocks: Iterable[tuple[int, int]]) -> list[Waiting]:
        return list(dict.fromkeys(self.waiting[block] for block in blocks))

    def _drop(self, gone: Sequence[Waiting]) -> None:
        for one in gone:
            for block in _blocks(one.filled):
                if self.waiting.get(block) is one:
                    del self.waiting[block]
        if gone:
            self.unchanged = [one for one in self.unchanged if one not in gone]


def _blocks(filled: Filled) -> Iterator[tuple[int, int]]:
    return ((filled.group, block) for block in filled.blocks)


def _given(output: Any, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(group, block) of all that a step gives out. What the GPU's prefix cache has stays what it is."""
    cached, loading = output.scheduled_cached_reqs, getattr(output, LOADED_ATTRIBUTE, ())
    tables = [
        (new.block_ids, 0 if new.req_id in loading else new.num_computed_tokens)
        for new in output.scheduled_new_reqs
    ]
    tables += [(table, 0) for table in cached.new_block_ids if table]
    for table, computed in tables:
        for group, own in enumerate(groups_of(table)):
            yield from ((group, block) for block in own[computed // sizes[group] if sizes[group] else 0 :])
