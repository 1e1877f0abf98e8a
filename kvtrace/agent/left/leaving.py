"""One watched call, or one piece of background work: what left the process in it, as LEFT, FOUND and PIECE
records.

``paths.py`` and ``sockets.py`` tell what happens, in the thread of the call; files are looked at when the
call is over: they are read for a moment, never kept open. Where KV was read in this call or an earlier one,
it is looked for in what left (``pieces.py``).
"""

from __future__ import annotations

import hashlib
import math
import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvtrace.agent import owners
from kvtrace.agent.left import databases, paths, sockets
from kvtrace.agent.left.keys import KEYS, Held, asked, head_of
from kvtrace.agent.left.paths import PLACES, Place, Wrote
from kvtrace.agent.left.pieces import LENGTH, POOL, Hit, Needle, Op, turned
from kvtrace.agent.left.unpack import WORTH, Stream, Unpacker
from kvtrace.agent.state import AGENT, clock
from kvtrace.agent.watch.by_address import BY_ADDRESS, Here, Read, Tensors
from kvtrace.agent.watch.caches import CACHES, Layer
from kvtrace.agent.watch.layout import Layout
from kvtrace.agent.watch.operations import Watch, text_of_touches
from kvtrace.agent.watch.origin import HERE
from kvtrace.agent.watch.records import Names, next_call
from kvtrace.agent.watch.touch import Touch
from kvtrace.trace.format import MEMORY, Flag, Form, Kind, Role, Way, pack_head
from kvtrace.trace.mask import mask_text
from kvtrace.trace.rows import KvFound, LeftProcess, Piece
from kvtrace.trace.sqlite_file import HEAD, page_size

_MOST_BYTES = 32 << 20
"""Of one file, and of one call in all, that are looked through."""
_MOST_DATABASE = 8 << 20
"""Bytes of a database that are looked through at every change; of a larger one only what it grew by."""
_LEAST_SAVE = 1024
"""Bytes that may be a save where no KV was found in them; questions are shorter."""
_MOST_KEY = 2048
"""Bytes of a message in which its key is looked for."""
_MOST_OPS = 64
"""Operations of one call on one layer that are told apart."""
_WORD = 8
_STAY = Way.FILE, Way.SHARED_MEMORY
"""Where a piece stands at one place for as long as it is there."""
_NOT_ALL = Form.PARTLY, Form.CUT, Form.ZEROED, Form.REFUSED
"""The rest may come later: it may have been looked at while it was written."""
_READING = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_MASK = (1 << 63) - 1
_Block = tuple[str, int, int]
_UNPACKED = 1 << 48
"""Where what was compressed stands, beside the places of a file: no two streams overlap there."""
_MOST_PACKING = 32
_packing: list[Place] = []
"""Files whose last compressed stream went on when they were last seen."""
_MOST_VALUES = 1 << 16
_values: set[int] = set()
"""Of databases: those that were looked into."""
_in_databases: dict[str, dict[_Block, int]] = {}
"""Path -> (layer, block, slots in it) -> how often it stood there when it was last looked at."""
_targets = Names(256)
_sets = Names(64)


_spool: Any = None


def begins() -> None:
    """Where a spool has begun since the last time, all that was noted for an earlier one is forgotten."""
    global _spool
    if _spool is not AGENT.recorder:
        _spool = AGENT.recorder
        PLACES.forget()
        POOL.forget()
        KEYS.forget()
        BY_ADDRESS.forget()
        WORTH.forget()
        _in_databases.clear()
        _values.clear()
        _packing.clear()


class Peer:
    """What went to one socket. ``calls``: how often something went out that may be a save, and was answered
    or not. ``waiting``, ``since``: what was found, and bytes, since its last answer."""

    __slots__ = (
        "asked",
        "bytes",
        "calls",
        "errors",
        "first",
        "head",
        "name",
        "since",
        "tail",
        "unpacker",
        "unseen",
        "waiting",
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.unpacker = Unpacker()
        self.bytes = self.calls = self.errors = self.since = 0
        self.tail = b""
        self.unseen = False
        self.waiting: list[Hit] = []
        self.asked: tuple[bool, bytes] | None = None
        self.head = b""
        """The first bytes since its last answer."""
        self.first: int | None = None
        """Bytes since then before the first of the KV that was found."""

    def over(self) -> bool:
        """What went out was answered, or nothing more comes; whether it may have been a save."""
        save = bool(self.waiting) or self.since >= _LEAST_SAVE
        self.calls += save
        self.waiting, self.since, self.first = [], 0, None
        return save

    def held(self) -> list[Held]:
        """The operations of which something was found since its last answer."""
        found: dict[int, tuple[Op, set[int]]] = {}
        for hit in self.waiting:
            _, numbers = found.setdefault(id(hit.needle.op), (hit.needle.op, set()))
            numbers.add(hit.needle.number)
        return [Held(op, len(numbers) == len(op.pieces)) for op, numbers in found.values()]


class Finding(NamedTuple):
    """A piece found: where, and in what form. ``packed``: of compressed KV, some of the bytes at rest, and
    where they stand."""

    hit: Hit
    target: str
    way: Way
    stays: bool
    """Whether it stands at this place of a file for as long as it is at rest."""
    packed: tuple[int, bytes] | None = None


class Left:
    """Of one call; after :meth:`write`, of the next one."""

    def __init__(self, connector: int) -> None:
        paths.install()
        sockets.install()
        begins()
        self._call = 0
        self.connector = connector
        self.cost = 0
        """Host ns that looking took during the call."""
        self._marks = 0
        self.reader: Watch | None = None
        """Hears of KV that was read by address, and is found."""
        self.loads = False
        """It works for a hook for loading."""
        self._empty()

    @property
    def call(self) -> int:
        """The call's number, given at the first question."""
        self._call = self._call or next_call()
        return self._call

    def _empty(self) -> None:
        self._opened: dict[str, Place] = {}
        self._removed: dict[str, None] = {}
        self._peers: dict[int, Peer] = {}
        self._unreachable: dict[str, int] = {}
        self._found: dict[int, tuple[Op, list[Finding]]] = {}
        self._refused: set[int] = set()
        self._ops: dict[str, list[Op]] = {}
        self._looked = 0
        self._unpacked = _UNPACKED
        self._sent = LENGTH
        self._tensors = Tensors()
        self._asked: dict[str, Layer] = {}
        """Layers of which the address was given out in this call, and those that were read by address."""
        self._here = Here()
        self._copies: dict[_Block, int] = {}
        """(layer, block, slots in it) -> how often it left."""
        self._sizes: dict[str, int] = {}
        """Of files that were written in one piece: path -> bytes."""
        self._at_end: list[tuple[Wrote, bool, bool]] | None = None
        """Of each file: what was written, whether KV was found in it, whether all was looked through."""

    def follows(self, watch: Watch) -> None:
        """What this watch sees is of this call."""
        watch.keep, watch.gives, watch.copies = self.keep, self.gives, self.copies
        self.reader = watch

    # --- KV that is read ------------------------------------------------------------------

    def keep(self, layer: Layer, layout: Layout, touches: list[Touch]) -> bool:
        """Pieces of what was read just now are kept; False where that is not possible, or where a connector
        inside this one keeps them."""
        BY_ADDRESS.saw(layer, touches, self.connector)
        if getattr(HERE.work, "left", None) is not self:
            return False
        ops = self._ops.setdefault(layer.name, [])
        op = ops[-1] if len(ops) >= _MOST_OPS else Op(self.call, self.connector, layer.name)
        given_up = POOL.take(op, layer.start, layout, touches, CACHES.heads(layer))
        if given_up is None:
            return False
        if not ops or ops[-1] is not op:
            ops.append(op)
        for old in given_up:
            self._write_found(old, Form.GIVEN_UP, clock(), "", 0)
        return True

    # --- KV that is read by address ---------------------------------------------------------

    def gives(self, layers: tuple[Layer, ...]) -> None:
        """The address of all of these layers was given out."""
        self._asked.update((layer.name, layer) for layer in layers)
        self._here.asked.update(layer.name for layer in layers)
        BY_ADDRESS.give(layers, self.call, self.connector)

    def copies(self) -> None:
        """A copy by address, out of KV, was seen as it was made."""
        BY_ADDRESS.copies(self.connector)

    def in_tensor(self, tensor: Any) -> None:
        """The connector goes on with it."""
        began = clock()
        data = self._tensors.bytes_of(tensor) if BY_ADDRESS.hidden(self.connector) else None
        if data is not None and self._looked < _MOST_BYTES:
            self._looked += len(data)
            step = math.gcd(tensor.element_size(), _WORD)
            self._reads(BY_ADDRESS.look(data, self._here, self.connector, step) or [])
        self.cost += clock() - began

    def _reads(self, found: list[Read]) -> None:
        self._asked.update((read.layer.name, read.layer) for read in found)
        if self.reader is not None:
            self.reader.held(found)

    def _by_address(self, data: bytes, database: str = "") -> None:
        """Look for it in what left. ``database``: what was there before is there still, and what a load opens
        was there before."""
        if self.reader is None or not BY_ADDRESS.hidden(self.connector):
            return
        here = Here() if database else self._here
        found = BY_ADDRESS.look(data, here, self.connector)
        if found is None or here.blank:
            self.reader.not_all_held(BY_ADDRESS.given)  # KV of slots that can't be named, perhaps
        if found is None:
            return
        if not (database and self.loads):
            self._reads(found)
        before = _in_databases.get(database, {})
        counts: dict[_Block, int] = {}
        for read in found:
            for block, times in zip(read.blocks.tolist(), read.times.tolist(), strict=True):
                name = read.layer.name, block, read.size
                counts[name] = times
                self._copies[name] = self._copies.get(name, 0) + max(0, times - before.get(name, 0))
        if database:
            _in_databases[database] = counts

    def _say_what_is_held(self) -> None:
        """What left more than once was read more than once; what else was read is not known: it may leave
        later, or never."""
        if self.reader is None or not self._asked:
            return
        if self.reader.looks is None:
            self.reader.maybe_written.update(self._asked)  # it loads
        again: dict[str, int] = Counter()
        for (name, _, size), times in self._copies.items():
            again[name] += max(0, times - 1) * size
        for name, layer in self._asked.items():
            if again[name]:
                self.reader.held_again(layer, again[name])
        if self.reader.looks is not None and BY_ADDRESS.hidden(self.connector):
            self.reader.not_all_held(self._asked)

    # --- what happens ---------------------------------------------------------------------

    def opened(self, place: Place) -> None:
        HERE.did = clock()
        self._opened[place.path] = place

    def renamed(self, old: str, place: Place) -> None:
        self._opened.pop(old, None)
        self._opened[place.path] = place

    def removed(self, path: str) -> None:
        """It is there still, for a moment: what this call wrote into it is looked for now."""
        began = clock()
        place = self._opened.pop(path, None)
        if place is not None:
            self._in_file(PLACES.look(place))
        self._removed[path] = None
        self.cost += clock() - began

    def _peer(self, sock: Any) -> Peer:
        peer = self._peers.get(id(sock))
        if peer is None:
            peer = self._peers[id(sock)] = Peer(sockets.name_of(sock))
        return peer

    def sent(self, sock: Any, data: Any, sent: int | None) -> None:
        """``sent``: bytes of it that went out; None for all."""
        began = HERE.did = clock()
        peer = self._peer(sock)
        view = memoryview(data).cast("B")
        view = view if sent is None else view[:sent]
        if not peer.since:
            peer.head = bytes(view[:_MOST_KEY])
            peer.asked = asked(peer.head)
        before = peer.since - len(peer.tail)
        peer.bytes += len(view)
        peer.since += len(view)
        if _searching():
            whole = len(view) + self._looked <= _MOST_BYTES
            peer.unseen |= not whole
            if whole and len(view):
                self._looked += len(view)
                first = self._sent - len(peer.tail)
                data = peer.tail + bytes(view)
                hits = self._look(data, peer.name, Way.SOCKET, first, len(peer.tail))
                if hits and peer.first is None:
                    peer.first = before + min(hit.offset for hit in hits)
                if not _all_found(hits):
                    streams = peer.unpacker.streams(data[len(peer.tail) :])
                    packed = self._look_into(streams, peer.name, Way.SOCKET)
                    if packed and peer.first is None:
                        peer.first = before + len(peer.tail) + streams[0].place
                    hits += packed
                peer.waiting.extend(hits)
        self._sent += len(view) + LENGTH  # one message stands nowhere in the place of another
        # what a piece may begin in; the next bytes may end it
        peer.tail = (peer.tail + bytes(view[-LENGTH:]))[-LENGTH:]
        self.cost += clock() - began

    def answered(self, sock: Any, head: bytes) -> None:
        """The first bytes of what came back; none where the peer went away."""
        peer = self._peer(sock)
        if (peer.waiting or peer.since >= _LEAST_SAVE) and (not head or sockets.refuses(head)):
            self._fails(peer)
        else:
            self._done(peer)
            peer.over()

    def _done(self, peer: Peer) -> None:
        """What went out was answered: what it put or deleted under a key."""
        if peer.asked is None:
            if peer.first is not None and 0 <= peer.first <= len(peer.head):
                head = head_of(peer.head, peer.first, peer.since)
                for op, replaced in KEYS.put_behind(peer.name, head, peer.held(), peer.since):
                    form = Form.REPLACED if replaced else Form.COVERED
                    self._write_found(op, form, clock(), peer.name, self.call)
            return
        puts, key = peer.asked
        name, peer.asked = (peer.name, key), None
        gone = KEYS.put(name, peer.held()) if puts else KEYS.delete(name)
        for op in gone:
            self._write_found(op, Form.REPLACED if puts else Form.DELETED, clock(), peer.name, self.call)

    def failed(self, sock: Any) -> None:
        self._fails(self._peer(sock))

    def _fails(self, peer: Peer) -> None:
        peer.errors += 1
        self._refused.update(id(hit.needle.op) for hit in peer.waiting)
        peer.over()

    def unreachable(self, address: Any) -> None:
        name = sockets.name_of_address(address)
        self._unreachable[name] = self._unreachable.get(name, 0) + 1

    def _look(self, data: bytes, target: str, way: Way, first: int = 0, seen: int = 0) -> list[Hit]:
        """What was read and stands in ``data``. ``first``: where that is in a file or in all that was
        sent; ``seen``: bytes at its begin that were looked through with what came before."""
        self._by_address(data)
        return self._look_for_pieces(data, target, way, first, seen)

    def _look_for_pieces(self, data: bytes, target: str, way: Way, first: int, seen: int = 0) -> list[Hit]:
        hits = [hit for hit in self._hits(data) if hit.offset + len(hit.needle.data) > seen]
        moved = [hit._replace(offset=hit.offset + first) for hit in hits]
        self._find([Finding(hit, target, way, way in _STAY) for hit in moved])
        return hits

    def _hits(self, data: bytes) -> list[Hit]:
        hits = POOL.search(data) or POOL.near(data)
        for hit in hits:
            _order_of_heads(hit, data, hit.offset)
        return hits

    def _look_into(self, streams: list[Stream], target: str, way: Way, first: int = 0) -> list[Hit]:
        """The same of what stands there compressed."""
        found: list[Hit] = []
        for stream in streams:
            if self._looked + len(stream.data) > _MOST_BYTES:
                break
            self._looked += len(stream.data)
            self._by_address(stream.data)
            hits = self._hits(stream.data)
            if hits:
                WORTH.found()
            begin, stays = self._unpacked, bool(stream.packed) and way in (Way.FILE, Way.SQLITE)
            self._unpacked += len(stream.data) + LENGTH
            packed = first + stream.place, stream.packed
            moved = [hit._replace(offset=hit.offset + begin) for hit in hits]
            self._find([Finding(hit, target, way, stays, packed) for hit in moved])
            found += hits
        return found

    def _find(self, findings: list[Finding]) -> None:
        for one in findings:
            op = one.hit.needle.op
            self._refused.discard(id(op))  # sent once more
            op.in_file |= one.way != Way.SOCKET
            self._found.setdefault(id(op), (op, []))[1].append(one)

    # --- what is held in memory -----------------------------------------------------------

    def held(self, name: str, data: bytes, first: int) -> None:
        """``data`` is held under a name in the process's memory, behind ``first`` other bytes."""
        if not _all_found(self._look(data, MEMORY + name, Way.MEMORY, first)):
            self._look_into(Unpacker().streams(data), MEMORY + name, Way.MEMORY)

    def write_held(self, t: int, whole: bool) -> None:
        """``whole``: all that is held was looked through."""
        self._marks = int(Flag.KEPT) if whole else 0
        for op, findings in self._own():
            if self._is_looked_through_for(op.connector):
                self._say(op, findings, t)
        self._call = self._marks = 0
        self._empty()

    def _is_looked_through_for(self, connector: int) -> bool:
        """Whether what this connector holds may be another one's, too: two children of one connector read
        the same KV, and the one's copy is not the other's. Each is looked at for itself."""
        mine, its = owners.owner_of(self.connector), owners.owner_of(connector)
        return connector == self.connector or mine is None or its is None or mine.is_of(its)

    # --- at its end -----------------------------------------------------------------------

    def write(self, step: int, t: int, thread: int, role: Role = Role.WORKER) -> None:
        """Records of all that left since it began, or since they were last written. Never raises."""
        try:
            for path in self._removed:
                _write_removal(path, (t, self.call, step), role, self.connector)
            if role != Role.WORKER:
                return
            self._files(step, t, thread)
            self._sockets(step, t, thread)
            for op, findings in self._own():
                self._say(op, findings, t)
        except Exception:
            AGENT.failed("what left")
        self._call = 0
        self.cost = 0
        self._empty()

    def ends(self) -> None:
        """Look into the files now: what is found there may say what was read by address. Never raises."""
        began = clock()
        try:
            self._at_end = self._look_at_files()
            self._say_what_is_held()
        except Exception:
            AGENT.failed("what left")
        self.cost += clock() - began

    def _look_at_files(self) -> list[tuple[Wrote, bool, bool]]:
        looked = {place.path: PLACES.look(place, own=True) for place in self._opened.values()}
        for place in PLACES.still_open():
            if place.path not in looked:
                new = not place.looks
                wrote = PLACES.look(place)
                changed = wrote.written or wrote.again or _errors(wrote) != place.errors
                if new or changed or (place.mapped and _searching()):
                    looked[place.path] = wrote
        return [(wrote, *self._in_file(wrote)) for wrote in looked.values()]

    def _files(self, step: int, t: int, thread: int) -> None:
        for wrote, found, whole in self._look_at_files() if self._at_end is None else self._at_end:
            path = wrote.place.path
            opened, errors = path in self._opened, _errors(wrote)
            if opened or wrote.written or found or wrote.place.looks == 1 or errors != wrote.place.errors:
                marks = int(Flag.KEPT) if whole else 0
                amounts = wrote.written, int(opened), errors
                wrote.place.errors = errors
                self._write_left(wrote.place.way, path, amounts, marks, step, t, thread)

    def _in_file(self, wrote: Wrote) -> tuple[bool, bool]:
        """Whether KV was found in what came into a file, and whether all of it was looked through."""
        first = max(0, wrote.first - LENGTH)
        length = wrote.size - first
        if wrote.size <= 0 or not (wrote.written or wrote.again or wrote.place.mapped):
            return False, wrote.size >= 0
        if not wrote.place.may_be_read():
            return False, False
        if not _searching():
            return False, True
        if wrote.place.way == Way.SQLITE:
            return self._in_database(wrote)
        if length + self._looked > _MOST_BYTES:
            return self._in_extents(wrote.place) if wrote.place.mapped else (False, False)
        self._looked += length
        data = _read(wrote.place.path, first, length)
        if data is None:
            return False, False
        if wrote.place.way == Way.FILE and wrote.written == wrote.size and not wrote.place.stays:
            self._sizes[wrote.place.path] = wrote.size
        path, way = wrote.place.path, wrote.place.way
        if wrote.again or (wrote.place.in_place and self._stood(wrote.place, data)):
            return bool(self._look_for_pieces(data, path, way, first)), True
        found = self._look(data, path, way, first)
        if not _all_found(found):
            found += self._look_into(_streams(wrote, data[wrote.first - first :]), path, way, wrote.first)
        return bool(found), True

    def _stood(self, place: Place, data: bytes) -> bool:
        """Whether a file that is written in place stood there as it is: it is as it was when last seen,
        or a load opened it. What was read by address is not found in it: it is what an earlier save left."""
        before, place.sum = place.sum, zlib.crc32(data)
        return self.loads or place.sum == before

    def _in_database(self, wrote: Wrote) -> tuple[bool, bool]:
        """The same of a database. What stands in its write-ahead log only is not seen."""
        path, large = wrote.place.path, wrote.size > _MOST_DATABASE
        head = databases.read(path, 0, HEAD)
        page = page_size(head) if head is not None else 0
        first = wrote.first // page * page if large and page else 0
        length = wrote.size - first
        data = databases.read(path, first, length) if page and length + self._looked <= _MOST_BYTES else None
        if data is None:
            return False, False
        self._looked += length
        found: dict[Needle, Finding] = {}
        if BY_ADDRESS.hidden(self.connector):
            self._by_address(databases.joined(data, page), path)
        for hit in POOL.search(data):
            stays = databases.stays(data, hit.offset, len(hit.needle.data), page)
            moved = hit._replace(offset=hit.offset + first)
            found[hit.needle] = Finding(moved, path, Way.SQLITE, stays)
        if not _all_found(one.hit for one in found.values()):
            whole = databases.joined(data, page)
            for hit in POOL.search(whole) or (() if found else POOL.near(whole)):
                moved = hit._replace(offset=databases.place_of(hit.offset, page) + first)
                found.setdefault(hit.needle, Finding(moved, path, Way.SQLITE, False))
            ends, places = databases.seams(data, page) if not first else (b"", [])
            for hit in POOL.search(ends):
                number, within = divmod(hit.offset, databases.SEAM)
                moved = hit._replace(offset=places[number] + within)
                found.setdefault(hit.needle, Finding(moved, path, Way.SQLITE, False))
        if not first:
            _order_in_values(list(found.values()), data, page)
        self._find(list(found.values()))
        every = _all_found(one.hit for one in found.values())
        packed = not first and not every and self._in_values(data, page, path)
        return bool(found) or packed, not (large or os.path.exists(f"{path}-wal"))

    def _in_values(self, data: bytes, page: int, path: str) -> bool:
        """Whether KV was found compressed in the new values of a database."""
        found = False
        for place, value in databases.values(data, page) if WORTH else ():
            known = hash((path, len(value), zlib.crc32(value)))  # it may have been seen while it was written
            if known not in _values and len(_values) < _MOST_VALUES:
                _values.add(known)
                there = data[place : place + LENGTH]
                streams = [one._replace(place=place, packed=there) for one in Unpacker().streams(value)]
                found |= bool(self._look_into(streams, path, Way.SQLITE))
        return found

    def _in_extents(self, place: Place) -> tuple[bool, bool]:
        """The same of a large file in which most places were never written to."""
        found = False
        for first, data in _extents(place.path, _MOST_BYTES - self._looked):
            self._looked += len(data)
            found |= bool(self._look(data, place.path, place.way, first))
        return found, self._looked < _MOST_BYTES

    def _sockets(self, step: int, t: int, thread: int) -> None:
        peers: dict[str, list[Peer]] = {}
        for peer in self._peers.values():
            if not peer.name:
                continue  # a pair of sockets of the process's own: an event loop wakes itself
            peer.over()
            peers.setdefault(peer.name, []).append(peer)
        for name, count in self._unreachable.items():
            lost = Peer(name)
            lost.errors = count
            peers.setdefault(name, []).append(lost)
        for name, same in peers.items():
            amounts = sum(p.bytes for p in same), sum(p.calls for p in same), sum(p.errors for p in same)
            marks = 0 if any(peer.unseen for peer in same) else int(Flag.KEPT)
            self._write_left(Way.SOCKET, name, amounts, marks, step, t, thread)

    def _write_left(
        self, way: Way, target: str, amounts: tuple[int, int, int], marks: int, *rest: int
    ) -> None:
        """``amounts``: bytes, calls, errors; ``rest``: step, time, thread."""
        step, t, thread = rest
        head = pack_head(Kind.LEFT, Role.WORKER, way, self.connector, marks, thread)
        AGENT.add(LeftProcess(head, t, self.call, step, _target(target), *amounts))

    # --- what was found -------------------------------------------------------------------

    def _own(self) -> list[tuple[Op, list[Finding]]]:
        """What was found, operation by operation. Requests with the same beginning have the same KV there: a
        piece that stands amid another operation's, all of which was found, is that one's."""
        whole: list[tuple[Op, list[Finding]]] = []
        others: list[tuple[Op, list[Finding]]] = []
        for op, findings in self._found.values():
            exact = {one.hit.needle.number for one in findings if one.hit.needle.form == Form.VERBATIM}
            (whole if len(exact | op.found) == len(op.pieces) else others).append((op, findings))
        whole.sort(key=lambda one: _reach(one[1]), reverse=True)
        owners: dict[tuple[str, str], list[tuple[int, int, set[int]]]] = {}
        mine = []
        for number, (op, findings) in enumerate([*whole, *others]):
            own = [one for one in findings if not _another(op, one, owners.get((one.target, op.layer), ()))]
            if not {one.hit.needle.number for one in own} - op.found:
                continue
            mine.append((op, own))
            for target in {one.target for one in own} if number < len(whole) else ():
                places = [one.hit.offset for one in own if one.target == target]
                if max(places) - min(places) < op.bytes:  # else some of them stand in another's record
                    ends = min(places), max(places)
                    owners.setdefault((target, op.layer), []).append((*ends, op.some_slots))
        return mine

    def _say(self, op: Op, findings: list[Finding], t: int) -> None:
        exact = [one for one in findings if one.hit.needle.form == Form.VERBATIM]
        op.found.update(one.hit.needle.number for one in exact)
        target = (exact or findings)[-1].target
        if id(op) in self._refused:
            form = Form.REFUSED
        elif not exact and not op.found:
            form = findings[-1].hit.needle.form
        elif len(op.found) == len(op.pieces):
            form = Form.TURNED if op.turned else Form.VERBATIM
        else:
            zeroed = any(one.hit.zeroed for one in exact)
            op.room.update({one.target: self._sizes.get(one.target, op.bytes) for one in exact})
            form = Form.ZEROED if zeroed else Form.CUT if op.cut else Form.PARTLY
        if form not in _NOT_ALL:
            POOL.done(op)
        self._write_found(op, form, t, target, self.call)
        if form in (Form.VERBATIM, Form.TURNED):
            self._write_pieces(op, [one for one in exact if one.stays], t)

    def _write_found(self, op: Op, form: Form, t: int, target: str, by: int) -> None:
        marks = self._marks | (Flag.FIRST if op.turned is False else 0)
        head = pack_head(Kind.FOUND, Role.WORKER, form, op.connector, marks, AGENT.thread())
        text = text_of_touches(op.touches)
        pieces = len(op.pieces) << 32 | len(op.found)
        name = _target(target) if target else 0
        ident = _sets.id(text) if text else 0
        AGENT.add(KvFound(head, t, op.call, AGENT.id(op.layer), ident, pieces, by, name))

    def _write_pieces(self, op: Op, findings: list[Finding], t: int) -> None:
        """Of the two that stand farthest apart."""
        config = AGENT.config
        if config is None or not findings:
            return
        findings = _side_by_side(op, findings)
        for finding in (findings[0], *findings[1:][-1:]):
            place, data = finding.packed or (finding.hit.offset, finding.hit.needle.data)
            digest = int.from_bytes(hashlib.blake2b(data, key=config.salt, digest_size=8).digest(), "little")
            head = pack_head(Kind.PIECE, Role.WORKER, 0, op.connector, 0, AGENT.thread())
            name = _target(finding.target)
            AGENT.add(Piece(head, t, op.call, AGENT.id(op.layer), name, place, len(data), digest & _MASK))


def _streams(wrote: Wrote, data: bytes) -> list[Stream]:
    """What the compressed streams hold that stand in the bytes by which a file grew, or go on there: another
    thread may still write them when a call is over."""
    read, unpacker = wrote.place.packed or (0, Unpacker())
    if read != wrote.first:
        unpacker = Unpacker()
    streams = unpacker.streams(data)
    wrote.place.packed = (wrote.size, unpacker) if unpacker.open else None
    if unpacker.open and wrote.place not in _packing:
        _packing.append(wrote.place)
        for place in _packing[:-_MOST_PACKING]:
            place.packed = None
        del _packing[:-_MOST_PACKING]
    return streams


def _searching() -> bool:
    """Whether there is anything to look for."""
    return bool(len(POOL)) or BY_ADDRESS.on


def _order_of_heads(hit: Hit, data: bytes, at: int) -> None:
    """Looked at once of each operation. ``at``: where in ``data`` the piece stands."""
    op = hit.needle.op
    if op.turned is None and hit.needle.form == Form.VERBATIM:
        op.turned = turned(op, data, at)


def _order_in_values(findings: Sequence[Finding], data: bytes, page: int) -> None:
    """Of what was found in a database: a value's parts stand on pages anywhere."""
    values = None
    for one in findings:
        if one.hit.needle.op.turned is None and one.hit.needle.op.heads is not None:
            values = values or databases.Values(data, page)
            value = values.at(one.hit.offset)
            at = value.find(one.hit.needle.data)
            if at >= 0:
                _order_of_heads(one.hit, value, at)


def _all_found(hits: Iterable[Hit]) -> bool:
    """Whether of some operations every piece was found, and of no other one any: a few may stand as they are
    amid what is compressed."""
    counts = Counter(hit.needle.op for hit in hits if hit.needle.form == Form.VERBATIM)
    return bool(counts) and all(count == len(op.pieces) for op, count in counts.items())


def _reach(findings: list[Finding]) -> int:
    """Bytes between the two that stand farthest apart."""
    places = [one.hit.offset for one in findings]
    return max(places) - min(places)


def _side_by_side(op: Op, findings: list[Finding]) -> list[Finding]:
    """By their places, those that can stand in one record: the KV of another prompt may hold the same piece,
    as of a first layer that computes the same for the same token in the same place."""
    findings = sorted(findings, key=lambda one: (one.target, one.hit.offset))
    best: list[Finding] = []
    for at, first in enumerate(findings):
        near = [
            one
            for one in findings[at:]
            if one.target == first.target and one.hit.offset - first.hit.offset < op.bytes
        ]
        best = max(best, near, key=len)
    return best


def _another(op: Op, one: Finding, owners: Sequence[tuple[int, int, set[int]]]) -> bool:
    """Whether a piece stands amid what was found of other slots of the same layer."""
    at = one.hit.offset
    return any(low <= at <= high and not slots & op.some_slots for low, high, slots in owners)


def _target(name: str) -> int:
    return _targets.id(_shown(name))


def _removed_elsewhere(path: str) -> None:
    """A connector removed a file in a call that is not watched."""
    _write_removal(path, (clock(), 0, 0), Role.WORKER, 0)


def _write_removal(path: str, when: tuple[int, int, int], role: Role, connector: int) -> None:
    """``when``: time, call, step."""
    head = pack_head(Kind.LEFT, role, Way.FILE, connector, Flag.REPLACED, AGENT.thread())
    AGENT.add(LeftProcess(head, *when, _target(path), 0, 1, 0))


paths.ON_REMOVAL.append(_removed_elsewhere)


def _errors(wrote: Wrote) -> int:
    """Whether a file is not there, or a database's transaction is open."""
    if wrote.size < 0:
        return 1
    return int(wrote.place.way == Way.SQLITE and os.path.exists(f"{wrote.place.path}-journal"))


def _extents(path: str, most: int) -> Iterator[tuple[int, bytes]]:
    """(place, bytes) of the parts of a sparse file that hold data, in all up to ``most`` bytes."""
    try:
        file = os.open(path, _READING)
    except OSError:
        return
    end = 0
    try:
        while most > 0:
            first = os.lseek(file, end, os.SEEK_DATA)
            end = os.lseek(file, first, os.SEEK_HOLE)
            data = os.pread(file, min(end - first, most), first)
            most -= len(data)
            yield first, data
    except (OSError, AttributeError):
        return  # there is no more data, or no way to ask
    finally:
        os.close(file)


def _read(path: str, first: int, length: int) -> bytes | None:
    try:
        file = os.open(path, _READING)
    except OSError:
        return None
    try:
        return os.pread(file, length, first)
    except OSError:
        return None
    finally:
        os.close(file)


_home = ""


def _shown(path: str) -> str:
    """A path as it is recorded: ``~`` for the user's home, no secrets."""
    global _home
    if not _home:
        try:
            _home = str(Path.home()).rstrip(os.sep) or os.sep
        except RuntimeError:
            _home = os.sep
    if len(_home) > 1 and path.startswith(_home + os.sep):
        path = "~" + path[len(_home) :]
    return mask_text(path)
