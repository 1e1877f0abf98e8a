"""Reads that come after their blocks went to another request.

A connector that copies some steps later, and does not hold the blocks back until then, reads the very
blocks that its metadata named, and they hold another request's tokens by then. Which entry a read was for is
told by its blocks: they are those of entries of earlier steps of which nothing was read yet, and not those of
entries whose blocks are still theirs. Where the metadata names each of these blocks for the request that
has it now as well, it may be a connector that does not copy by entries: then the read is that one's, unless
the blocks are read for it once more.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from kvtrace.ledger.intervals import Interval
from kvtrace.ledger.requests import Request, StoreEntry
from kvtrace.ledger.slots.tables import Given

Holds = Callable[[int, int], bool]
"""Whether a request (its row) holds a block."""


_MOST = 64
"""Entries of one block that are looked at, the latest ones: what is older has long been read or lost. And
steps of one request, the first ones: a connector that names decode tokens names all before them each time."""


class _Named(NamedTuple):
    """What the metadata of a step names of one request: block -> its first position."""

    row: int
    places: Mapping[int, int]


class LateReads:
    """Of one worker of an engine with one KV cache group. Reads are shown in the order of time.

    Args:
        given: the engine's BLOCKS records, in the order of their steps.
        requests: those of the engine, by row.
        size: tokens of a block.
        watched: the steps that were watched for what they read.
    """

    def __init__(
        self, given: Sequence[Given], requests: Mapping[int, Request], size: int, watched: Container[int]
    ) -> None:
        self._size = size
        tables: dict[int, dict[int, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        self._given: dict[int, list[int]] = defaultdict(list)
        """Block -> the steps in which it was given out."""
        for one in given:
            by = 1 if one.record.count > 0 else -1
            for i in range(abs(one.record.count)):
                step, block = one.record.step, one.record.block + by * i
                tables[one.row][one.record.first + i].append((step, block))
                self._given[block].append(step)
        named: list[tuple[int, _Named]] = []
        for row, request in requests.items():
            by_step: dict[int, list[StoreEntry]] = defaultdict(list)
            for entry in request.entries:
                by_step[entry.step].append(entry)
            for step, entries in sorted(by_step.items())[:_MOST]:
                places = self._places(request, step, entries, tables.get(row, {}))
                if places:
                    named.append((step, _Named(row, places)))
        named.sort(key=lambda one: one[0])
        self._steps = [step for step, _ in named]
        self._named = [one for _, one in named]
        self._of_block: dict[int, list[int]] = defaultdict(list)
        for at, of_step in enumerate(self._named):
            for block in of_step.places:
                self._of_block[block] = [*self._of_block[block][1 - _MOST :], at]
        self._unwatched = [step for step in dict.fromkeys(self._steps) if step not in watched]
        self._blind: dict[int, list[int]] = defaultdict(list)
        """Layer -> steps in which slots of it were read, and not known which."""
        self._done: dict[int, set[int]] = defaultdict(set)
        """Layer -> entries that were read in it."""
        self._read: dict[tuple[int, int], list[int]] = defaultdict(list)
        """(layer, block) -> the steps in which it was read."""

    def _places(
        self,
        request: Request,
        step: int,
        entries: Iterable[StoreEntry],
        table: Mapping[int, Sequence[tuple[int, int]]],
    ) -> dict[int, int]:
        found = {}
        for entry in entries:
            end = min(entry.start + max(0, entry.slots), request.computed)
            if entry.start < 0 or end <= entry.start:
                continue
            for place in range(entry.start // self._size, -(-end // self._size)):
                blocks = [block for since, block in table.get(place, ()) if since <= step]
                if blocks:
                    found[blocks[-1]] = place * self._size
        return found

    def reads(self, column: int, blocks: Iterable[int], step: int) -> None:
        """These blocks are read in a layer in a step. All reads are told before the first is asked about."""
        for block in blocks:
            self._read[column, block].append(step)

    def reads_unknown(self, column: int, step: int) -> None:
        """In a step slots of a layer are read, and it is not known which."""
        self._blind[column].append(step)

    def _hidden(self, column: int, at: int, step: int) -> bool:
        """Whether an entry may have been read before a step out of sight."""
        return any(
            bisect_left(steps, step) > bisect_left(steps, self._steps[at])
            for steps in (self._unwatched, self._blind.get(column, ()))
        )

    def _once(self, column: int, block: int, step: int) -> bool:
        """Whether a block is read once while the request has it that has it in a step."""
        given, read = self._given[block], self._read[column, block]
        at = bisect_right(given, step)
        until = bisect_left(read, given[at]) if at < len(given) else len(read)
        return until - bisect_left(read, given[at - 1] if at else 0) <= 1

    @cached_property
    def reads_more_than_once(self) -> bool:
        """Whether some block is read more than once while one request has it: not each read is its own."""
        return not all(
            self._once(column, block, step) for (column, block), steps in self._read.items() for step in steps
        )

    def gone(self, column: int, blocks: frozenset[int], step: int, holds: Holds) -> dict[int, list[Interval]]:
        """What a read of these blocks in a layer came too late for: row of a request -> positions whose
        blocks it no longer holds. Empty where the read was in time, or nobody can tell for whom it was."""
        done = self._done[column]
        last = bisect_right(self._steps, step)
        near = {
            at for block in blocks for at in self._of_block.get(block, ())
            if at < last and at not in done and not self._hidden(column, at, step)
        }  # fmt: skip
        own, late = set[int](), set[int]()
        for at in near:
            one = self._named[at]
            if blocks.issuperset(one.places):
                (own if all(holds(one.row, block) for block in one.places) else late).add(at)
        covered = self._blocks(own)
        if covered == blocks or covered | self._blocks(late) != blocks:
            # Of what was read of an entry while its blocks were its own nothing comes too late.
            done |= {at for at in near if any(holds(self._named[at].row, one) for one in blocks)}
            return {}
        if all(self._is_present(block, last, holds) and self._once(column, block, step) for block in blocks):
            return {}
        done |= own | late
        found: dict[int, list[Interval]] = defaultdict(list)
        for at in late:
            row, places = self._named[at]
            gone = [start for block, start in places.items() if not holds(row, block)]
            found[row] += [(start, start + self._size) for start in gone]
        return dict(found)

    def _is_present(self, block: int, last: int, holds: Holds) -> bool:
        """Whether one of the first `last` entries names a block for a request that has it."""
        return any(holds(self._named[at].row, block) for at in self._of_block.get(block, ()) if at < last)

    def _blocks(self, entries: Iterable[int]) -> frozenset[int]:
        return frozenset(block for at in entries for block in self._named[at].places)
