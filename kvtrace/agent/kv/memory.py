"""What native code copies: memory named by address, or KV slots named by number.

Both are asked like an :class:`~kvtrace.agent.kv.access.Access`: whether their numbers are on the host yet
(``ready``), and which bytes of a layer they touch (``spans``). Numbers only, no tensor of the connector's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvtrace.agent.kv.access import Aside
from kvtrace.agent.kv.host import on_host
from kvtrace.agent.kv.late import Array, Mask, np
from kvtrace.agent.kv.layout import BLOCK, INNER, Layout
from kvtrace.agent.kv.tensors import is_tensor
from kvtrace.agent.kv.touch import Pattern, Spans, spans_of

if TYPE_CHECKING:
    from kvtrace.agent.kv.caches import Layer

MOST = 1 << 20
"""Addresses, blocks or slots of one copy; more are not known."""


class NotKnown(Exception):
    """What was copied can't be said: of another type than the source says, or too much of it."""


class Memory(Protocol):
    """What one native call reads, or writes."""

    def ready(self) -> bool: ...

    def layers(self, layers: Sequence[Layer]) -> tuple[Layer, ...]:
        """Those of which it may touch a part."""

    def spans(self, layout: Layout, layer: Layer) -> Spans | None:
        """Which bytes of a layer, once it is ready; None where that can't be said."""


Copy = tuple[bool, Memory | None]
"""Whether the KV caches are written (else read), and where; None: can't be said."""


def numbers(value: Any) -> Array:
    """Integers of a list, an array or a tensor on the host, as a flat array of int64; addresses above 2**63
    become negative, and are nobody's.

    Raises:
        NotKnown: it is none of these, or too long.
    """
    if is_tensor(value):
        if value.device.type != "cpu" or value.numel() > MOST:
            raise NotKnown
        found = value.numpy()
    elif isinstance(value, (list, tuple)):
        if len(value) > MOST:
            raise NotKnown
        try:
            found = np.array(value) if value else np.empty(0, dtype=np.int64)
        except (TypeError, ValueError, OverflowError):
            raise NotKnown from None
    elif isinstance(value, int) or (type(value).__module__ == "numpy" and hasattr(value, "dtype")):
        found = np.asarray(value)
    else:
        raise NotKnown
    if found.size > MOST or found.dtype.kind not in "iu":
        raise NotKnown
    # The numbers may be overwritten after the call: a pool of buffers is used again.
    flat: Array = found.ravel().astype(np.int64, copy=True)
    return flat


class Ranges:
    """Pieces of memory. ``firsts``: their addresses; ``sizes``: the bytes of each."""

    def __init__(self, firsts: Array, sizes: Array) -> None:
        if len(sizes) != len(firsts) or len(firsts) > MOST or (len(sizes) and int(sizes.min()) < 0):
            raise NotKnown
        kept = sizes > 0
        self.firsts, self.sizes = firsts[kept], sizes[kept]
        self._spans: dict[tuple[bytes, bytes], Spans] = {}
        """Layers that are copied alike have the same: what these are is looked at once."""

    def ready(self) -> bool:
        return True

    def layers(self, layers: Sequence[Layer]) -> tuple[Layer, ...]:
        if not len(self.firsts):
            return ()
        low, high = int(self.firsts.min()), int((self.firsts + self.sizes).max())
        near = [layer for layer in layers if layer.start < high and low < layer.end]
        return tuple(layer for layer in near if self._of(layer).any())

    def _of(self, layer: Layer) -> Mask:
        there: Mask = (self.firsts < layer.end) & (self.firsts + self.sizes > layer.start)
        return there

    def spans(self, layout: Layout, layer: Layer) -> Spans | None:
        here = self._of(layer)
        begins, sizes = self.firsts[here] - layer.start, self.sizes[here]
        key = begins.tobytes(), sizes.tobytes()
        return self._spans.setdefault(key, Spans(begins, begins + sizes))


class Numbered:
    """Slots named by number, as in vLLM's slot mappings (block * slots in a block + offset; below 0: none).

    Args:
        slots: a list, an array or a tensor; on a device they are read when they are here.
        pointers: addresses of the layers' KV tensors, of the same kinds.
        skip: so many at the begin are left out.
    """

    def __init__(self, slots: Any, pointers: Any, skip: int = 0) -> None:
        self._slots, self._pointers = _on_its_way(slots), _on_its_way(pointers)
        self._skip = skip
        self._spans: dict[Layout, Spans | None] = {}

    def ready(self) -> bool:
        return all(not isinstance(value, Aside) or value.done() for value in (self._slots, self._pointers))

    def layers(self, layers: Sequence[Layer]) -> tuple[Layer, ...]:
        if isinstance(self._pointers, Aside):
            return tuple(layers)  # which of them shows when the pointers are here
        return tuple(layer for layer in layers if self._points_to(layer))

    def _points_to(self, layer: Layer) -> bool:
        pointers = _here(self._pointers)
        return bool(((pointers >= layer.start) & (pointers < layer.end)).any())

    def spans(self, layout: Layout, layer: Layer) -> Spans | None:
        if not self._points_to(layer):
            return Spans(*[np.empty(0, dtype=np.int64)] * 2)
        if layout not in self._spans:
            self._spans[layout] = self._in(layout)
        return self._spans[layout]

    def _in(self, layout: Layout) -> Spans | None:
        slots = _here(self._slots)[self._skip :]
        slots = np.unique(slots[slots >= 0])
        if len(slots) and int(slots[-1]) >= layout.slots:
            return None  # numbered in another way
        bases = np.zeros(len(slots), dtype=np.int64)
        for dim in layout.dims:
            if dim.part != INNER:
                place = slots // layout.in_block if dim.part == BLOCK else slots % layout.in_block
                bases = bases + place * dim.stride
        inner = tuple((dim.size, dim.stride) for dim in layout.dims if dim.part == INNER)
        return spans_of(Pattern(bases, inner, layout.cell))


def _on_its_way(value: Any) -> Any:
    if is_tensor(value) and not on_host(value):
        if value.numel() > MOST:
            raise NotKnown
        return Aside(value)
    return numbers(value)


def _here(value: Any) -> Array:
    return numbers(value.host) if isinstance(value, Aside) else value
