"""Whose tokens the slots were that a worker touched: requests and positions.

A slot that was read counts for a token only once the token was computed: what was read before that is
*stale*. Each read of one set of slots is held once, with the layers in which it happened.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property
from typing import NamedTuple

from kvtrace.ledger.intervals import Interval, length, union
from kvtrace.ledger.model import Engine, Worker
from kvtrace.ledger.requests import Request, owner, rows_by_id
from kvtrace.ledger.saves.accounts import Account, Accounts
from kvtrace.ledger.scan import SpoolScan
from kvtrace.ledger.slots.late import LateReads
from kvtrace.ledger.slots.sets import SlotSet, parse
from kvtrace.ledger.slots.tables import BlockTables, Given, Holder, computed_by
from kvtrace.ledger.slots.trace import NEVER, Touches
from kvtrace.trace import hooks, rows
from kvtrace.trace.format import STEP_SHIFT, Flag, Role

_LOADING = frozenset(hook.code for hook in hooks.LOADING)
_NULL_BLOCK = 0
"""vLLM gives it to nobody."""
_BACKGROUND = 0
"""The hook code of what no hook did itself: a thread, a job, a task of the connector."""


@dataclass(frozen=True)
class Touch:
    """Positions of one request that were touched alike in some layers of one worker.

    Attributes:
        step: the last step that had begun by then.
        t: of the first of them.
        columns: the worker's KV layers, a bit each.
        positions: of tokens that had been computed by then.
        stale: of tokens that had not.
        late: of a write: the layer's attention of that step had begun.
        account: what became of what was read.
        sent_to: the peer of what was sent.
        late_for: of a read: the requests (rows) for which it came too late: these tokens are in their blocks.
        given_out: of a write: the memory was given out by address, and may have been read instead.
    """

    step: int
    t: int
    columns: int
    positions: tuple[Interval, ...]
    stale: tuple[Interval, ...] = ()
    background: bool = False
    late: bool = False
    account: Account = Account.OPEN
    given_out: bool = False
    late_for: tuple[int, ...] = ()
    sent_to: str = ""


@dataclass(frozen=True)
class Slots:
    """What one worker was seen to touch.

    Attributes:
        reads, writes: by the request's row, in the order of time.
        aimed: of the same: what a load read of the slots that it is to fill, before they were used. It is no
            read for a store, and where nothing is written there, what was filled is a copy.
        late: row of a request -> (step, columns, positions) that were read after their blocks went to
            another one.
        amounts: (step, column) -> slots that were read, each as often as it was.
        useless: (step, column) -> of these, slots that held no token, or none yet, and slots that had been
            read in that step already.
        blank: the same of slots of blocks that no request holds, the null block left out (it pads);
            nothing of a layer that shares its bytes with another one.
        null: the same of slots of the null block.
        again: the same of slots that had been read in that step already.
        skewed: (step, column) in which all that was read are whole numbers of blocks, and none begins with a
            block.
        tables: row of a request -> positions for which it is known which blocks it held.
        left: (row of a request, column) -> positions [0, end) that the layer's window had left when the
            request got its blocks: it got none for them, the null block stands there.
        unknown: (step, column) of which it is known that slots were read, and not which.
        blind: the last steps that had begun when slots were read of which it is not known which.
        unplaced: the last step in which work in the background read, for a step that is not known, slots that
            are not known either: they may be of that step and of any before it.
        none: (step, column) in which slots were picked to be read, and these were none.
        blind_writes: column -> the last step in which slots were written there, and not known which.
        unseen_writes: step -> of each piece of work in the background for its loads that may have written by
            address, and is over: when it ended, and the columns.
    """

    reads: Mapping[int, Sequence[Touch]] = field(default_factory=dict)
    writes: Mapping[int, Sequence[Touch]] = field(default_factory=dict)
    aimed: Mapping[int, Sequence[Touch]] = field(default_factory=dict)
    late: Mapping[int, Sequence[tuple[int, int, tuple[Interval, ...]]]] = field(default_factory=dict)
    amounts: Mapping[tuple[int, int], int] = field(default_factory=dict)
    useless: Mapping[tuple[int, int], int] = field(default_factory=dict)
    blank: Mapping[tuple[int, int], int] = field(default_factory=dict)
    null: Mapping[tuple[int, int], int] = field(default_factory=dict)
    again: Mapping[tuple[int, int], int] = field(default_factory=dict)
    skewed: frozenset[tuple[int, int]] = frozenset()
    tables: Mapping[int, int] = field(default_factory=dict)
    left: Mapping[tuple[int, int], int] = field(default_factory=dict)
    unknown: frozenset[tuple[int, int]] = frozenset()
    blind: frozenset[int] = frozenset()
    unplaced: int = 0
    none: frozenset[tuple[int, int]] = frozenset()
    blind_writes: Mapping[int, int] = field(default_factory=dict)
    unseen_writes: Mapping[int, Sequence[tuple[int, int]]] = field(default_factory=dict)
    last_background_t: int = 0
    last_background_step: int = 0  # for which something in the background worked, 0 where that is not known

    @property
    def visible(self) -> bool:
        """Whether any read of known slots was seen: this connector copies where the watch can see it."""
        return bool(self.amounts)

    @cached_property
    def read_in(self) -> Mapping[int, Set[int]]:
        """Step -> rows of the requests that were read in it."""
        found: dict[int, set[int]] = defaultdict(set)
        for row, touches in self.reads.items():
            for touch in touches:
                found[touch.step].add(row)
        return found


NOTHING = Slots()
_UNKNOWN = Accounts()


def slots_of(
    engine: Engine,
    worker: Worker,
    touches: Touches,
    given: Sequence[Given],
    requests: Mapping[int, Request],
    told: Accounts = _UNKNOWN,
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
        for words in scan.blocks.tolist():
            record = rows.BlocksGiven._make(words)
            at = owner(by_id.get(scan.names.get(record.request, ""), ()), requests, record.step, record.t)
            if at is not None and rows.role(record.head) == Role.SCHEDULER:
                found[record.step >> STEP_SHIFT].append(Given(at, record))
    for of_engine in found.values():
        of_engine.sort(key=lambda one: one.record.step)
    return found


@dataclass(frozen=True)
class _Owned:
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

    requests: tuple[tuple[int, tuple[Interval, ...], tuple[Interval, ...]], ...]
    nobodys: int
    null: int
    early: int
    loading: int
    aimed: tuple[tuple[int, tuple[Interval, ...]], ...]


class _Resolver:
    """Goes through one worker's records in the order of time."""

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
        self._group = [of_layer.get(name, 0) for name in worker.kv_layers]
        self._windows = {
            at: size for at, (one, size) in enumerate(zip(groups, sizes, strict=False)) if not one.keeps_all
        }
        self._sizes = [max(1, size) for size in sizes]
        self._given = given
        self._tables = BlockTables(given, requests, self._sizes)
        alone, watched = len(self._sizes) == 1, frozenset(touches.watched.tolist())
        self._late = LateReads(given, requests, self._sizes[0], watched) if alone else None
        self._gone: dict[tuple[int, int, tuple[Interval, ...]], int] = defaultdict(int)
        self._touches, self._names, self._requests = touches, touches.names, requests
        self._outer = worker.connector.ordinal & 0xFF if worker.connector else None
        self._sets: dict[int, SlotSet] = {}
        self._owned: dict[_SetKey, _Owned] = {}
        self._found: dict[_Use, dict[_Key, _Gathered]] = {use: {} for use in _Use}
        self._amounts: dict[tuple[int, int], int] = defaultdict(int)
        self._useless: dict[tuple[int, int], int] = defaultdict(int)
        self._blank: dict[tuple[int, int], int] = defaultdict(int)
        self._null: dict[tuple[int, int], int] = defaultdict(int)
        self._again: dict[tuple[int, int], int] = defaultdict(int)
        self._skew: dict[tuple[int, int], bool] = {}
        self._seen: dict[int, list[Interval]] = {}
        """Column -> slots that were read in this step."""
        self._unknown: set[tuple[int, int]] = set()
        self._blind: set[int] = set()
        self._unplaced = 0
        self._blind_writes: dict[int, int] = {}
        self._wrote: set[tuple[int, int]] = set()
        """(call, column) in which known slots were written."""
        self._none: set[tuple[int, int]] = set()
        self._unseen: dict[tuple[int, int], tuple[int, int]] = {}
        """(step, call) of work in the background -> its end, columns."""
        self._background_t = self._background_step = 0

    def _records(self) -> Iterator[tuple[rows.SlotsTouched, int, int]]:
        """Each with its layer and the step that was under way."""
        touches = self._touches
        records = zip(*(column.tolist() for column in touches.records), strict=True)
        for record, column, during in zip(
            records, touches.column.tolist(), touches.during.tolist(), strict=True
        ):
            yield rows.SlotsTouched._make(record), column, during

    def result(self) -> Slots:
        step = 0
        if self._late is not None:
            for record, column, during in self._records():
                if not record.slot_set and self._is_read(record):
                    self._late.reads_unknown(column, during)
                elif self._is_read(record) and self._is_outer(record):
                    self._late.reads(column, self._blocks_of(self._set(record.slot_set).full), during)
        for record, column, during in self._records():
            if during != step:
                step = during
                self._tables.until(step)
                self._owned.clear()
                self._seen.clear()
            self._add(record, column, step)
        return Slots(
            reads=self._by_request(_Use.READ),
            writes=self._by_request(_Use.WRITTEN),
            aimed=self._by_request(_Use.AIMED),
            late=self._gone_by_request(),
            amounts=dict(self._amounts),
            useless=dict(self._useless),
            blank=dict(self._blank),
            null={at: amount for at, amount in self._null.items() if amount},
            again=dict(self._again),
            skewed=frozenset(at for at, skewed in self._skew.items() if skewed),
            tables=_known_tables(self._given, self._sizes),
            left={
                (row, column): end
                for (row, group), end in _left_by_windows(self._given, self._windows).items()
                for column, own in enumerate(self._group)
                if own == group
            },
            unknown=frozenset(self._unknown),
            blind=frozenset(self._blind),
            unplaced=self._unplaced,
            none=frozenset(self._none - self._unknown - self._amounts.keys()),
            blind_writes=self._blind_writes,
            unseen_writes=self._unseen_by_step(),
            last_background_t=self._background_t,
            last_background_step=self._background_step,
        )

    def _unseen_by_step(self) -> dict[int, list[tuple[int, int]]]:
        found: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for (step, _), piece in self._unseen.items():
            found[step].append(piece)
        return dict(found)

    def _add(self, record: rows.SlotsTouched, column: int, step: int) -> None:
        marks, code = rows.flags(record.head), rows.code(record.head)
        background = code == _BACKGROUND
        if background:
            self._background_t = max(self._background_t, record.t)
            self._background_step = max(self._background_step, record.step)
        read = self._is_read(record)
        wrote = bool(marks & Flag.LOAD) and not (marks & Flag.STORE and not (background or code in _LOADING))
        if not record.slot_set:
            if wrote:
                self._wrote_unknown(record, column, step)
            if read:
                self._read_unknown(record, column, step)
            return
        if not record.slots and not record.partly:
            if read:
                self._none.add((record.step or step, column))
            return
        after = record.t >= self._touches.computed_at(step, column) or not self._knows(step, column, code)
        outer = self._is_outer(record)
        whole = self._set(record.slot_set).full
        how = _How(
            background,
            code == hooks.SAVE_LAYER.code,
            (background or code in _LOADING) and record.t < self._touches.used_at(step, column),
        )
        if read and outer:
            self._count(record, column, step, after, how)
            at, size = (record.step or step, column), self._sizes[self._group[column]]
            self._skew[at] = self._skew.get(at, True) and _skewed(whole, size)
        late = self._too_late(whole, column, step) if read and outer else ()
        if read:
            account, to = self._accounts.of(record.call)
            owned = self._owners(whole, column, step, after, how)
            for row, positions, stale in owned.requests:
                others = () if row in late else late
                key = _Key(row, step, positions, stale, background, False, account, False, others, to)
                self._gather(_Use.READ, key, record.t, column)
            for row, positions in owned.aimed:
                self._gather(_Use.AIMED, _Key(row, step, positions, (), background), record.t, column)
        if wrote:
            self._wrote.add((record.call, column))
            after_use = record.t >= self._touches.used_at(step, column)
            for row, there in self._written_for(whole, column, step, record):
                key = _Key(row, step, there, (), background, after_use, given_out=read)
                self._gather(_Use.WRITTEN, key, record.t, column)

    def _read_unknown(self, record: rows.SlotsTouched, column: int, step: int) -> None:
        """Slots were read, and it is not known which."""
        self._unknown |= {(step, column), (record.step or step, column)}
        self._blind.add(step)
        self._unplaced = max(self._unplaced, 0 if record.step else step)

    def _wrote_unknown(self, record: rows.SlotsTouched, column: int, step: int) -> None:
        """Slots were written, or may have been, and it is not known which. What a call wrote by an address is
        known where it is seen."""
        if rows.flags(record.head) & Flag.ASYNC:
            ended, columns = self._unseen.get((record.step, record.call), (0, 0))
            self._unseen[record.step, record.call] = max(ended, record.t), columns | 1 << column
        if (record.call, column) not in self._wrote:
            self._blind_writes[column] = step

    @staticmethod
    def _is_read(record: rows.SlotsTouched) -> bool:
        """An address that was given out is for what the hook is for; of background work either may be."""
        marks = rows.flags(record.head)
        return bool(marks & Flag.STORE) and not (marks & Flag.LOAD and rows.code(record.head) in _LOADING)

    def _is_outer(self, record: rows.SlotsTouched) -> bool:
        return bool(rows.code(record.head) == _BACKGROUND or rows.detail(record.head) == self._outer)

    def _blocks_of(self, runs: tuple[Interval, ...]) -> frozenset[int]:
        return frozenset(block for block, _, _ in _blocks(runs, self._sizes[0]))

    def _written_for(
        self, runs: tuple[Interval, ...], column: int, step: int, record: rows.SlotsTouched
    ) -> list[tuple[int, tuple[Interval, ...]]]:
        """For which request's positions slots were written: those that held the blocks when the work was
        asked for, whoever has them by now; where that is not known those that have them."""
        group, code = self._group[column], rows.code(record.head)
        size = self._sizes[group]
        meant: dict[int, list[Interval]] = defaultdict(list)
        if code == _BACKGROUND and 0 < record.step < step:
            for block, low, high in _blocks(runs, size):
                for holder in self._tables.held_in(group, block, record.step):
                    meant[holder.row].append((holder.place * size + low, holder.place * size + high))
        if meant:
            return [(row, tuple(union(positions))) for row, positions in meant.items()]
        # What is written into a block is for whom it was given to, whatever it held before.
        how = _How(code == _BACKGROUND, code == hooks.SAVE_LAYER.code, False)
        owned = self._owners(runs, column, step, True, how)
        return [(row, tuple(union([*fine, *beyond]))) for row, fine, beyond in owned.requests]

    def _too_late(self, runs: tuple[Interval, ...], column: int, step: int) -> tuple[int, ...]:
        """The requests for which a read of these slots came too late."""
        if self._late is None:
            return ()
        tables, blocks = self._tables, self._blocks_of(runs)
        gone = self._late.gone(
            column, blocks, step, lambda row, block: any(one.row == row for one in tables.holders(0, block))
        )
        for row, positions in gone.items():
            self._gone[row, step, tuple(union(positions))] |= 1 << column
        return tuple(gone)

    def _gather(self, use: _Use, key: _Key, t: int, column: int) -> None:
        gathered = self._found[use].setdefault(key, _Gathered(t))
        gathered.columns |= 1 << column

    def _count(self, record: rows.SlotsTouched, column: int, step: int, after: bool, how: _How) -> None:
        """Add what a read took to the amounts."""
        slots = self._set(record.slot_set)
        owned = self._owners(slots.full, column, step, after, how)
        if slots.slots and slots.slots == owned.loading:
            return
        if rows.flags(record.head) & Flag.SHARED:
            # Both layers have a record: of the blocks of its own group each counts.
            self._amounts[step, column] += slots.slots - owned.nobodys - owned.loading
            self._useless[step, column] += owned.early
            return
        again = self._read_again(column, slots)
        self._amounts[step, column] += slots.slots - owned.loading
        self._useless[step, column] += owned.nobodys + owned.early + again
        self._blank[step, column] += owned.nobodys - owned.null
        self._null[step, column] += owned.null
        self._again[step, column] += again

    def _read_again(self, column: int, slots: SlotSet) -> int:
        """How many of these slots were read in this step before; they are by now."""
        before = self._seen.get(column, [])
        now = union([*before, *slots.full])
        self._seen[column] = now
        return length(before) + slots.slots - length(now)

    def _knows(self, step: int, column: int, code: int) -> bool:
        """Whether the trace tells when this layer was computed in this step; where no body was seen at all,
        what a hook for loading touched came before."""
        return self._touches.computed_at(step, column) < NEVER or code in _LOADING

    def _set(self, ident: int) -> SlotSet:
        known = self._sets.get(ident)
        if known is None:
            known = self._sets[ident] = parse(self._names.get(ident, ""))
        return known

    def _owners(self, slots: tuple[Interval, ...], column: int, step: int, after: bool, how: _How) -> _Owned:
        key = _SetKey(slots, self._group[column], after, how)
        known = self._owned.get(key)
        if known is None:
            known = self._owned[key] = self._resolve(key, step)
        return known

    def _resolve(self, key: _SetKey, step: int) -> _Owned:
        slots, group, after, (background, own, filling) = key
        size = self._sizes[group]
        computed: dict[int, list[Interval]] = defaultdict(list)
        stale: dict[int, list[Interval]] = defaultdict(list)
        aimed: dict[int, list[Interval]] = defaultdict(list)
        nobodys = null = early = loading = 0
        for block, low, high in _blocks(slots, size):
            former, holders = self._holders(group, block, after)
            empty = True
            if not background and any(self._named(holder.row, step) for holder in holders):
                former = ()  # the step's metadata names the new holder: it is that one's that is wanted
            if own and holders:
                former = ()  # a hook that saves this step's KV of the layer
            fill = (
                self._filled(self._tables.holders(group, block), (low, high), size, step) if filling else ()
            )
            for holder in fill:
                aimed[holder.row].append((holder.place * size + low, holder.place * size + high))
            if fill or (background and self._loaded_into(holders, low, high, size)):
                loading += high - low
                continue  # a load may read what it writes
            for holder in former:
                start, until = holder.place * size, self._until(holder, step, after)
                computed[holder.row].append((start + low, min(start + high, until)))
                stale[holder.row].append((max(start + low, until), start + high))
                empty &= start + low >= until
            # What a thread reads there may well be for the former holder, and is that one's.
            for holder in holders if empty or not background else ():
                stale[holder.row].append((holder.place * size + low, holder.place * size + high))
            if not former and not holders:
                nobodys += high - low
                null += high - low if block == _NULL_BLOCK else 0
            elif empty:
                early += high - low
        owned = [
            (row, tuple(union(computed[row])), tuple(union(stale[row]))) for row in {**computed, **stale}
        ]
        return _Owned(
            tuple((row, fine, not_yet) for row, fine, not_yet in owned if fine or not_yet),
            nobodys,
            null,
            early,
            loading,
            tuple((row, tuple(union(positions))) for row, positions in aimed.items()),
        )

    def _named(self, row: int, step: int) -> bool:
        """Whether the metadata of a step names a store of a request."""
        return any(one.step == step and one.slots > 0 for one in self._requests[row].entries)

    def _loaded_into(self, holders: tuple[Holder, ...], low: int, high: int, size: int) -> bool:
        """Whether slots of a block are to come from the connector, for those who were given it."""
        return any(
            start < holder.place * size + high and holder.place * size + low < end
            for holder in holders
            for start, end in self._requests[holder.row].external
        )

    def _filled(
        self, holders: tuple[Holder, ...], slots: Interval, size: int, step: int
    ) -> tuple[Holder, ...]:
        """Of the holders of a block those for whom a load is to fill these slots of it, in this step or a
        later one."""
        return tuple(
            holder
            for holder in holders
            if self._loaded_into((holder,), *slots, size)
            and min(
                (chunk.step for chunk in self._requests[holder.row].chunks if chunk.step >= holder.since),
                default=step,
            )
            >= step
        )

    def _until(self, holder: Holder, step: int, after: bool) -> int:
        return computed_by(self._requests[holder.row], holder, step, after)

    def _holders(self, group: int, block: int, after: bool) -> tuple[tuple[Holder, ...], tuple[Holder, ...]]:
        """Whose tokens a block holds, and who was given it in this step and has computed nothing into it yet:
        before a step's forward it still holds what its former holders computed."""
        holders = self._tables.holders(group, block)
        former = None if after else self._tables.before(group, block)
        return (holders, ()) if former is None else (former, holders)

    def _gone_by_request(self) -> dict[int, list[tuple[int, int, tuple[Interval, ...]]]]:
        found: dict[int, list[tuple[int, int, tuple[Interval, ...]]]] = defaultdict(list)
        for (row, step, positions), columns in self._gone.items():
            found[row].append((step, columns, positions))
        return dict(found)

    def _by_request(self, use: _Use) -> dict[int, list[Touch]]:
        found: dict[int, list[Touch]] = defaultdict(list)
        for key, gathered in self._found[use].items():
            how = {name: value for name, value in key._asdict().items() if name not in ("row", "step")}
            found[key.row].append(Touch(key.step, gathered.t, gathered.columns, **how))
        return dict(found)


def _skewed(runs: Sequence[Interval], size: int) -> bool:
    return bool(runs) and all(start % size and not (end - start) % size for start, end in runs)


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


def _left_by_windows(given: Sequence[Given], windows: Mapping[int, int]) -> dict[tuple[int, int], int]:
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


class _How(NamedTuple):
    """How slots were read.

    Attributes:
        background: by background work.
        own: for those who were given the blocks.
        filling: by what may be a load, before the layer's attention of the step.
    """

    background: bool
    own: bool
    filling: bool


class _SetKey(NamedTuple):
    """``after``: the layer had been computed."""

    slots: tuple[Interval, ...]
    group: int
    after: bool
    how: _How


class _Key(NamedTuple):
    """As in Touch; ``row``: of the request."""

    row: int
    step: int
    positions: tuple[Interval, ...]
    stale: tuple[Interval, ...]
    background: bool
    late: bool = False
    account: Account = Account.OPEN
    given_out: bool = False
    late_for: tuple[int, ...] = ()
    sent_to: str = ""


@dataclass
class _Gathered:
    t: int
    columns: int = 0


def _blocks(runs: Iterable[Interval], size: int) -> Iterator[tuple[int, int, int]]:
    """(block, first offset, end of the offsets) of each block that the runs touch."""
    for start, end in runs:
        for block in range(start // size, (end - 1) // size + 1):
            yield block, max(start - block * size, 0), min(end - block * size, size)


def in_layer(touches: Iterable[Touch], column: int) -> list[Touch]:
    """Those of the touches that were in one layer."""
    return [touch for touch in touches if touch.columns >> column & 1]


def covered(touches: Iterable[Touch]) -> list[Interval]:
    """Positions that were touched."""
    return union(part for touch in touches for part in touch.positions)
