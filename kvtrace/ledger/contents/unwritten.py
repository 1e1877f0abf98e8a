"""Loads into blocks that nobody wrote: what stands there is what stood there before.

A block of the KV cache keeps its content until something is written into it. Where a loaded block holds the
very KV that the same block of the cache held for other positions, nothing was loaded into it. The same
position of another prompt is no sign: a load under a wrong key may put it back where it was.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from kvtrace.ledger.contents.prints import ZEROES, Block, Origin, Printed
from kvtrace.ledger.intervals import Interval
from kvtrace.ledger.slots.tables import Given
from kvtrace.trace import rows

Run = tuple[int, int, int, int]
"""(step, first place, block at it, count): as in a BLOCKS record."""
Written = Mapping[int, Sequence[tuple[int, tuple[Interval, ...]]]]
"""Row of a request -> pairs, a bit each, and positions in whose slots something was seen to be written."""


class Places:
    """Which block of the KV cache each block of a request was.

    Args:
        given: the BLOCKS records of all engines, in the order of their steps.
    """

    def __init__(self, given: Iterable[Given]) -> None:
        self._runs: dict[tuple[int, int], list[Run]] = defaultdict(list)
        self._every: list[Run] = []
        for one in given:
            record: rows.BlocksGiven = one.record
            run = record.step, record.first, record.block, record.count
            self._runs[one.row, record.group].append(run)
            self._every.append(run)
        self._every.sort()

    def of(self, one: Block, group: int) -> int:
        """The block of the cache that it was at the end of its step; 0 where that is not known."""
        place = one.start // (one.end - one.start)
        for since, first, block, count in reversed(self._runs.get((one.row, group), ())):
            if since <= one.step and first <= place < first + abs(count):
                return block + (place - first if count > 0 else first - place)
        return 0

    def given_since(self, block: int, since: int, until: int) -> bool:
        """Whether a block was given to anyone in a step after ``since``, up to ``until``, for any KV cache
        group: they share one pool (vllm/v1/core/kv_cache_coordinator.py, 0.32.0)."""
        first, last = (bisect_left(self._every, (step + 1,)) for step in (since, until))
        return any(
            min(own, own + count + 1) <= block <= max(own, own + count - 1)
            for _, _, own, count in self._every[first:last]
        )


def unwritten_blocks(
    printed: Sequence[Printed], places: Places, written: Written
) -> dict[tuple[int, Block], str]:
    """Loaded blocks, with the pairs of their workers, that nothing was written into, and what shows it: they
    hold zeroes, and none of the load is known to have held anything else, or what the same block of the cache
    held for other positions.
    """
    found: dict[tuple[int, Block], str] = {}
    for one in printed:
        if not one.whole:
            continue  # what lies outside of a window need not be loaded
        zeroes = any(block.value == ZEROES and block.origin is Origin.COMPUTED for block in one.blocks)
        every = list(_held_before(one, places))
        zeroed = _zeroed(every)
        for block, before, _ in every:
            if pairs_written(written, block.row, block.start, block.end):
                continue
            what = f"tokens {block.start}-{block.end} hold"
            if block.value == ZEROES:
                if not zeroes and block.row not in zeroed:
                    found[one.pairs, block] = f"{what} nothing but zeroes"
            elif before and block.start not in before:
                found[one.pairs, block] = f"{what} what their block held for the tokens from {min(before)} on"
    return found


def _zeroed(every: Iterable[tuple[Block, Set[int], bool]]) -> set[int]:
    """The requests whose loads put zeroes where something else had been."""
    return {block.row for block, _, used in every if used and block.value == ZEROES}


def _held_before(one: Printed, places: Places) -> Iterator[tuple[Block, Set[int], bool]]:
    """Each loaded block, with the begins of all that held the same in the same block of the cache before, and
    whether that held any KV."""
    held: dict[tuple[int, int], set[int]] = defaultdict(set)
    used = set[int]()
    for block in sorted(one.blocks, key=lambda block: block.step):
        at = places.of(block, one.group)
        if block.origin is Origin.LOADED:
            yield block, frozenset(held[at, block.value]), at in used
        if at:
            held[at, block.value].add(block.start)
            if block.value != ZEROES:
                used.add(at)


def pairs_written(written: Written, row: int, start: int, end: int) -> int:
    """The pairs, a bit each, in which something was seen to be written into positions of a request."""
    found = 0
    for pairs, positions in written.get(row, ()):
        if any(low < end and high > start for low, high in positions):
            found |= pairs
    return found


def remaining(printed: Sequence[Printed], places: Places) -> set[tuple[int, Block]]:
    """Loaded blocks, with the pairs of their workers, whose content stood in the same block of the cache
    before: it is what it should be also where nothing was loaded."""
    return {(one.pairs, block) for one in printed for block, before, _ in _held_before(one, places) if before}
