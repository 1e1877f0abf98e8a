"""From the memory that an operation reads or writes to the exact set of KV slots.

Memory is given as places from which one pattern goes out: ``bases + sum(i_k * stride_k)``. A view is one base
and its sizes and strides; an index has a base for each of its values. Each place is taken apart into one
digit for each dimension of the layer's :class:`~kvtrace.agent.kv.layout.Layout`; the digits of the
dimensions for blocks and slots name the slot, the others the part of it. Work is done on arrays of bases,
never element by element; where a pattern does not go along the layer's dimensions it is cut at their ends,
and what can't be said exactly is None, for "not known".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from kvtrace.agent.kv.late import Array, Mask, np
from kvtrace.agent.kv.layout import Layout

_MOST_BASES = 1 << 19
"""Places of a pattern that are looked at one by one; more are not known."""
_MOST_REGIONS = 64
_MOST_PARTS = 62


class Pattern(NamedTuple):
    """Memory in bytes: ``bases`` of shape (k,), counted from the layer's first byte, and from each base on
    ``dims``, pairs of (size, stride)."""

    bases: Array
    dims: tuple[tuple[int, int], ...]
    itemsize: int


class LayerTouch:
    """Slots of which the same part was touched. ``slots``: their numbers, of shape (n,), not sorted;
    ``part``: which elements of a slot, None for all of them."""

    __slots__ = ("part", "slots")

    def __init__(self, slots: Array, part: Mask | None) -> None:
        self.slots, self.part = slots, part

    @property
    def amount(self) -> float:
        """How many slots that is, parts added up."""
        return len(self.slots) * (1.0 if self.part is None else float(self.part.mean()))


class TouchedSlots(NamedTuple):
    """Slots touched in full, and those touched in part; sorted, no slot twice or in both."""

    full: Array
    partly: Array


def touched(layout: Layout, pattern: Pattern) -> list[LayerTouch] | None:
    """Which slots of a layer a pattern touches; [] where it lies beside them, None where it can't be said."""
    bases, dims, itemsize = pattern
    if not len(bases) or any(size == 0 for size, _ in dims):
        return []
    bytewise = itemsize != layout.itemsize
    if bytewise:
        layout, dims = layout.of_bytes(), _joined((*dims, (itemsize, 1)))
    moving = _by_stride(*(dim for dim in dims if dim[0] > 1 and dim[1]))
    regions: list[_Region] = []
    if not _cut(layout, _Region(bases, [None] * len(layout.dims)), moving, regions):
        return None
    found: list[LayerTouch] = []
    for region in regions:
        found.extend(_named(layout, region, bytewise))
    return found


# --- cutting a pattern at the ends of the layer's dimensions --------------------------------------------


class _Region(NamedTuple):
    """Bases, and for each of the layer's dimensions the steps that go out from each (None: none)."""

    bases: Array
    steps: list[Array | None]


def _cut(layout: Layout, region: _Region, dims: tuple[tuple[int, int], ...], regions: list[_Region]) -> bool:
    """Put the regions of a pattern into ``regions``; False where there is no end of them."""
    if not dims:
        whole = _settled(layout, region)
        if whole is not None:
            regions.append(whole)
        return whole is not None and len(regions) <= _MOST_REGIONS
    (size, stride), rest = dims[0], dims[1:]
    at = next((at for at, dim in enumerate(layout.dims) if dim.stride <= stride), None)
    if at is not None and stride % layout.dims[at].stride == 0:
        by = stride // layout.dims[at].stride
        digits = _digits(layout, region.bases, at)
        step = region.steps[at]
        capacity = layout.capacities[at] if at else 1 << 62
        most = int(digits.max()) + (0 if step is None else int(step.max())) + (size - 1) * by
        if most < capacity:
            own = np.arange(size, dtype=np.int64) * by
            if step is not None:
                own = np.unique(step[:, None] + own)
            return _cut(layout, _with(region, at, own), rest, regions)
        if step is None and capacity and capacity % by == 0 and int(digits.min()) == int(digits.max()):
            return all(
                _cut(layout, _Region(region.bases + start, region.steps), _by_stride(*inner, *rest), regions)
                for start, inner in _rows(size, stride, int(digits[0]), by, capacity)
            )
    if len(region.bases) * size > _MOST_BASES:
        return False
    spread = (region.bases[:, None] + np.arange(size, dtype=np.int64) * stride).ravel()
    return _cut(layout, _Region(spread, region.steps), rest, regions)


def _joined(dims: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """Dimensions that follow each other in memory as one: bytes of the same element stay together."""
    found: list[tuple[int, int]] = []
    for size, stride in _by_stride(*(dim for dim in dims if dim[0] > 1)):
        if found and stride == found[-1][0] * found[-1][1]:
            found[-1] = (found[-1][0] * size, found[-1][1])
        else:
            found.append((size, stride))
    return tuple(found)


def _by_stride(*dims: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(dims, key=lambda dim: dim[1]))


def _settled(layout: Layout, region: _Region) -> _Region | None:
    """No step may leave its dimension; bases may have been spread after it was looked at. Those that do
    become bases of their own, None where these are too many."""
    for at in range(len(layout.dims) - 1, 0, -1):
        step = region.steps[at]
        if step is None:
            continue
        if int(_digits(layout, region.bases, at).max()) + int(step.max()) >= layout.capacities[at]:
            if len(region.bases) * len(step) > _MOST_BASES:
                return None
            spread = (region.bases[:, None] + step * layout.dims[at].stride).ravel()
            steps = [*region.steps[:at], None, *region.steps[at + 1 :]]
            return _settled(layout, _Region(spread, steps))
    return region


def _rows(
    size: int, stride: int, digit: int, by: int, capacity: int
) -> Iterable[tuple[int, tuple[tuple[int, int], ...]]]:
    """A run that goes past the end of its dimension: (start, dims) of its head, whole rows and tail."""
    row = capacity // by
    head = 0 if digit < by else min(size, -(-(capacity - digit) // by))
    if head:
        yield 0, ((head, stride),)
    whole, tail = divmod(size - head, row)
    if whole:
        yield head * stride, ((row, stride), (whole, row * stride))
    if tail:
        yield (head + whole * row) * stride, ((tail, stride),)


def _with(region: _Region, at: int, steps: Array) -> _Region:
    return _Region(region.bases, [*region.steps[:at], steps, *region.steps[at + 1 :]])


def _digits(layout: Layout, bases: Array, at: int) -> Array:
    """The digit of each base in one dimension: below 0 or at least its size beside the layer."""
    if at:
        bases = bases % layout.dims[at - 1].stride
    digits: Array = bases // layout.dims[at].stride
    return digits


# --- naming slots and parts -----------------------------------------------------------------------------


def _named(layout: Layout, region: _Region, bytewise: bool) -> list[LayerTouch]:
    digits = [_digits(layout, region.bases, at) for at in range(len(layout.dims))]
    within = region.bases % layout.dims[-1].stride
    if layout.dims[-1].stride > layout.itemsize and (within >= layout.itemsize).any():
        keep = within < layout.itemsize  # between two elements of the innermost dimension
        digits = [row[keep] for row in digits]
    found = []
    for rows, part in _by_part(layout, region, digits, bytewise):
        block = _reached(layout, region, layout.block_at, digits[layout.block_at][rows])
        slot = _reached(layout, region, layout.slot_at, digits[layout.slot_at][rows])
        slots = block[:, :, None] * layout.dims[layout.slot_at].size + slot[:, None, :]
        there = (block >= 0)[:, :, None] & (slot >= 0)[:, None, :]
        slots = slots.ravel() if there.all() else slots[there]
        if len(slots):
            found.append(LayerTouch(slots, part))
    return found


def _reached(layout: Layout, region: _Region, at: int, digits: Array) -> Array:
    """Digits in one dimension that are reached from each base, (bases, steps); -1 beside the layer."""
    steps = region.steps[at]
    reached = digits[:, None] if steps is None else digits[:, None] + steps
    return np.where((reached >= 0) & (reached < layout.dims[at].size), reached, -1)


def _by_part(
    layout: Layout, region: _Region, digits: list[Array], bytewise: bool
) -> Iterable[tuple[Any, Mask | None]]:
    """Groups of bases that touch the same part of their slots: (which bases, the part)."""
    varying = [at for at in layout.inner_at if len(digits[at]) and digits[at].min() != digits[at].max()]
    if not varying:
        mark = _part(layout, region, [int(digits[at][0]) if len(digits[at]) else 0 for at in layout.inner_at],
                     bytewise)  # fmt: skip
        if mark is not _BESIDE:
            yield slice(None), mark
        return
    inner = np.stack([digits[at] for at in layout.inner_at])
    kinds, which = np.unique(inner, axis=1, return_inverse=True)
    which = which.ravel()
    order = np.argsort(which, kind="stable")
    ends = np.searchsorted(which[order], np.arange(kinds.shape[1] + 1))
    for number in range(kinds.shape[1]):
        mark = _part(layout, region, kinds[:, number].tolist(), bytewise)
        if mark is not _BESIDE:
            yield order[ends[number] : ends[number + 1]], mark


_BESIDE: Any = object()


def _part(layout: Layout, region: _Region, digits: Sequence[int], bytewise: bool) -> Any:
    """The part of a slot that is reached from one base: a mask, None for all of it, _BESIDE for nothing."""
    reached = []
    for at, digit in zip(layout.inner_at, digits, strict=True):
        steps, size = region.steps[at], layout.dims[at].size
        own = np.array([digit]) if steps is None else digit + steps
        own = own[(own >= 0) & (own < size)]
        if not len(own):
            return _BESIDE
        reached.append(own)
    if all(len(own) == layout.dims[at].size for own, at in zip(reached, layout.inner_at, strict=True)):
        return None
    mask = np.zeros(layout.inner_shape, dtype=bool)
    mask[np.ix_(*reached)] = True
    return mask.all(axis=-1) if bytewise else mask  # an element of which some bytes are missing is not there


# --- putting the operations of a call together ----------------------------------------------------------


def together(touches: Sequence[LayerTouch]) -> TouchedSlots | None:
    """The slots that several operations touched: in full where their parts add up to all of it. None where
    there are too many different parts."""
    full = _sorted([touch.slots for touch in touches if touch.part is None])
    parts: dict[bytes, list[LayerTouch]] = {}
    for touch in touches:
        if touch.part is not None:
            parts.setdefault(touch.slots.tobytes(), []).append(touch)
    # Of the same slots first: K, then V; head after head.
    masks: dict[bytes, tuple[Mask, list[Array]]] = {}
    more: list[Array] = []
    for group in parts.values():
        mask = np.logical_or.reduce([touch.part for touch in group if touch.part is not None])
        if mask.all():
            more.append(group[0].slots)
        else:
            masks.setdefault(mask.tobytes(), (mask, []))[1].append(group[0].slots)
    if more:
        full = _sorted([full, *more])
    if len(masks) > _MOST_PARTS:
        return None
    every = _sorted([slots for _, arrays in masks.values() for slots in arrays])
    if len(masks) > 1:
        bits = np.zeros(len(every), dtype=np.int64)
        for number, (_, arrays) in enumerate(masks.values()):
            bits[np.searchsorted(every, _sorted(arrays))] |= 1 << number
        each = [mask for mask, _ in masks.values()]
        for combined in np.unique(bits).tolist():
            own = [mask for number, mask in enumerate(each) if combined >> number & 1]
            if np.logical_or.reduce(own).all():
                full = _sorted([full, every[bits == combined]])
    return TouchedSlots(full, np.setdiff1d(every, full, assume_unique=True))


def completing(own: Sequence[LayerTouch], others: Sequence[LayerTouch]) -> TouchedSlots | None:
    """What ``own`` touched; in full also those slots of which it is what ``others`` left out."""
    mine, before, every = together(own), together(others), together([*others, *own])
    if mine is None or before is None or every is None:
        return None
    whole = np.intersect1d(mine.partly, np.setdiff1d(every.full, before.full))
    return TouchedSlots(_sorted([mine.full, whole]), np.setdiff1d(mine.partly, whole))


def _sorted(arrays: list[Array]) -> Array:
    if not arrays:
        return np.empty(0, dtype=np.int64)
    joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    if len(joined) > 1 and not (joined[1:] > joined[:-1]).all():
        joined = np.unique(joined)
    return joined


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
