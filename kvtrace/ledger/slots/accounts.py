"""Bytes of KV that a connector read, against bytes that came to rest outside: they account for each other, or
they do not, or it can't be told.

The input are the SLOTS and OUTSIDE records of one spool, and the names and sizes of the files when the run
was over, never what stands in them. Reads and writes are set against each other where they belong together:
within one call; what is left over, within one step; what is left over then, over the whole run of that
connector. A group whose bytes account for what it read is WRITTEN. Narrower numbers, compression and a loss
look alike from outside: fewer bytes than were read say nothing but their ratio.

Nothing is concluded from silence: a store in memory, in another process, or written in place gives no sizes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import groupby, islice
from typing import NamedTuple

import numpy as np

from kvtrace.ledger.intervals import Interval, length, subtract, union
from kvtrace.ledger.run import OutsideBytes
from kvtrace.ledger.slots.sets import parse
from kvtrace.trace import hooks, rows
from kvtrace.trace.format import Flag, Way
from kvtrace.trace.reader import Records
from kvtrace.trace.rest_file import RestFile

_LEAST, _MOST = 0.98, 1.5
"""Bytes at rest for one that was read, where they account for it: names, headers and text cost some more."""
_LOADING = frozenset(hook.code for hook in hooks.LOADING)


class Account(IntEnum):
    """What became of KV that was read, as far as sizes show it."""

    OPEN = 0
    """It can't be told."""
    WRITTEN = 1
    """As many bytes came to rest, and are there at the end."""
    REFUSED = 2
    """The connections that were asked for were refused, and nothing went anywhere."""
    EMPTY = 3
    """Files were opened for it, and this connector never put a byte into any file."""
    LOST_LATER = 4
    """As many bytes came to rest, and the connector removed or emptied the files."""
    SENT = 6
    """As many bytes went through sockets: what the peer keeps is out of sight."""
    PARTLY = 7
    """It can't be told, of a connector that did put bytes somewhere: some of it may be among them."""
    WRITTEN_OVER = 8
    """As many bytes came to rest, and as many again under some of the names, in one later step."""
    OVERWRITTEN = 9
    """... under all of the names."""


_ALONE = {account: (account, "") for account in Account}
_Found = dict[int, tuple[Account, str]]
"""Call -> what became of what it read, and the peer."""


@dataclass(frozen=True)
class Accounts:
    """Of one spool. Attributes:
    of_call: number of a watched call -> what became of what it read, and the peer of what was SENT.
    totals: of each connector.
    putting: calls of connectors that put bytes somewhere.
    over: call -> the step in which what it wrote was written over.
    """

    of_call: Mapping[int, tuple[Account, str]] = field(default_factory=dict)
    totals: tuple[OutsideBytes, ...] = ()
    putting: frozenset[int] = frozenset()
    over: Mapping[int, int] = field(default_factory=dict)

    def of(self, call: int) -> tuple[Account, str, int]:
        """What became of what it read, the peer, and the step in which it was written over."""
        nothing = Account.PARTLY if call in self.putting else Account.OPEN, ""
        return *self.of_call.get(call, nothing), self.over.get(call, 0)


class TracedSpool(NamedTuple):
    """``spool``: its file name. ``slots``, ``outside``: its records of these kinds, shape (n, 8).
    ``slot_bytes``: layer -> bytes of a token's slot."""

    spool: str
    names: Mapping[int, str]
    slots: Records
    outside: Records
    slot_bytes: Mapping[str, float]


def accounts(trace: TracedSpool, rest: RestFile) -> Accounts:
    """Of each connector of the process on its own."""
    files = _Files(trace, rest)
    slots = rows.columns(rows.SlotsTouched, trace.slots)
    indexes = sorted(set(np.unique(rows.detail(slots.head)).tolist()) - {0})
    reads = set(rows.detail(slots.head[rows.flags(slots.head) & Flag.STORE != 0]).tolist()) & {*indexes}
    found = [_of_connector(trace, files, index, alone=(reads or {*indexes}) == {index}) for index in indexes]
    totals = tuple(total for *_, total in found)
    put = {total.connector for total in totals if total.went}
    return Accounts(
        {call: one for of_calls, _, _ in found for call, one in of_calls.items()},
        totals,
        frozenset(slots.call[np.isin(rows.detail(slots.head), list(put))].tolist()),
        {call: step for _, over, _ in found for call, step in over.items()},
    )


# --- files --------------------------------------------------------------------------------------------------


class _StoreFile:
    """What came under one name, or several. ``end``: its size in bytes when the run was over. ``came``: bytes
    that were written to it in all, as far as that was seen; ``before``: what it held then."""

    __slots__ = ("after", "before", "came", "database", "emptied", "end", "names", "over", "removed", "size")

    def __init__(self, name: str, before: int) -> None:
        self.names: tuple[str, ...] = (name,)
        self.before = before
        self.size = self.end = self.came = 0
        self.emptied = False
        """It is there, and holds nothing any more."""
        self.after: _StoreFile | None = None
        """What was written under its name since, and in which step."""
        self.over = 0
        self.removed = False
        """The connector took its last name away."""
        self.database = False
        """Rows of it may be deleted, and others written in their place: its size tells nothing of them."""

    def written_over(self, after: _StoreFile, step: int) -> None:
        """Something else was written under its name."""
        self.after, self.over = after, step

    @property
    def renewed(self) -> bool:
        """Whether no less came under its name since than it held."""
        return self.after is not None and self.after.came >= self.came * _LEAST

    @property
    def lost(self) -> bool:
        """By the connector itself. Of a file that is gone, and that nobody was seen to take away, nothing is
        known: it may have another name."""
        return self.removed or self.emptied

    @property
    def keeps(self) -> bool:
        """What came into it is there at the end. Where it holds less than came, some was written over, and of
        none it can be told."""
        return self.after is None and self.came * _LEAST <= self.end

    @property
    def grew(self) -> int:
        """Bytes that came into it at least: where a write was not seen, its size tells."""
        return max(self.came, self.end - self.before)

    @property
    def held(self) -> int:
        """Bytes of what came that are there at the end, at most."""
        return 0 if self.after else min(self.grew, self.end)


class _Write(NamedTuple):
    """``amount``: bytes that came into a file, -1 where that can't be told."""

    file: _StoreFile
    amount: int


class _Files:
    """Follows names in the order of time. Attributes:
    writes: by the row of the OUTSIDE table what it wrote to a file, None where it did not.
    """

    def __init__(self, trace: TracedSpool, rest: RestFile) -> None:
        self.writes: list[_Write | None] = [None] * len(trace.outside)
        self._now: dict[str, _StoreFile] = {}
        order = np.argsort(trace.outside[:, 1], kind="stable")
        for at, words in zip(order.tolist(), rows.one_by_one(trace.outside[order]), strict=True):
            row = rows.Outside._make(words)
            name, way = trace.names.get(row.target, ""), rows.code(row.head)
            if way == Way.NAME:
                self._named(name, trace.names.get(row.size, ""), row)
            elif way != Way.SOCKET:
                file = self._written(name, row)
                file.came += max(0, row.bytes)
                self.writes[at] = _Write(file, row.bytes)
        resting = {one.path: one for one in rest.files}
        for file in {id(write.file): write.file for write in self.writes if write}.values():
            found = [resting[name] for name in file.names if name in resting]
            sizes = [one.size or 0 for one in found if one.exists is not None]
            file.end = max(sizes, default=0) if sizes else file.size
            file.emptied = any(one.exists for one in found) and file.end == 0 < file.size

    def _written(self, name: str, row: rows.Outside) -> _StoreFile:
        file = old = self._now.get(name)
        if file is None or rows.flags(row.head) & Flag.FIRST:
            file = self._now[name] = _StoreFile(name, max(0, row.size - max(0, row.bytes)))
            if old is not None:
                old.written_over(file, row.step)
        file.database |= rows.code(row.head) == Way.SQLITE
        file.size = max(0, row.size)
        return file

    def _named(self, old: str, new: str, row: rows.Outside) -> None:
        gone = bool(rows.flags(row.head) & Flag.REPLACED)
        file = self._now.pop(old, None) if gone else self._now.get(old)
        if file is None:
            return
        if gone:
            file.names = tuple(name for name in file.names if name != old)
        if new:
            before = self._now.get(new)
            if before is not None and before is not file:
                before.written_over(file, row.step)
            self._now[new] = file
            file.names = tuple(dict.fromkeys((*file.names, new)))
        elif not file.names:
            file.names = (old,)
            file.removed = True


# --- groups -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Group:
    """Reads and writes that belong together: of one call, of one step, or of all."""

    calls: list[int] = field(default_factory=list)
    read: float = 0.0
    unknown: bool = False
    """What was read, or written, can't be told in full."""
    writes: list[_Write] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    """Bytes by peer."""
    refused: int = 0

    def add(self, other: _Group) -> None:
        self.calls += other.calls
        self.read += other.read
        self.unknown |= other.unknown
        self.writes += other.writes
        self.sent.update(other.sent)
        self.refused += other.refused

    @property
    def written(self) -> int:
        """Bytes as they came to files."""
        return sum(max(0, one.amount) for one in self.writes)

    def account(self) -> Account:
        if self.unknown or not self.read:
            return Account.OPEN
        stays = not any(one.file.removed or one.file.database for one in self.writes)
        there = sum(one.amount for one in self.writes if one.amount > 0 and one.file.keeps)
        if stays and _accounts_for(there, self.read):
            return Account.WRITTEN
        renewed = sum(one.amount for one in self.writes if one.amount > 0 and one.file.renewed)
        if stays and self.over and _accounts_for(there + renewed, self.read):
            return Account.WRITTEN_OVER if there else Account.OVERWRITTEN
        own = [one.file for one in self.writes if one.amount]
        if _accounts_for(self.written, self.read) and own and all(file.lost for file in own):
            return Account.LOST_LATER
        if self.refused and not self.writes and not self.sent.total():
            return Account.REFUSED
        if not self.written and _accounts_for(self.sent.total(), self.read):
            return Account.SENT
        return Account.OPEN

    @property
    def over(self) -> int:
        """The step in which other things were written under the names of its files, but for small ones (an
        index); 0: none, or several."""
        steps = Counter[int]()
        for one in self.writes:
            steps[one.file.over] += max(0, one.amount) if one.file.after else 0
        step, amount = max(steps.items(), key=lambda found: found[1], default=(0, 0))
        return step if amount >= _LEAST * steps.total() else 0

    @property
    def peer(self) -> str:
        """To which most was sent."""
        return max(self.sent, key=self.sent.__getitem__, default="")


def _accounts_for(written: float, read: float) -> bool:
    return _LEAST * read <= written <= _MOST * read


def _of_connector(
    trace: TracedSpool, files: _Files, index: int, alone: bool
) -> tuple[_Found, dict[int, int], OutsideBytes]:
    """``alone``: no other one reads KV to store: what was done for no known connector is this one's."""
    found, every, last = _Settled(), _Group(), _Group()
    of_steps: dict[int, _Group] = defaultdict(_Group)
    for step, group in _of_calls(trace, files, index, [index, 0] if alone else [index]):
        every.add(group)
        if not found.settle(group):
            of_steps[step].add(group)
    for group in of_steps.values():
        if not found.settle(group):
            last.add(group)
    empty = _never_a_byte(every)
    if last.read and empty and not every.unknown:
        found.close(last, Account.EMPTY)
    else:
        found.settle(last)
    told = not (every.unknown or every.sent.total())
    own = {id(write.file): write.file for write in every.writes}
    held = sum(file.held for file in own.values())
    moved = _moved(found.read[Account.LOST_LATER], every.read - held)
    total = OutsideBytes(
        trace.spool,
        index,
        round(every.read),
        sum(file.grew for file in own.values()) if told else None,
        held if told else None,
        round(found.read[Account.WRITTEN]),
        round(sum(trace.slot_bytes.values())),
        every.written + sum(max(0, amount) for amount in every.sent.values()),
        len(own),
        sum(file.lost for file in own.values()),
        every.written,
        sum(max(0, write.amount) for write in every.writes if write.file.lost),
        empty,
    )
    if moved:
        found.forget(Account.LOST_LATER)
    return found.of_call, found.over, total


class _Settled:
    """What is known of calls, and how much those had read of which it is the same."""

    def __init__(self) -> None:
        self.of_call: _Found = {}
        self.over: dict[int, int] = {}
        self.read: dict[Account, float] = defaultdict(float)

    def forget(self, account: Account) -> None:
        self.of_call = {call: one for call, one in self.of_call.items() if one[0] != account}

    def settle(self, group: _Group) -> bool:
        """Whether it is known what became of a group."""
        if (account := group.account()) != Account.OPEN:
            self.close(group, account)
        return account != Account.OPEN

    def close(self, group: _Group, account: Account) -> None:
        told = (account, group.peer) if account == Account.SENT else _ALONE[account]
        self.of_call.update(dict.fromkeys(group.calls, told))
        if account in (Account.WRITTEN_OVER, Account.OVERWRITTEN):
            self.over.update(dict.fromkeys(group.calls, group.over))
        self.read[account] += group.read


def _moved(lost: float, lack: float) -> bool:
    """Whether more counts as lost than files can lack: it lies in other ones now, as after a compaction."""
    return lost * _LEAST > max(0.0, lack)


def _never_a_byte(every: _Group) -> bool:
    """Whether several files were opened, none of them ever held anything, and nothing went elsewhere."""
    files = {id(one.file): one.file for one in every.writes}
    nothing = not any(file.size or file.end for file in files.values())
    return len(files) > 1 and nothing and not (every.sent.total() or every.refused)


def _of_calls(
    trace: TracedSpool, files: _Files, index: int, indexes: Sequence[int]
) -> Iterator[tuple[int, _Group]]:
    """(step, what was read, written and sent) of each call, one by one: they are many."""
    slots = trace.slots[rows.detail(trace.slots[:, 0]) == index]
    touched = rows.columns(rows.SlotsTouched, slots)
    order = np.lexsort((touched.layer, touched.call))
    wrote = rows.columns(rows.Outside, trace.outside)
    at = np.flatnonzero(np.isin(rows.detail(wrote.head), indexes) & (rows.code(wrote.head) != Way.NAME))
    at = at[np.argsort(wrote.call[at], kind="stable")]
    calls = np.union1d(touched.call, wrote.call[at])
    numbers = (
        np.diff(np.searchsorted(of, calls, "right"), prepend=0).tolist()
        for of in (touched.call[order], wrote.call[at])
    )
    reads = map(rows.SlotsTouched._make, rows.one_by_one(slots[order]))
    writes = zip(at.tolist(), map(rows.Outside._make, rows.one_by_one(trace.outside[at])), strict=True)
    for of_reads, of_writes in zip(*numbers, strict=True):
        group = _Group()
        step = _read(trace, group, islice(reads, of_reads))
        for row, one in islice(writes, of_writes):
            step = one.step if step is None else step
            if (write := files.writes[row]) is None:
                group.sent[trace.names.get(one.target, "")] += one.bytes
                group.refused += one.errors
            else:
                group.writes.append(write)
                group.unknown |= write.amount < 0
        if step is not None:
            yield step, group


def _read(trace: TracedSpool, group: _Group, touched: Iterable[rows.SlotsTouched]) -> int | None:
    """Add what a call read; its step, None where it read nothing to store."""
    step = None
    for layer, same in groupby(touched, key=lambda row: row.layer):
        read: list[Interval] = []
        filled: list[Interval] = []
        for row in same:
            marks = rows.flags(row.head)
            if marks & Flag.LOAD and (rows.code(row.head) in _LOADING or not marks & Flag.STORE):
                filled += parse(trace.names.get(row.slot_set, "")).full
            elif marks & Flag.STORE:
                step, group.calls = row.step, [row.call]
                if not row.slot_set or marks & Flag.SHARED:
                    group.unknown = True
                else:
                    found = parse(trace.names.get(row.slot_set, ""))
                    read += found.full
                    group.unknown |= bool(found.partly) or row.partly > 0
        if read:
            size = trace.slot_bytes.get(trace.names.get(layer, ""), 0.0)
            # What a call fills as well it read for a load: as the shape of what is to come.
            group.read += length(subtract(union(read), union(filled))) * size
            group.unknown |= not size
    return step
