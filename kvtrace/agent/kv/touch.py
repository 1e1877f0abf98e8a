"""From the memory that an operation reads or writes to the exact set of KV slots.

Memory is spans of bytes. Those of one call are joined and cut along the dimensions of the layer's
:class:`~kvtrace.agent.kv.layout.Layout`, the outermost first: then each piece lies in one slot, and a slot of
which every byte is covered was touched in full. Work is done on arrays of spans, never one by one; where they
are too many the answer is None, for "not known".
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from kvtrace.agent.kv.late import Array, Mask, np
from kvtrace.agent.kv.layout import BLOCK, INNER, SLOT, Layout

_MOST_SPANS = 1 << 21


class Pattern(NamedTuple):
    """Memory in bytes: ``bases`` of shape (k,), counted from the layer's first byte, and from each base on
    ``dims``, pairs of (size, stride)."""

    bases: Array
    dims: tuple[tuple[int, int], ...]
    itemsize: int


class Spans:
    """Bytes of a layer's memory, from ``begins`` to ``ends``; some may lie beside its own."""

    __slots__ = ("begins", "ends")

    def __init__(self, begins: Array, ends: Array) -> None:
        self.begins, self.ends = begins, ends


class TouchedSlots(NamedTuple):
    """Slots touched in full, and those touched in part; sorted, no slot twice or in both. ``copied``: so many
    were, parts of slots and those that were touched again added up."""

    full: Array
    partly: Array
    copied: float


def spans_of(pattern: Pattern) -> Spans | None:
    begins, length = pattern.bases, pattern.itemsize
    if any(size == 0 for size, _ in pattern.dims):
        return Spans(begins[:0], begins[:0])
    moving = [dim for dim in pattern.dims if dim[0] > 1 and dim[1]]
    for size, stride in sorted(moving, key=lambda dim: dim[1]):
        if stride <= length:
            length += (size - 1) * stride
        elif len(begins) * size > _MOST_SPANS:
            return None
        else:
            begins = (begins[:, None] + np.arange(size, dtype=np.int64) * stride).ravel()
    return Spans(begins, begins + length)


def slots_of(layout: Layout, touches: Sequence[Spans]) -> TouchedSlots | None:
    """The slots that the operations of a call touched."""
    raw = Spans(
        np.concatenate([one.begins for one in touches]), np.concatenate([one.ends for one in touches])
    )
    joined = _joined(raw)
    pieces = _cut(layout, joined)
    if pieces is None:
        return None
    covered = np.bincount(pieces[0], weights=pieces[1])
    slots = np.flatnonzero(covered)
    whole = covered[slots] == layout.slot_bytes
    again = (raw.ends - raw.begins).sum() != (joined.ends - joined.begins).sum()
    every = _cut(layout, raw) if again else pieces
    if every is None:
        return None
    return TouchedSlots(slots[whole], slots[~whole], int(every[1].sum()) / layout.slot_bytes)


def _joined(spans: Spans) -> Spans:
    """The same bytes, ascending, none of them twice."""
    order = np.argsort(spans.begins, kind="stable")
    begins, ends = spans.begins[order], spans.ends[order]
    if not len(begins):
        return spans
    reach = np.maximum.accumulate(ends)
    first = np.concatenate([[True], begins[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return Spans(begins[first], reach[last])


def _cut(layout: Layout, spans: Spans) -> tuple[Array, Array] | None:
    """(slot, bytes) of each piece of the spans that lies in one. Where heads lie before slots a whole block
    is not cut: its pieces would be as many as it has slots times heads."""
    outer = layout.dims[0]
    uncut: list[Array] = []
    begins = np.maximum(spans.begins, 0)
    ends = np.minimum(spans.ends, outer.size * outer.stride)
    slots = np.zeros(len(begins), dtype=np.int64)
    slots, begins, ends = _some(begins < ends, slots, begins, ends)
    for at, dim in enumerate(layout.dims):
        firsts = begins // dim.stride
        counts = (ends - 1) // dim.stride - firsts + 1
        total = int(counts.sum())
        if total > _MOST_SPANS:
            return None
        if total > len(counts):
            slots, begins, ends = (np.repeat(one, counts) for one in (slots, begins, ends))
            firsts = np.repeat(firsts - np.cumsum(counts) + counts, counts) + np.arange(total, dtype=np.int64)
        slots = slots + firsts * {BLOCK: layout.in_block, SLOT: 1}.get(dim.part, 0)
        begins = np.maximum(begins - firsts * dim.stride, 0)
        ends = np.minimum(ends - firsts * dim.stride, dim.stride)
        slots, begins, ends = _some(firsts < dim.size, slots, begins, ends)
        below = layout.dims[at + 1 :]
        if dim.part == BLOCK and len(below) > 1 and below[0].part == INNER:
            whole = (begins == 0) & (ends >= below[0].size * below[0].stride)
            if whole.sum() * layout.in_block > _MOST_SPANS:
                return None
            uncut.append((slots[whole, None] + np.arange(layout.in_block)).ravel())
            held = layout.cell * prod(one.size for one in below if one.part == INNER)
            slots, begins, ends = _some(~whole, slots, begins, ends)
    ends = np.minimum(ends, layout.cell)
    slots, begins, ends = _some(begins < ends, slots, begins, ends)
    if not uncut:
        return slots, ends - begins
    sizes = np.concatenate([np.full(len(uncut[0]), held), ends - begins])
    return np.concatenate([*uncut, slots]), sizes


def _some(which: Mask, *arrays: Array) -> tuple[Array, ...]:
    return arrays if which.all() else tuple(array[which] for array in arrays)


def completing(layout: Layout, own: Sequence[Spans], others: Sequence[Spans]) -> TouchedSlots | None:
    """What ``own`` touched; in full also those slots of which it is what ``others`` left out."""
    mine, before, every = (slots_of(layout, some) for some in (own, others, [*others, *own]))
    if mine is None or before is None or every is None:
        return None
    whole = np.intersect1d(mine.partly, np.setdiff1d(every.full, before.full))
    return mine._replace(full=np.union1d(mine.full, whole), partly=np.setdiff1d(mine.partly, whole))


def text_of(slots: TouchedSlots) -> str:
    """``first+count`` runs joined by commas, then after a ``/`` those of the slots touched in part."""
    parts = [_runs(slots.full)]
    if len(slots.partly):
        parts.append(_runs(slots.partly))
    return "/".join(parts)


def _runs(slots: Array) -> str:
    if not len(slots):
        return ""
    ends = np.flatnonzero(slots[1:] != slots[:-1] + 1)
    firsts = slots[np.concatenate(([0], ends + 1))]
    counts = np.diff(np.concatenate(([-1], ends, [len(slots) - 1])))
    return ",".join(
        [f"{first}+{count}" for first, count in zip(firsts.tolist(), counts.tolist(), strict=True)]
    )
