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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import groupby
from typing import NamedTuple

import numpy as np

from kvtrace.ledger.intervals import Interval, length, subtract, union
from kvtrace.ledger.rest_file import RestFile
from kvtrace.ledger.run import OutsideBytes
from kvtrace.ledger.slots.sets import parse
from kvtrace.trace import hooks, rows
from kvtrace.trace.format import Flag, Way
from kvtrace.trace.reader import Records

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


_KEPT = (Account.WRITTEN, Account.SENT)
_OPEN = Account.OPEN, ""
_Found = dict[int, tuple[Account, str]]
"""Call -> what became of what it read, and the peer."""


@dataclass(frozen=True)
class Accounts:
    """Of one spool. Attributes:
    of_call: number of a watched call -> what became of what it read, and the peer of what was SENT.
    totals: of each connector.
    putting: calls of connectors that put bytes somewhere.
    """

    of_call: Mapping[int, tuple[Account, str]] = field(default_factory=dict)
    totals: tuple[OutsideBytes, ...] = ()
    putting: frozenset[int] = frozenset()

    def of(self, call: int) -> tuple[Account, str]:
        return self.of_call.get(call) or (Account.PARTLY if call in self.putting else Account.OPEN, "")


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
    totals = tuple(total for _, total in found)
    put = {total.connector for total in totals if any(total.places.values())}
    return Accounts(
        {call: one for of_calls, _ in found for call, one in of_calls.items()},
        totals,
        frozenset(slots.call[np.isin(rows.detail(slots.head), list(put))].tolist()),
    )


# --- files --------------------------------------------------------------------------------------------------


class _StoreFile:
    """What came under one name, or several. ``end``: its size in bytes when the run was over. ``came``: bytes
    that were written to it in all, as far as that was seen; ``before``: what it held then."""

    __slots__ = ("before", "came", "database", "emptied", "end", "names", "removed", "replaced", "size")

    def __init__(self, name: str, before: int) -> None:
        self.names, self.before = {name}, before
        self.size = self.end = self.came = 0
        self.emptied = False
        """It is there, and holds nothing any more."""
        self.replaced = False
        """Something else was written under its name."""
        self.removed = False
        """The connector took its last name away."""
        self.database = False
        """Rows of it may be deleted, and others written in their place: its size tells nothing of them."""

    @property
    def lost(self) -> bool:
        """By the connector itself. Of a file that is gone, and that nobody was seen to take away, nothing is
        known: it may have another name."""
        return self.removed or self.emptied

    @property
    def keeps(self) -> bool:
        """What came into it is there at the end. Where it holds less than came, some was written over, and of
        none it can be told."""
        return not self.replaced and self.came * _LEAST <= self.end

    @property
    def grew(self) -> int:
        """Bytes that came into it at least: where a write was not seen, its size tells."""
        return max(self.came, self.end - self.before)

    @property
    def held(self) -> int:
        """Bytes of what came that are there at the end, at most."""
        return 0 if self.replaced else min(self.grew, self.end)


class _Write(NamedTuple):
    """``amount``: bytes that came into a file, -1 where that can't be told."""

    file: _StoreFile
    amount: int


class _Files:
    """Follows names in the order of time. Attributes:
    writes: (row of the OUTSIDE table) -> what it wrote to a file.
    """

    def __init__(self, trace: TracedSpool, rest: RestFile) -> None:
        self.writes: dict[int, _Write] = {}
        self._now: dict[str, _StoreFile] = {}
        order = np.argsort(trace.outside[:, 1], kind="stable")
        for at, words in zip(order.tolist(), rows.one_by_one(trace.outside[order]), strict=True):
            row = rows.Outside._make(words)
            name, way = trace.names.get(row.target, ""), rows.code(row.head)
            if way == Way.NAME:
                self._named(name, trace.names.get(row.size, ""), bool(rows.flags(row.head) & Flag.REPLACED))
            elif way != Way.SOCKET:
                file = self._written(name, row)
                file.came += max(0, row.bytes)
                self.writes[at] = _Write(file, row.bytes)
        resting = {one.path: one for one in rest.files}
        for file in {id(write.file): write.file for write in self.writes.values()}.values():
            found = [resting[name] for name in file.names if name in resting]
            sizes = [one.size or 0 for one in found if one.exists is not None]
            file.end = max(sizes, default=0) if sizes else file.size
            file.emptied = any(one.exists for one in found) and file.end == 0 < file.size

    def _written(self, name: str, row: rows.Outside) -> _StoreFile:
        file = self._now.get(name)
        if file is None or rows.flags(row.head) & Flag.FIRST:
            if file is not None:
                file.replaced = True
            file = self._now[name] = _StoreFile(name, max(0, row.size - max(0, row.bytes)))
        file.database |= rows.code(row.head) == Way.SQLITE
        file.size = max(0, row.size)
        return file

    def _named(self, old: str, new: str, gone: bool) -> None:
        file = self._now.pop(old, None) if gone else self._now.get(old)
        if file is None:
            return
        if gone:
            file.names.discard(old)
        if new:
            before = self._now.get(new)
            if before is not None and before is not file:
                before.replaced = True
            self._now[new] = file
            file.names.add(new)
        elif not file.names:
            file.names.add(old)
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
        own = [one.file for one in self.writes if one.amount]
        if _accounts_for(self.written, self.read) and own and all(file.lost for file in own):
            return Account.LOST_LATER
        if self.refused and not self.writes and not self.sent.total():
            return Account.REFUSED
        if not self.written and _accounts_for(self.sent.total(), self.read):
            return Account.SENT
        return Account.OPEN

    @property
    def peer(self) -> str:
        """To which most was sent."""
        return max(self.sent, key=self.sent.__getitem__, default="")


def _accounts_for(written: float, read: float) -> bool:
    return _LEAST * read <= written <= _MOST * read


def _of_connector(trace: TracedSpool, files: _Files, index: int, alone: bool) -> tuple[_Found, OutsideBytes]:
    """``alone``: no other one reads KV to store: what was done for no known connector is this one's."""
    groups: dict[int, _Group] = defaultdict(_Group)
    steps: dict[int, int] = {}
    _read(trace, index, groups, steps)
    places = _outside(trace, files, {index, 0} if alone else {index}, groups, steps)
    found: _Found = {}
    every = list(groups.values())
    of_steps: dict[int, _Group] = defaultdict(_Group)
    for call, group in _settle(groups.items(), found):
        of_steps[steps.get(call, 0)].add(group)
    last = _Group()
    for _, group in _settle(of_steps.items(), found):
        last.add(group)
    _settle([(0, last)], found)
    if last.read and _never_a_byte(every):
        _close(last, Account.EMPTY, found)
    told = not any(one.unknown or one.sent.total() for one in every)
    writes = [write for one in every for write in one.writes]
    own = {id(write.file): write.file for write in writes}
    held = sum(file.held for file in own.values())
    if _moved(groups, found, held):
        found = {call: one for call, one in found.items() if one[0] != Account.LOST_LATER}
    total = OutsideBytes(
        trace.spool,
        index,
        round(sum(one.read for one in every)),
        sum(file.grew for file in own.values()) if told else None,
        held if told else None,
        round(sum(one.read for call, one in groups.items() if found.get(call, _OPEN)[0] == Account.WRITTEN)),
        round(sum(trace.slot_bytes.values())),
        places,
        len(own),
        sum(file.lost for file in own.values()),
        sum(max(0, write.amount) for write in writes),
        sum(max(0, write.amount) for write in writes if write.file.lost),
    )
    return found, total


def _settle(groups: Iterable[tuple[int, _Group]], found: _Found) -> list[tuple[int, _Group]]:
    """The groups that stay open; what became of the others is found."""
    left = []
    for key, group in groups:
        account = group.account()
        if account == Account.OPEN:
            left.append((key, group))
        else:
            _close(group, account, found)
    return left


def _moved(groups: Mapping[int, _Group], found: _Found, held: int) -> bool:
    """Whether more counts as lost than files can lack: it lies in other ones now, as after a compaction."""
    lost = sum(groups[call].read for call, (account, _) in found.items() if account == Account.LOST_LATER)
    return lost * _LEAST > max(0.0, sum(one.read for one in groups.values()) - held)


def _close(group: _Group, account: Account, found: _Found) -> None:
    found.update(dict.fromkeys(group.calls, (account, group.peer if account == Account.SENT else "")))


def _never_a_byte(groups: Sequence[_Group]) -> bool:
    """Whether several files were opened, none of them ever held anything, and nothing went elsewhere."""
    files = {id(one.file): one.file for group in groups for one in group.writes}
    nothing = not any(file.size or file.end for file in files.values())
    elsewhere = any(group.sent.total() or group.unknown or group.refused for group in groups)
    return len(files) > 1 and nothing and not elsewhere


def _read(trace: TracedSpool, index: int, groups: dict[int, _Group], steps: dict[int, int]) -> None:
    own = trace.slots[rows.detail(trace.slots[:, 0]) == index]
    touched = rows.columns(rows.SlotsTouched, own)
    order = np.lexsort((touched.layer, touched.call))
    records = map(rows.SlotsTouched._make, rows.one_by_one(own[order]))
    for (call, layer), same in groupby(records, key=lambda row: (row.call, row.layer)):
        read: list[Interval] = []
        filled: list[Interval] = []
        for row in same:
            marks = rows.flags(row.head)
            if marks & Flag.LOAD and (rows.code(row.head) in _LOADING or not marks & Flag.STORE):
                filled += parse(trace.names.get(row.slot_set, "")).full
            elif marks & Flag.STORE:
                steps[call] = row.step
                group = groups[call]
                group.calls = [call]
                if not row.slot_set or marks & Flag.SHARED:
                    group.unknown = True
                else:
                    found = parse(trace.names.get(row.slot_set, ""))
                    read += found.full
                    group.unknown |= bool(found.partly)
        if read:
            size = trace.slot_bytes.get(trace.names.get(layer, ""), 0.0)
            # What a call fills as well it read for a load: as the shape of what is to come.
            groups[call].read += length(subtract(union(read), union(filled))) * size
            groups[call].unknown |= not size


def _outside(
    trace: TracedSpool, files: _Files, indexes: set[int], groups: dict[int, _Group], steps: dict[int, int]
) -> dict[str, int]:
    places: dict[str, int] = defaultdict(int)
    for at, words in enumerate(rows.one_by_one(trace.outside)):
        row = rows.Outside._make(words)
        if rows.detail(row.head) not in indexes or rows.code(row.head) == Way.NAME:
            continue
        group, name = groups[row.call], trace.names.get(row.target, "")
        steps.setdefault(row.call, row.step)
        if rows.code(row.head) == Way.SOCKET:
            group.sent[name] += row.bytes
            group.refused += row.errors
        else:
            write = files.writes[at]
            group.writes.append(write)
            group.unknown |= write.amount < 0
            name = min(write.file.names, default=name)
        places[name] += max(0, row.bytes)
    return dict(places)
