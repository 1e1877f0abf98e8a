"""From the records of touched slots to what was read and written of each request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from kvtrace.ledger.intervals import Interval, length, union
from kvtrace.ledger.requests import Request, owner, rows_by_id
from kvtrace.ledger.run import Engine, Worker
from kvtrace.ledger.scan import SpoolScan
from kvtrace.ledger.slots.accounts import Accounts
from kvtrace.ledger.slots.alike import Alike, classes
from kvtrace.ledger.slots.late import LateReads
from kvtrace.ledger.slots.owners import NOBODYS, How, Owned, Owners
from kvtrace.ledger.slots.reads import NOTHING, Amounts, Slots, Touch
from kvtrace.ledger.slots.sets import SlotSet, parse
from kvtrace.ledger.slots.tables import BlockTables, Given
from kvtrace.ledger.slots.too_late import Late, TooLate
from kvtrace.ledger.slots.touches import BACKGROUND, LOADING, Touches, was_read, was_written
from kvtrace.ledger.values import replace
from kvtrace.trace import hooks, rows
from kvtrace.trace.format import STEP_SHIFT, Flag, Role

_LOADING = frozenset(LOADING)
_SEVERAL = 3
"""Runs of slots that begin within blocks, and are as long as whole ones, by no chance."""


def slots_of(
    engine: Engine,
    worker: Worker,
    touches: Touches,
    given: Sequence[Given],
    requests: Mapping[int, Request],
    told: Accounts,
) -> Slots:
    """Resolve one worker's touched slots.

    Args:
        told: what became of what was read, of the worker's spool.
        given: the engine's, in the order of their steps.
        requests: those of the engine, by row.
    """
    if not len(touches.column):
        return NOTHING
    return _Resolver(engine, worker, touches, given, requests, told).result()


def given_blocks(scans: Sequence[SpoolScan], requests: Sequence[Request]) -> dict[int, list[Given]]:
    """The BLOCKS records of each engine, in the order of their steps."""
    by_id = rows_by_id(requests)
    found: dict[int, list[Given]] = defaultdict(list)
    for scan in scans:
        for words in rows.one_by_one(scan.blocks):
            record = rows.BlocksGiven._make(words)
            at = owner(by_id.get(scan.names.get(record.request, ""), ()), requests, record.step, record.t)
            if at is not None and rows.role(record.head) == Role.SCHEDULER:
                found[record.step >> STEP_SHIFT].append(Given(at, record))
    for of_engine in found.values():
        of_engine.sort(key=lambda one: one.record.step)
    return found


class _Resolver:
    """Goes through one worker's records in the order of time, those of layers that are alike once: a layer
    here is one of the classes of layers."""

    def __init__(
        self,
        engine: Engine,
        worker: Worker,
        touches: Touches,
        given: Sequence[Given],
        requests: Mapping[int, Request],
        told: Accounts,
    ) -> None:
        self._accounts = told
        groups = engine.facts.kv_groups
        sizes = [group.block_size or engine.block_size for group in groups] or [engine.block_size]
        of_layer = {layer: i for i, group in enumerate(groups) for layer in group.layers}
        groups_of = [of_layer.get(name, 0) for name in worker.kv_layers]
        self._columns, self._records = classes(touches, groups_of, told.of)
        self._group = [groups_of[one[0]] for one in self._columns]
        self._masks = [sum(1 << column for column in one) for one in self._columns]
        self._groups_of = groups_of
        self._windows = {
            at: size for at, (one, size) in enumerate(zip(groups, sizes, strict=False)) if not one.keeps_all
        }
        self._sizes = [max(1, size) for size in sizes]
        self._given, self._requests = given, requests
        self._tables = BlockTables(given, requests, self._sizes)
        self._owners = Owners(self._tables, requests, self._sizes)
        watched = frozenset(touches.watched.tolist())
        alone = LateReads(given, requests, self._sizes[0], watched) if len(self._sizes) == 1 else None
        self._too_late = TooLate(self._tables, requests, alone, self._sizes, self._group)
        self._names = touches.names
        self._outer = worker.connector.ordinal & 0xFF if worker.connector else None
        self._found: dict[_Use, dict[tuple[int, Touch], _SlotsSoFar]] = {use: {} for use in _Use}
        self._amounts: dict[tuple[int, int], Amounts] = defaultdict(Amounts)
        self._sets_read: dict[int, set[int]] = defaultdict(set)
        """Layers -> sets of slots that were read there."""
        self._seen: dict[int, list[Interval]] = {}
        """Layers -> slots that were read in this step."""
        self._unknown: set[tuple[int, int]] = set()
        self._blind: set[int] = set()
        self._unplaced = 0
        self._blind_writes: dict[int, int] = {}
        self._wrote: set[tuple[int, int]] = set()
        """(call, layers) in which known slots were written."""
        self._none: set[tuple[int, int]] = set()
        self._partly: set[tuple[int, int]] = set()
        self._wholly: set[tuple[int, int]] = set()
        """(step, layers) in which slots were read in part, and in which some were read whole."""
        background = rows.code(touches.records.head) == BACKGROUND
        self._last_background = int(touches.records.step[background].max(initial=-1))

    def result(self) -> Slots:
        step = 0
        for one in self._records:
            if was_read(one.record.head):
                if not one.record.slot_set:
                    self._too_late.reads_unknown(one)
                elif self._is_outer(one):
                    self._too_late.reads(one, self._set(one.record.slot_set).full)
        for one in self._records:
            if one.during != step:
                step = one.during
                self._tables.until(step)
                self._owners.begin(step)
                self._seen.clear()
            self._add(one)
        return Slots(
            reads=self._by_request(_Use.READ),
            writes=self._by_request(_Use.WRITTEN),
            aimed=self._by_request(_Use.AIMED),
            late=self._by_row(self._too_late.gone),
            perhaps_late=self._by_row(self._too_late.perhaps),
            amounts={
                (at, column): found
                for (at, layers), found in self._amounts.items()
                for column in self._columns[layers]
            },
            off=frozenset(column for layers in self._off() for column in self._columns[layers]),
            tables=_known_tables(self._given, self._sizes),
            outside={
                (row, column): end
                for (row, group), end in _outside_windows(self._given, self._windows).items()
                for column, own in enumerate(self._groups_of)
                if own == group
            },
            unknown=frozenset(self._each(self._unknown | self._in_part())),
            blind=frozenset(self._blind),
            unplaced=self._unplaced,
            partly=frozenset(self._each(self._in_part())),
            none=frozenset(self._each(self._none - self._unknown - self._amounts.keys())),
            blind_writes={
                column: at for layers, at in self._blind_writes.items() for column in self._columns[layers]
            },
            last_background=self._last_background,
        )

    def _in_part(self) -> set[tuple[int, int]]:
        return self._partly - self._unknown - self._wholly

    def _each(self, found: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """(step, layers) -> (step, column) of each of these layers."""
        return ((step, column) for step, layers in found for column in self._columns[layers])

    def _add(self, one: Alike) -> None:
        record, layers, step = one.record, one.layers, one.during
        code, background = rows.code(record.head), one.background
        read, wrote = bool(was_read(record.head)), bool(was_written(record.head))
        if not record.slot_set:
            if wrote:
                self._wrote_unknown(record, layers, step)
            if read:
                self._read_unknown(record, layers, step)
            return
        if not record.slots and not record.partly:
            if read:
                self._none.add((record.step or step, layers))
            return
        outer = self._is_outer(one)
        if read:
            (self._wholly if record.slots else self._partly).add((record.step or step, layers))
        whole = self._set(record.slot_set).full
        how = How(
            background, code == hooks.SAVE_LAYER.code, (background or code in _LOADING) and not one.used
        )
        owned = self._owners.of(whole, self._group[layers], one.after, how) if read else NOBODYS
        if read and outer:
            self._count(record, layers, step, owned)
            self._sets_read[layers].add(record.slot_set)
        late = self._too_late.found(one, whole) if read and outer else ()
        if read:
            account, to, over = self._accounts.of(record.call)
            for row, positions, stale in owned.requests:
                others = () if row in late else late
                touch = Touch(
                    step, 0, 0, positions, stale, background,
                    account=account, late_for=others, sent_to=to, over=over,
                    overdue=one.asked_in > 0,
                )  # fmt: skip
                if background and not others:
                    self._too_late.in_time(one, row, positions)
                self._gather(_Use.READ, row, touch, one)
            for row, positions in owned.aimed:
                self._gather(_Use.AIMED, row, Touch(step, 0, 0, positions, (), background), one)
        if wrote:
            self._wrote.add((record.call, layers))
            for row, there in self._written_for(one, whole):
                touch = Touch(step, 0, 0, there, (), background, one.used, given_out=read)
                self._gather(_Use.WRITTEN, row, touch, one)

    def _read_unknown(self, record: rows.SlotsTouched, layers: int, step: int) -> None:
        """Slots were read, and it is not known which."""
        self._unknown |= {(step, layers), (record.step or step, layers)}
        self._blind.add(step)
        self._unplaced = max(self._unplaced, 0 if record.step else step)

    def _wrote_unknown(self, record: rows.SlotsTouched, layers: int, step: int) -> None:
        """Slots were written, or may have been, and it is not known which. What a call wrote by an address is
        known where it is seen."""
        if (record.call, layers) not in self._wrote:
            self._blind_writes[layers] = step

    def _is_outer(self, one: Alike) -> bool:
        return one.background or bool(rows.detail(one.record.head) == self._outer)

    def _written_for(self, one: Alike, runs: tuple[Interval, ...]) -> list[tuple[int, tuple[Interval, ...]]]:
        """For which request's positions slots were written: those that held the blocks when the work was
        asked for, whoever has them by now; where that is not known those that have them."""
        group, code = self._group[one.layers], rows.code(one.record.head)
        meant: dict[int, list[Interval]] = defaultdict(list)
        for _, row, part in self._tables.held_then(group, runs, one.asked_in) if one.asked_in else ():
            meant[row].append(part)
        if meant:
            return [(row, tuple(union(positions))) for row, positions in meant.items()]
        # What is written into a block is for whom it was given to, whatever it held before.
        how = How(one.background, code == hooks.SAVE_LAYER.code, False)
        owned = self._owners.of(runs, group, True, how)
        return [(row, tuple(union([*fine, *beyond]))) for row, fine, beyond in owned.requests]

    def _gather(self, use: _Use, row: int, touch: Touch, one: Alike) -> None:
        """``touch``: without its time and its layers."""
        gathered = self._found[use].setdefault((row, touch), _SlotsSoFar(one.t))
        gathered.columns |= self._masks[one.layers]

    def _count(self, record: rows.SlotsTouched, layers: int, step: int, owned: Owned) -> None:
        """Add what a read took to the amounts."""
        slots = self._set(record.slot_set)
        if slots.slots and slots.slots == owned.loading:
            return
        read = slots.slots - owned.loading
        if rows.flags(record.head) & Flag.SHARED:
            # Both layers have a record: of the blocks of its own group each counts.
            found = Amounts(read - owned.nobodys, owned.early)
        else:
            repeated, blank = self._repeated_in(layers, slots), owned.nobodys - owned.null
            useless = owned.nobodys + owned.early + repeated
            found = Amounts(read, useless, blank, repeated)
        self._amounts[step, layers] = self._amounts[step, layers].plus(found)

    def _off(self) -> set[int]:
        """Layers of which several runs of slots were read, each of whole blocks that begins within one."""
        found = set[int]()
        for layers, sets in self._sets_read.items():
            size = self._sizes[self._group[layers]]
            runs = [run for one in sets for run in self._set(one).full]
            if len(runs) >= _SEVERAL and all(low % size and not (high - low) % size for low, high in runs):
                found.add(layers)
        return found

    def _repeated_in(self, layers: int, slots: SlotSet) -> int:
        """How many of these slots were read in this step before; they are by now."""
        before = self._seen.get(layers, [])
        now = union([*before, *slots.full])
        self._seen[layers] = now
        return length(before) + slots.slots - length(now)

    def _set(self, ident: int) -> SlotSet:
        return parse(self._names.get(ident, ""))

    def _by_request(self, use: _Use) -> dict[int, list[Touch]]:
        found: dict[int, list[Touch]] = defaultdict(list)
        for (row, touch), gathered in self._found[use].items():
            found[row].append(replace(touch, t=gathered.t, columns=gathered.columns))
        return dict(found)

    def _by_row(
        self, late: Mapping[Late, set[int]]
    ) -> dict[int, list[tuple[int, int, tuple[Interval, ...]]]]:
        """(row, step, positions) -> layers, as row -> (step, columns, positions)."""
        found: dict[int, list[tuple[int, int, tuple[Interval, ...]]]] = defaultdict(list)
        for (row, step, positions), layers in late.items():
            found[row].append((step, sum(self._masks[one] for one in layers), positions))
        return dict(found)


def _known_tables(given: Sequence[Given], sizes: Sequence[int]) -> dict[int, int]:
    """Row of a request -> positions of whose blocks the scheduler's records tell, in every KV cache group."""
    places: dict[int, list[int]] = defaultdict(lambda: [0] * len(sizes))
    for one in given:
        record = one.record
        if record.group < len(sizes) and record.first <= places[one.row][record.group]:
            end = record.first + abs(record.count)
            places[one.row][record.group] = max(places[one.row][record.group], end)
    return {
        row: min(place * size for place, size in zip(ends, sizes, strict=True))
        for row, ends in places.items()
    }


def _outside_windows(given: Sequence[Given], windows: Mapping[int, int]) -> dict[tuple[int, int], int]:
    """(row of a request, KV cache group) -> end of the positions for which it got no block when it was let
    in: its window had left them. The null block is in no record; the least of several beginnings counts.

    Args:
        windows: of each group with a window the tokens of a block.
    """
    begun: dict[tuple[int, int, int], int] = {}
    for one in given:
        record = one.record
        if record.group in windows and rows.flags(record.head) & (Flag.FIRST | Flag.RESUMED):
            key = one.row, record.group, record.step
            begun[key] = min(begun.get(key, record.first), record.first)
    found: dict[tuple[int, int], int] = {}
    for (row, group, _), first in begun.items():
        found[row, group] = min(found.get((row, group), first), first)
    return {at: first * windows[at[1]] for at, first in found.items() if first}


class _Use(Enum):
    """What slots were touched for; AIMED: see Slots."""

    READ = auto()
    WRITTEN = auto()
    AIMED = auto()


@dataclass
class _SlotsSoFar:
    t: int
    columns: int = 0
