"""Of one worker's reads: those that came after their blocks had gone to another request, and for whom.

Two things tell. Work in the background that an earlier step asked for was meant for those who had the blocks
in that step. All else is told by the metadata's entries: see :class:`~kvtrace.ledger.slots.late.LateReads`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from kvtrace.ledger.intervals import Interval, union
from kvtrace.ledger.requests import Request
from kvtrace.ledger.slots.alike import Alike
from kvtrace.ledger.slots.late import LateReads
from kvtrace.ledger.slots.sets import blocks_in
from kvtrace.ledger.slots.tables import BlockTables

Late = tuple[int, int, tuple[Interval, ...]]
"""Row of a request, step of the read (0: of no step), positions of the request that it was meant for."""


class TooLate:
    """Reads are shown in the order of time, once each before the first is asked about, and then asked about.

    Args:
        tables: that have come to the step of the read that is asked about.
        requests: those of the engine, by row.
        entries: what the metadata's entries tell; None where there are several KV cache groups.
        sizes: tokens of a block by KV cache group.
        groups: the group of each class of layers.
    """

    def __init__(
        self,
        tables: BlockTables,
        requests: Mapping[int, Request],
        entries: LateReads | None,
        sizes: Sequence[int],
        groups: Sequence[int],
    ) -> None:
        self._tables, self._requests, self._entries = tables, requests, entries
        self._sizes, self._groups = sizes, groups
        self.gone: dict[Late, set[int]] = defaultdict(set)
        """What was read too late -> the classes of layers it was read in."""
        self.perhaps: dict[Late, set[int]] = defaultdict(set)
        """The same, where it is not known for whom the read was."""
        self._in_time: dict[tuple[int, int], list[Interval]] = defaultdict(list)
        """(row of a request, layers) -> positions that threads read while its blocks were its own."""

    def reads(self, one: Alike, runs: tuple[Interval, ...]) -> None:
        """Slots will be read."""
        if self._entries is not None:
            self._entries.reads(one.layers, self._blocks(runs), one.during)

    def reads_unknown(self, one: Alike) -> None:
        """Slots will be read, and it is not known which."""
        if self._entries is not None:
            self._entries.reads_unknown(one.layers, one.during)

    def in_time(self, one: Alike, row: int, positions: tuple[Interval, ...]) -> None:
        """A thread read a request's positions while its blocks were its own."""
        self._in_time[row, one.layers] += positions

    def found(self, one: Alike, runs: tuple[Interval, ...]) -> tuple[int, ...]:
        """The requests for which a read of these slots came too late."""
        gone = self._gone_since_asked(one, runs)
        if not gone and self._entries is not None:
            blocks = self._blocks(runs)
            here = {block: {holder.row for holder in self._tables.holders(0, block)} for block in blocks}
            if not self._may_be_named({row for holders in here.values() for row in holders}):
                gone = self._entries.gone(
                    one.layers, blocks, one.during, lambda row, block: row in here[block]
                )
            elif one.background and not one.record.step and self._entries.reads_more_than_once:
                self._note_perhaps(one, here)
        for row, positions in gone.items():
            self.gone[row, one.during, tuple(union(positions))].add(one.layers)
        return tuple(gone)

    def _note_perhaps(self, one: Alike, here: Mapping[int, set[int]]) -> None:
        """A thread reads blocks, and no metadata that is understood, nor who asked for it, says for whom: it
        may be for those who had the blocks before, and of whom they were not read.

        Args:
            here: block -> rows of the requests that have it.
        """
        size = self._sizes[0]
        for block, rows_here in here.items():
            for holder in self._tables.held_before(0, block):
                part = holder.place * size, (holder.place + 1) * size
                read = self._was_in_time(holder.row, one, part)
                if not read and holder.row not in rows_here and self._may_be_named({holder.row}):
                    self.perhaps[holder.row, 0, (part,)].add(one.layers)

    def _may_be_named(self, rows: set[int]) -> bool:
        """Whether what is not understood of the metadata may name the blocks of a request that has them."""
        return any(self._requests[row].unread for row in rows)

    def _gone_since_asked(self, one: Alike, runs: tuple[Interval, ...]) -> dict[int, list[Interval]]:
        """What the work of a thread came too late for, where the step is known that asked for it: row of a
        request that had the blocks then, and was named -> its positions whose blocks hold another one's
        tokens by now. What was read in time is not too late: a thread may do later work as well."""
        gone: dict[int, list[Interval]] = defaultdict(list)
        group = self._groups[one.layers]
        for block, row, part in self._tables.held_then(group, runs, one.asked_in) if one.asked_in else ():
            former = None if one.after else self._tables.before(group, block)
            holders = self._tables.holders(group, block) if former is None else former
            there = {holder.row for holder in holders}
            if there and row not in there and self._is_wanted(row, part, one):
                gone[row].append(part)
        return gone

    def _is_wanted(self, row: int, part: Interval, one: Alike) -> bool:
        """Whether the step that asked for a read wants a part of a request that no thread has read in this
        layer: metadata up to it names it; of metadata that can't be read: the step computed some of the
        request."""
        request, step = self._requests[row], one.asked_in
        named = any(
            entry.step <= step and entry.start <= part[0] < entry.start + entry.slots
            for entry in request.entries
        )
        if not named and not (request.unread and any(chunk.step == step for chunk in request.chunks)):
            return False
        return not self._was_in_time(row, one, part)

    def _was_in_time(self, row: int, one: Alike, part: Interval) -> bool:
        return any(start < part[1] and end > part[0] for start, end in self._in_time[row, one.layers])

    def _blocks(self, runs: tuple[Interval, ...]) -> frozenset[int]:
        return frozenset(block for block, _, _ in blocks_in(runs, self._sizes[0]))
