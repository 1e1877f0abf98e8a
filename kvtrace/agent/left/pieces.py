"""Short pieces of KV that a connector read, kept to be looked for in what leaves the process.

Of each operation that reads KV a few pieces of some bytes are copied out of the KV tensor at that moment
(host memory only): the first and the last, and others taken at random. Found byte for byte in a file or in
what is sent, they prove that this KV left; the first of an operation without its last, that something was
cut. Pieces as numbers of a narrower type are looked for as well. A connector that compresses in a way that is
not known (``unpack.py``) gives nothing to find: that is no fault.

A search passes over the bytes twice with numpy, whatever the number of pieces: tables say which pairs of
bytes begin one, and which come next. What waits to be found is bounded; the oldest are given up, and a
record says so.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtrace.agent.watch.late import Late
from kvtrace.agent.watch.layout import INNER, Layout
from kvtrace.agent.watch.touch import Touch
from kvtrace.trace.format import Form

if TYPE_CHECKING:
    import numpy as np
else:
    np = Late("numpy")

LENGTH = 32
"""Bytes of a piece."""
_LEAST = 16
_LEAST_VALUES = 6
"""Different bytes in a piece: fewer stand in too many other places."""
_MANY_SLOTS = 64
_MOST_PIECES = 16
_MOST_TOUCHES = 4
_MOST_WAITING = 8192
_BLIND = 4096
"""Operations of which nothing was ever found, after which no more are kept."""
_KEY = 8
_SHORT = 0.75
"""Of what was read: less can't hold it, but for a connector that compresses well."""
_NEAR = 0.01
"""Of the greatest number: what eight bits may change."""
_NEAR_OPS = 8
_NEAR_TRIES = 8
_LEAST_NEAR, _MOST_NEAR = 256, 8 << 20
"""Bytes in which near numbers are looked for."""

_random = random.Random()  # the user's own generator stays as it is


class Needle(NamedTuple):
    """``data`` is piece ``number`` of ``op`` in the form ``form``. ``key_at``: where its two key bytes
    are."""

    op: Op
    number: int
    form: Form
    data: bytes
    key_at: int


class Hit(NamedTuple):
    needle: Needle
    offset: int
    zeroed: bool
    """Zeros stand where the end of the same run of elements belongs."""


class Op:
    """What one operation read. ``ends``: piece -> (piece at the end of the same run, bytes between both)."""

    __slots__ = (
        "bytes", "call", "connector", "ends", "floats", "found", "heads", "in_file", "layer", "needles",
        "order", "pieces", "room", "sent_whole", "touches", "turned",
    )  # fmt: skip

    def __init__(self, call: int, connector: int, layer: str) -> None:
        self.call, self.connector, self.layer = call, connector, layer
        self.touches: list[Touch] = []
        self.pieces: list[bytes] = []
        self.bytes = 0
        """That were read, at most."""
        self.floats = False
        """Whether its elements are of four bytes, and so float32."""
        self.order: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        """Where each piece lies in what was read: slot by slot, and block by block as it is in memory."""
        self.ends: dict[int, tuple[int, int]] = {}
        self.heads: tuple[bytes, bytes] | None = None
        """Of the first slot, a piece of its first head, and the same of its last."""
        self.turned: bool | None = None
        """Whether the last head was found before the first; None where that was not seen."""
        self.found: set[int] = set()
        self.in_file = False
        """Whether any of it was found elsewhere than in what was sent."""
        self.sent_whole = False
        """Whether all of its pieces stood in one message that was answered."""
        self.needles: list[Needle] = []
        self.room: dict[str, int] = {}
        """Where some of it was found -> bytes that stand there, as far as that is known."""

    @property
    def some_slots(self) -> set[int]:
        """Of each of its accesses the first slot and the last."""
        return {int(touch.slots[at]) for touch in self.touches if len(touch.slots) for at in (0, -1)}

    @property
    def cut(self) -> bool:
        """Whether all that was not found lies behind all that was; or the begin is in what can't hold it
        all, and no more of it than fits in there."""
        room = sum(self.room.values()) / self.bytes if self.whole and self.bytes else 1
        short = room < _SHORT and len(self.found) <= (room + 1 - _SHORT) * len(self.pieces)
        for way in (0, 1):
            places = sorted((order[way], number in self.found) for number, order in enumerate(self.order))
            there = [found for _, found in places]
            in_order = there == sorted(there, reverse=True)
            if there[0] and not all(there) and (in_order or short):
                return True
        return False

    @property
    def whole(self) -> bool:
        """Whether all of each of its slots was read."""
        return all(touch.part is None for touch in self.touches)


class Pool:
    """All that waits to be found. Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ops: OrderedDict[int, Op] = OrderedDict()
        self._by_key: dict[bytes, list[Needle]] = {}
        self._counts: Any = None
        self._begins: Any = None
        self._next: tuple[Any, ...] = ()
        """Which pairs of bytes come second, and third, in a piece that waits, or did while others do."""
        self.ever_found = False
        self.off = False
        self._missed = 0
        self._near_missed = 0

    def forget(self) -> None:
        """A spool begins: calls of an earlier one are none of its own. In a forked child a lock that another
        thread held stays held: it gets a new one."""
        self._lock = threading.Lock()
        with self._lock:
            for op in list(self._ops.values()):
                self._remove(op)
            self.ever_found = self.off = False
            self._missed = self._near_missed = 0

    def __len__(self) -> int:
        return len(self._ops)

    def take(
        self,
        op: Op,
        address: int,
        layout: Layout,
        touches: list[Touch],
        heads: tuple[int, int] | None = None,
    ) -> list[Op] | None:
        """Keep pieces of what was read just now; those that are given up for it. None where nothing could
        be kept.

        Args:
            address: of the layer's first byte, in host memory.
            heads: how many heads a slot has, and bytes from one to the next.
        """
        if self.off:
            return None
        if heads is not None and op.heads is None:
            op.heads = _of_heads(address, layout, touches[0], heads)
        places = _places(layout, touches)
        added = 0
        with self._lock:
            for first, last, order in places:
                at = len(op.pieces)
                if at >= _MOST_PIECES:
                    break
                data = ctypes.string_at(address + first, _length(layout))
                if not _telling(data):
                    continue
                self._add(op, data, layout)
                op.order.append(((len(op.touches), order[0], first), (len(op.touches), order[1], first)))
                added += 1
                end = ctypes.string_at(address + last, len(data)) if last != first else b""
                if _telling(end):
                    self._add(op, end, layout)
                    op.order.append(((len(op.touches), order[0], last), (len(op.touches), order[1], last)))
                    op.ends[at] = (at + 1, last - first)
            op.floats = layout.itemsize == 4
            op.bytes += sum(len(touch.slots) for touch in touches) * _slot_bytes(layout)
            op.touches.extend(touches)
            if not op.pieces:
                return None
            self._ops[id(op)] = op
            given_up = []
            while len(self._ops) > _MOST_WAITING:
                given_up.append(self._remove(next(iter(self._ops.values()))))
            self._missed += len(given_up)
            self.off = not self.ever_found and self._missed > _BLIND
        return given_up if added or len(op.pieces) >= _MOST_PIECES else None

    def _add(self, op: Op, data: bytes, layout: Layout) -> None:
        if self._counts is None:
            self._counts, self._begins = np.zeros(1 << 16, dtype=np.int32), np.zeros(1 << 16, dtype=bool)
            self._next = np.zeros(1 << 16, dtype=bool), np.zeros(1 << 16, dtype=bool)
        number = len(op.pieces)
        op.pieces.append(data)
        needles = [Needle(op, number, Form.VERBATIM, data, 0)]
        if number < 2 and layout.itemsize == 4:
            needles += [Needle(op, number, form, other, at) for form, other, at in _narrower(data)]
        for needle in needles:
            key = _number(needle)
            if key:
                op.needles.append(needle)
                self._by_key.setdefault(needle.data[:_KEY], []).append(needle)
                self._counts[key] += 1
                self._begins[key] = True
                for behind, table in enumerate(self._next, 1):
                    table[_number(needle, 2 * behind)] = True

    def _remove(self, op: Op) -> Op:
        self._ops.pop(id(op), None)
        for needle in op.needles:
            same = self._by_key.get(needle.data[:_KEY], [])
            if needle in same:
                same.remove(needle)
            if not same:
                self._by_key.pop(needle.data[:_KEY], None)
            key = _number(needle)
            self._counts[key] -= 1
            self._begins[key] = self._counts[key] > 0
        op.needles = []
        for table in self._next if not self._ops else ():
            table[:] = False
        return op

    def done(self, op: Op) -> None:
        """It is not looked for any more."""
        with self._lock:
            if id(op) in self._ops:
                self._remove(op)

    def search(self, data: bytes) -> list[Hit]:
        """Every piece that stands in ``data``, at the first place where it does."""
        with self._lock:
            if not self._ops or len(data) < _KEY:
                return []
            hits: dict[tuple[int, int, Form], Hit] = {}
            for at in self._candidates(data):
                for begin in (at, at - 2):
                    for needle in self._by_key.get(data[begin : begin + _KEY], ()) if begin >= 0 else ():
                        known = (id(needle.op), needle.number, needle.form)
                        if known not in hits and data.startswith(needle.data, begin):
                            hits[known] = Hit(needle, begin, _zeroed(needle, data, begin))
                            self.ever_found = True
            return list(hits.values())

    def near(self, data: bytes) -> list[Hit]:
        """The same with numbers that are nearly those of a piece: they went through fewer bits and back. Only
        of a connector of which nothing is found byte for byte, and not for long without success."""
        with self._lock:
            waiting = list(self._ops.values())
            if (
                self.ever_found
                or self._near_missed >= _NEAR_TRIES
                or not _LEAST_NEAR <= len(data) <= _MOST_NEAR
            ):
                return []
            some = waiting[:_NEAR_OPS] + waiting[_NEAR_OPS:][-_NEAR_OPS:]
            hits = [hit for op in some if op.floats and (hit := _nearly(op, data)) is not None]
            self._near_missed = 0 if hits or not some else self._near_missed + 1
            return hits

    def _candidates(self, data: bytes) -> list[int]:
        found: list[int] = []
        for odd in (0, 1):
            pairs = np.frombuffer(data, dtype="<u2", count=(len(data) - odd) // 2, offset=odd)
            at = np.flatnonzero(self._begins[pairs])
            for behind, table in enumerate(self._next, 1):
                at = at[at < len(pairs) - behind]
                at = at[table[pairs[at + behind]]]
            found.extend((at * 2 + odd).tolist())
        return found


POOL = Pool()


def _nearly(op: Op, data: bytes) -> Hit | None:
    values = np.frombuffer(op.pieces[0], dtype="<f4")
    most = max(float(np.abs(np.frombuffer(piece, dtype="<f4")).max()) for piece in op.pieces)
    if not np.isfinite(most):
        return None
    with np.errstate(all="ignore"):
        for odd in range(4):
            words = np.frombuffer(data, dtype="<f4", count=(len(data) - odd) // 4, offset=odd)
            at = np.flatnonzero(np.abs(words[: len(words) - len(values) + 1] - values[0]) <= most * _NEAR)
            for number in range(1, len(values)):
                at = at[np.abs(words[at + number] - values[number]) <= most * _NEAR]
            if len(at):
                needle = Needle(op, 0, Form.ALTERED, op.pieces[0], 0)
                return Hit(needle, int(at[0]) * 4 + odd, False)
    return None


def _number(needle: Needle, behind: int = 0) -> int:
    """Of two bytes of its key."""
    at = needle.key_at + behind
    return int.from_bytes(needle.data[at : at + 2], "little")


def _telling(data: bytes) -> bool:
    return len(data) >= _LEAST and len(set(data)) >= _LEAST_VALUES


def _zeroed(needle: Needle, data: bytes, begin: int) -> bool:
    end = needle.op.ends.get(needle.number)
    if end is None or needle.form != Form.VERBATIM:
        return False
    there = data[begin + end[1] : begin + end[1] + len(needle.data)]
    return len(there) == len(needle.data) and not any(there)


def _length(layout: Layout) -> int:
    return min(LENGTH, layout.dims[-1].size * layout.itemsize)


def _slot_bytes(layout: Layout) -> int:
    size = layout.itemsize
    for part in layout.inner_shape:
        size *= part
    return size


def _places(layout: Layout, touches: list[Touch]) -> list[tuple[int, int, tuple[int, int]]]:
    """Where pieces are taken: bytes from the layer's first to the begin of a run of elements, and to the last
    piece of the same run; how many slots, and how many blocks, were read before. The very first of what was
    touched, the very last, and some at random."""
    run = layout.dims[-1]
    if run.part != INNER or run.stride != layout.itemsize:
        return []
    after = run.size * layout.itemsize - _length(layout)
    found: list[tuple[int, int, tuple[int, int]]] = []
    size = layout.dims[layout.slot_at].size
    whole = [touch for touch in touches if len(touch.slots)]
    if len(whole) > _MOST_TOUCHES:
        whole = [whole[0], *_random.sample(whole[1:-1], _MOST_TOUCHES - 2), whole[-1]]
    for at, touch in enumerate(whole):
        count = len(touch.slots)
        wanted = [_random.randrange(count) for _ in range(2 if count >= _MANY_SLOTS else 1)]
        wanted += [0] if not at else []
        wanted += [count - 1] if at == len(whole) - 1 else []
        for one in wanted:
            inner = _inner(layout, touch, one == 0, one == count - 1)
            if inner is not None:
                begin = _of_slot(layout, int(touch.slots[one])) + inner
                found.append((begin, begin + after, (at << 40 | one, at << 40 | one // size)))
    # the last one first, then the first: where only some are kept, it is these
    return found[-1:] + found[:-1]


def _of_heads(
    address: int, layout: Layout, touch: Touch, heads: tuple[int, int]
) -> tuple[bytes, bytes] | None:
    run = layout.dims[-1]
    if touch.part is not None or not len(touch.slots) or run.part != INNER or run.stride != layout.itemsize:
        return None
    count, stride = heads
    first = address + _of_slot(layout, int(touch.slots[0]))
    one, other = (ctypes.string_at(first + at, _length(layout)) for at in (0, (count - 1) * stride))
    return (one, other) if _telling(one) and _telling(other) and one != other else None


def turned(op: Op, data: bytes, begin: int) -> bool | None:
    """Whether the heads of a slot stand in ``data`` from the last one to the first, around a place where some
    of ``op`` was found; None where both do not stand there, or one of them twice."""
    if op.heads is None:
        return None
    low, high = max(0, begin - op.bytes), begin + op.bytes
    places = []
    for piece in op.heads:
        at = data.find(piece, low, high)
        if at < 0 or data.find(piece, at + 1, high) >= 0:
            return None
        places.append(at)
    return places[1] < places[0]


def _of_slot(layout: Layout, slot: int) -> int:
    block, offset = divmod(slot, layout.dims[layout.slot_at].size)
    return block * layout.dims[layout.block_at].stride + offset * layout.dims[layout.slot_at].stride


def _inner(layout: Layout, touch: Touch, first: bool, last: bool) -> int | None:
    """Bytes from a slot's first element to a run of elements that was touched in full."""
    dims = [layout.dims[at] for at in layout.inner_at[:-1]]
    sizes = [dim.size for dim in dims]
    total = 1
    for size in sizes:
        total *= size
    if touch.part is None:
        choice = 0 if first else total - 1 if last else _random.randrange(total)
    else:
        full = np.flatnonzero(touch.part.all(axis=-1).ravel())
        if not len(full):
            return None
        choice = int(full[0] if first else full[-1] if last else full[_random.randrange(len(full))])
    offset = 0
    for dim in reversed(dims):
        choice, digit = divmod(choice, dim.size)
        offset += digit * dim.stride
    return offset


def _narrower(data: bytes) -> list[tuple[Form, bytes, int]]:
    """A piece of float32 as half precision and bfloat16, and back again: (form, bytes, where its key is)."""
    values = np.frombuffer(data, dtype="<f4")
    if not np.isfinite(values).all() or np.abs(values).max() > 60000:
        return []
    half = values.astype("<f2")
    bits = values.view("<u4").astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    back = (rounded.astype("<u4") << 16).astype("<u4")
    forms = [
        (Form.CAST, half.tobytes(), 0),
        (Form.CAST, rounded.tobytes(), 0),
        (Form.ALTERED, half.astype("<f4").tobytes(), 2),
        (Form.ALTERED, back.tobytes(), 2),
    ]
    return [one for one in forms if one[1] != data]
