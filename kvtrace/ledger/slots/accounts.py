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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtrace.ledger.intervals import length, subtract, union
from kvtrace.ledger.run import OutsideBytes
from kvtrace.ledger.slots.sets import parse
from kvtrace.ledger.slots.touches import was_read, was_written
from kvtrace.ledger.steps import Array, Mask
from kvtrace.trace import rows
from kvtrace.trace.format import Flag, Way
from kvtrace.trace.reader import Records
from kvtrace.trace.rest_file import RestFile

_LEAST, _MOST = 0.98, 1.5
"""Bytes at rest for one that was read, where they account for it: names, headers and text cost some more."""


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


Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Accounts:
    """Of one spool. Attributes:
    of_call: number of a watched call -> what became of what it read, the peer of what was SENT, and the
    step in which what it wrote was written over.
    totals: of each connector.
    putting: calls of connectors that put bytes somewhere.
    """

    of_call: Mapping[int, tuple[Account, str, int]] = field(default_factory=dict)
    totals: tuple[OutsideBytes, ...] = ()
    putting: frozenset[int] = frozenset()

    def of(self, call: int) -> tuple[Account, str, int]:
        """As ``of_call``, of any call."""
        nothing = Account.PARTLY if call in self.putting else Account.OPEN
        return self.of_call.get(call, (nothing, "", 0))


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
    put = [total.connector for _, total in found if total.went]
    return Accounts(
        {call: account for of_call, _ in found for call, account in of_call.items()},
        tuple(total for _, total in found),
        frozenset(slots.call[np.isin(rows.detail(slots.head), put)].tolist()),
    )


# --- files --------------------------------------------------------------------------------------------------


class _StoreFile:
    """What came under one name, or several. ``end``: its size in bytes when the run was over. ``came``: bytes
    that were written to it in all, as far as that was seen; ``before``: what it held then."""

    __slots__ = (
        "after", "before", "came", "database", "emptied", "end", "names", "over", "place", "removed", "size",
    )  # fmt: skip

    def __init__(self, name: str, before: int, place: int) -> None:
        self.names: tuple[str, ...] = (name,)
        self.before = before
        self.place = place
        """Among all files."""
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


class _Files:
    """Follows names in the order of time. Attributes:
    every: that was written to.
    of_row: by the row of the OUTSIDE table the place of the file that it wrote to, -1 where it did not.
    columns: of all files: whether it keeps what came, is renewed, is lost, has a size that tells nothing; in
    which step it was written over, and whether it was.
    """

    def __init__(self, trace: TracedSpool, rest: RestFile) -> None:
        self.every: list[_StoreFile] = []
        self.of_row: Array = np.full(len(trace.outside), -1, np.int64)
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
                self.of_row[at] = file.place
        resting = {one.path: one for one in rest.files}
        for file in self.every:
            found = [resting[name] for name in file.names if name in resting]
            sizes = [one.size or 0 for one in found if one.exists is not None]
            file.end = max(sizes, default=0) if sizes else file.size
            file.emptied = any(one.exists for one in found) and file.end == 0 < file.size
        told = [
            (one.keeps, one.renewed, one.lost, one.removed or one.database, one.over, one.after is not None)
            for one in self.every
        ]
        self.columns: Array = np.array(told, np.int64).reshape(-1, 6)

    def _written(self, name: str, row: rows.Outside) -> _StoreFile:
        file = old = self._now.get(name)
        if file is None or rows.flags(row.head) & Flag.FIRST:
            before = max(0, row.size - max(0, row.bytes))
            file = self._now[name] = _StoreFile(name, before, len(self.every))
            self.every.append(file)
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


# --- reads and writes, in columns ---------------------------------------------------------------------------


class _Calls(NamedTuple):
    """Those of one connector. ``number``: of the call; ``stores``: it read KV to store, ``wrote``: it wrote,
    or sent; ``read``: bytes to store; ``unknown``: what it read, or wrote, can't be told in full."""

    number: Array
    step: Array
    stores: Mask
    wrote: Mask
    read: Floats
    unknown: Mask


class _Moves(NamedTuple):
    """Bytes that came into files, or went through sockets; -1 where that can't be told. ``call``: the place
    of its call; ``to``: the place of the file, or the name of the peer; ``errors``: connections refused."""

    call: Array
    to: Array
    amount: Array
    errors: Array


class _OfConnector(NamedTuple):
    """``files``: as of _Files.columns."""

    calls: _Calls
    writes: _Moves
    sent: _Moves
    files: Array


def _read(trace: TracedSpool, files: _Files, index: int, indexes: Sequence[int]) -> _OfConnector:
    slots = trace.slots[rows.detail(trace.slots[:, 0]) == index]
    touched = rows.columns(rows.SlotsTouched, slots)
    wrote = rows.columns(rows.Outside, trace.outside)
    at = np.flatnonzero(np.isin(rows.detail(wrote.head), indexes) & (rows.code(wrote.head) != Way.NAME))
    number = np.union1d(touched.call, wrote.call[at])
    call, to = np.searchsorted(number, wrote.call[at]), files.of_row[at]
    moves = _Moves(call, np.where(to < 0, wrote.target[at], to), wrote.bytes[at], wrote.errors[at])
    writes, sent = (_Moves(*(column[mask] for column in moves)) for mask in (to >= 0, to < 0))
    none = np.zeros(len(number), np.int64)
    calls = _Calls(number, none, none > 0, none > 0, none.astype(float), none > 0)
    calls.step[call[::-1]] = wrote.step[at][::-1]  # of its first one
    calls.wrote[call] = True
    calls.unknown[writes.call[writes.amount < 0]] = True
    _add_reads(trace, touched, calls)
    return _OfConnector(calls, writes, sent, files.columns)


def _add_reads(trace: TracedSpool, touched: rows.SlotsTouched, calls: _Calls) -> None:
    """Add what calls read to store. What a call fills as well it read for a load: as the shape of what is to
    come."""
    numbers: Array = touched.call
    call, reads = np.searchsorted(calls.number, numbers), was_read(touched.head)
    fills = was_written(touched.head) & ~reads
    calls.stores[call[reads]] = True
    calls.step[call[reads]] = touched.step[reads]
    ids, which = np.unique(touched.slot_set, return_inverse=True)
    sets = [parse(trace.names.get(one, "")) for one in ids.tolist()]
    in_part = np.array([bool(one.partly) for one in sets], bool)[which] | (touched.partly > 0)
    shared = (touched.slot_set == 0) | (rows.flags(touched.head) & Flag.SHARED != 0)
    calls.unknown[call[reads & (shared | in_part)]] = True
    layers, layer = np.unique(touched.layer, return_inverse=True)
    sizes = np.array([trace.slot_bytes.get(trace.names.get(one, ""), 0.0) for one in layers.tolist()], float)
    here = np.flatnonzero((reads & ~shared) | fills)
    here = here[np.lexsort((layer[here], call[here]))]
    begins = np.flatnonzero(np.diff(call[here] * len(layers) + layer[here], prepend=-1))
    ends = np.append(begins[1:], len(here))[: len(begins)]
    first = here[begins]
    whole = np.array([length(union(one.full)) for one in sets], np.int64)[which[first]] * reads[first]
    left = whole.copy()
    for pair in np.flatnonzero(ends - begins > 1).tolist():  # most calls touch a layer's slots once
        same = here[begins[pair] : ends[pair]]
        read, filled = (
            union(run for at in which[same[mask[same]]].tolist() for run in sets[at].full)
            for mask in (reads, fills)
        )
        whole[pair], left[pair] = length(read), length(subtract(read, filled))
    size = sizes[layer[first]]
    calls.unknown[call[first[(whole > 0) & (size == 0)]]] = True
    np.add.at(calls.read, call[first], left * size)


# --- groups -------------------------------------------------------------------------------------------------


class _Groups(NamedTuple):
    """Reads and writes that belong together: of one call, of one step, or of all. ``account``: what became of
    what each read; ``over``: the step in which its files were written over, ``peer``: to which most was sent
    (0: none)."""

    account: Array
    over: Array
    peer: Array


def _account(found: _OfConnector, of: Array) -> _Groups:
    """``of``: by the place of a call the number of its group, -1 none."""
    number = int(of.max(initial=-1)) + 1
    inside = of >= 0

    def total(groups: Array, amounts: NDArray[Any] | None = None) -> Floats:
        """Of each group."""
        return np.bincount(groups, amounts, number).astype(float)

    def of_groups(moves: _Moves) -> _Moves:
        here = inside[moves.call]
        return _Moves(of[moves.call[here]], *(column[here] for column in moves[1:]))

    writes, sent = of_groups(found.writes), of_groups(found.sent)
    keeps, renewed, lost, mute, over, is_over = found.files[writes.to].T
    came, own = np.maximum(writes.amount, 0), writes.amount != 0
    read = total(of[inside], found.calls.read[inside])
    unknown = total(of[inside], found.calls.unknown[inside]) > 0
    written, went = total(writes.call, came), total(sent.call, sent.amount)
    stays, there = total(writes.call, mute) == 0, total(writes.call, came * keeps)
    with_renewed = there + total(writes.call, came * renewed)
    all_lost = (total(writes.call, own) > 0) & (total(writes.call, own * (1 - lost)) == 0)
    refused = (total(sent.call, sent.errors) != 0) & (total(writes.call) == 0) & (went == 0)
    step_over = _most(writes.call, over, came * is_over, number, _LEAST)

    def fits(amount: Floats) -> Mask:
        """Whether bytes account for what was read."""
        result: Mask = (_LEAST * read <= amount) & (amount <= _MOST * read)
        return result

    told = {
        Account.OPEN: unknown | (read == 0),
        Account.WRITTEN: stays & fits(there),
        Account.WRITTEN_OVER: stays & (step_over > 0) & fits(with_renewed) & (there > 0),
        Account.OVERWRITTEN: stays & (step_over > 0) & fits(with_renewed),
        Account.LOST_LATER: fits(written) & all_lost,
        Account.REFUSED: refused,
        Account.SENT: (written == 0) & fits(went),
    }
    account = np.select(list(told.values()), list(map(int, told)), int(Account.OPEN))
    return _Groups(account, step_over, _most(sent.call, sent.to, sent.amount, number))


def _most(group: Array, what: Array, amount: Array, number: int, share: float = 0.0) -> Array:
    """Of each group for what the amounts are the most, 0 where that is less than a share of all: small ones
    (an index) do not count."""
    pairs, at = np.unique(np.stack([group, what]), axis=1, return_inverse=True)
    amounts = np.bincount(at.reshape(-1), amount, pairs.shape[1])
    total = np.bincount(pairs[0], amounts, number)
    order = np.argsort(amounts, kind="stable")
    order = order[(amounts[order] > 0) & (amounts[order] >= share * total[pairs[0, order]])]
    found: Array = np.zeros(number, np.int64)
    found[pairs[0, order]] = pairs[1, order]  # the last one that is set stays
    return found


def _of_connector(
    trace: TracedSpool, files: _Files, index: int, alone: bool
) -> tuple[Mapping[int, tuple[Account, str, int]], OutsideBytes]:
    """What is known of its calls, as in Accounts, and the sums.

    ``alone``: no other one reads KV to store: what was done for no known connector is this one's."""
    found = _read(trace, files, index, [index, 0] if alone else [index])
    calls, writes, sent = found.calls, found.writes, found.sent
    own = [files.every[place] for place in np.unique(writes.to).tolist()]
    came_to_rest = any(file.size or file.end for file in own)
    nothing = not (came_to_rest or sent.amount.any() or sent.errors.any())
    unknown, empty = bool(calls.unknown.any()), len(own) > 1 and nothing
    account, over, peer = np.zeros((3, len(calls.number)), np.int64)

    def settle(together: Array) -> None:
        """Of calls of which nothing is known, those in which this is the same."""
        still = np.flatnonzero((account == Account.OPEN) & (calls.stores | calls.wrote))
        of = np.full(len(account), -1)
        of[still] = np.unique(together[still], return_inverse=True)[1]
        account[still], over[still], peer[still] = (column[of[still]] for column in _account(found, of))

    settle(calls.number)
    settle(calls.step)
    if empty and not unknown and calls.read[account == Account.OPEN].any():
        account[account == Account.OPEN] = Account.EMPTY
    settle(np.zeros_like(calls.step))

    read = np.bincount(account, calls.read, len(Account))
    # a database may keep what came in a log beside it
    told = not (unknown or sent.amount.any() or any(file.database for file in own))
    held, every = sum(file.held for file in own), calls.read.sum()
    came = np.maximum(writes.amount, 0)
    total = OutsideBytes(
        index,
        round(every),
        sum(file.grew for file in own) if told else None,
        held if told else None,
        round(read[Account.WRITTEN]),
        round(sum(trace.slot_bytes.values())),
        int(came.sum() + np.maximum(sent.amount, 0).sum()),
        len(own),
        sum(file.lost for file in own),
        int(came.sum()),
        int(came[found.files[writes.to, 2] > 0].sum()),
        empty,
    )
    if _moved(read[Account.LOST_LATER], every - held):
        account[account == Account.LOST_LATER] = Account.OPEN
    known = calls.stores & (account != Account.OPEN)
    names = {0: "", **{one: trace.names.get(one, "") for one in np.unique(peer).tolist()}}
    over[~np.isin(account, (Account.WRITTEN_OVER, Account.OVERWRITTEN))] = 0
    of_call = {
        call: (Account(of), names[to] if of == Account.SENT else "", step)
        for call, of, to, step in zip(
            *(column[known].tolist() for column in (calls.number, account, peer, over)), strict=True
        )
    }
    return of_call, total


def _moved(lost: float, lack: float) -> bool:
    """Whether more counts as lost than files can lack: it lies in other ones now, as after a compaction."""
    return lost * _LEAST > max(0.0, lack)
