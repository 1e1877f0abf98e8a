"""Whose a set of slots is: whose tokens it holds, and whose it is to hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtrace.ledger.intervals import Interval, union
from kvtrace.ledger.requests import Request
from kvtrace.ledger.slots.sets import blocks_in
from kvtrace.ledger.slots.tables import BlockTables, Holder, computed_by

_NULL_BLOCK = 0
"""vLLM gives it to nobody."""


class How(NamedTuple):
    """How slots were read.

    Attributes:
        background: by background work.
        own: for those who were given the blocks.
        filling: by what may be a load, before the layer's attention of the step.
    """

    background: bool
    own: bool
    filling: bool


@dataclass(frozen=True)
class Owned:
    """Whose a set of slots is.

    Attributes:
        requests: row of a request, its positions that were computed, those that were not.
        nobodys: slots that no request holds.
        null: of these, slots of the null block.
        early: slots of blocks of which no slot that was touched held a token yet.
        loading: slots that a load hook or work in the background read and that a load is to fill: it may be
            its own.
        aimed: row of a request, its positions among these.
    """

    requests: tuple[tuple[int, tuple[Interval, ...], tuple[Interval, ...]], ...] = ()
    nobodys: int = 0
    null: int = 0
    early: int = 0
    loading: int = 0
    aimed: tuple[tuple[int, tuple[Interval, ...]], ...] = ()


NOBODYS = Owned()


class _Block(NamedTuple):
    """Whose one block is.

    Attributes:
        owners: their tokens it holds.
        waiting: it was given to them in this step, and nothing of theirs is in it yet.
        filled: of those who hold it, for whom a load is to fill it.
        loading: it may be a load that reads it.
    """

    owners: tuple[Holder, ...] = ()
    waiting: tuple[Holder, ...] = ()
    filled: tuple[Holder, ...] = ()
    loading: bool = False


class Owners:
    """Of one engine's blocks, as they are in the latest step that began.

    Args:
        tables: that have come to that step.
        requests: those of the engine, by row.
        sizes: tokens of a block by KV cache group.
    """

    def __init__(self, tables: BlockTables, requests: Mapping[int, Request], sizes: Sequence[int]) -> None:
        self._tables, self._requests, self._sizes = tables, requests, sizes
        self._step = 0
        self._known: dict[tuple[tuple[Interval, ...], int, bool, How], Owned] = {}

    def begin(self, step: int) -> None:
        self._step = step
        self._known.clear()

    def of(self, slots: tuple[Interval, ...], group: int, after: bool, how: How) -> Owned:
        """Whose slots of a KV cache group are. ``after``: the layer had been computed in this step."""
        key = slots, group, after, how
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._of(*key)
        return known

    def _of(self, slots: tuple[Interval, ...], group: int, after: bool, how: How) -> Owned:
        size = self._sizes[group]
        computed: dict[int, list[Interval]] = defaultdict(list)
        stale: dict[int, list[Interval]] = defaultdict(list)
        aimed: dict[int, list[Interval]] = defaultdict(list)
        nobodys = null = early = loading = 0
        for number, low, high in blocks_in(slots, size):
            block = self._block(group, number, (low, high), after, how)
            for holder in block.filled:
                aimed[holder.row].append((holder.place * size + low, holder.place * size + high))
            if block.loading:
                loading += high - low
                continue  # a load may read what it writes
            empty = True
            for holder in block.owners:
                start = holder.place * size
                until = computed_by(self._requests[holder.row], holder, self._step, after)
                computed[holder.row].append((start + low, min(start + high, until)))
                stale[holder.row].append((max(start + low, until), start + high))
                empty &= start + low >= until
            # What a thread reads there may well be for the former holder, and is that one's.
            for holder in block.waiting if empty or not how.background else ():
                stale[holder.row].append((holder.place * size + low, holder.place * size + high))
            if not block.owners and not block.waiting:
                nobodys += high - low
                null += high - low if number == _NULL_BLOCK else 0
            elif empty:
                early += high - low
        owned = [(row, _union(computed[row]), _union(stale[row])) for row in {**computed, **stale}]
        requests = tuple((row, fine, not_yet) for row, fine, not_yet in owned if fine or not_yet)
        to_fill = tuple((row, _union(positions)) for row, positions in aimed.items())
        return Owned(requests, nobodys, null, early, loading, to_fill)

    def _block(self, group: int, number: int, slots: Interval, after: bool, how: How) -> _Block:
        """Whose a block is. Before a step's forward it still holds what its former holders computed."""
        holders = self._tables.holders(group, number)
        former = None if after else self._tables.before(group, number)
        waiting = () if former is None else holders
        filled = self._filled(holders, slots, self._sizes[group]) if how.filling else ()
        if filled or (how.background and self._loaded_into(waiting, slots, self._sizes[group])):
            return _Block(filled=filled, loading=True)
        if former is None:
            return _Block(holders)
        # A hook that saves this step's KV, and metadata that names the new holder, want that one's.
        named = how.own or (not how.background and any(self._named(one.row) for one in holders))
        return _Block(() if holders and named else former, holders)

    def _named(self, row: int) -> bool:
        """Whether the metadata of this step names a store of a request."""
        return any(one.step == self._step and one.slots > 0 for one in self._requests[row].entries)

    def _loaded_into(self, holders: Iterable[Holder], slots: Interval, size: int) -> bool:
        """Whether slots of a block are to come from the connector, for those who were given it."""
        return any(
            start < holder.place * size + slots[1] and holder.place * size + slots[0] < end
            for holder in holders
            for start, end in self._requests[holder.row].external
        )

    def _filled(self, holders: tuple[Holder, ...], slots: Interval, size: int) -> tuple[Holder, ...]:
        """Of the holders of a block those for whom a load is to fill these slots of it, in this step or a
        later one."""
        return tuple(
            holder
            for holder in holders
            if self._loaded_into((holder,), slots, size)
            and min(
                (chunk.step for chunk in self._requests[holder.row].chunks if chunk.step >= holder.since),
                default=self._step,
            )
            >= self._step
        )


def _union(parts: Iterable[Interval]) -> tuple[Interval, ...]:
    return tuple(union(parts))
