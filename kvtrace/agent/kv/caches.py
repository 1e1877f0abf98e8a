"""The KV tensors of this process's worker: whose memory a tensor is, and how slots lie in it. Nothing here
keeps a tensor alive: addresses, sizes and names are numbers and text."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from kvtrace.agent.kv.access import View
from kvtrace.agent.kv.layout import Hint, Layout, dims_of, hint_of, layout_of
from kvtrace.agent.kv.tensors import OWN, tensors

_MOST_VIEWS = 4096
_RANKS = (3, 4)
"""Numbers of dimensions that a layer's KV tensor may have in a hook beside that of the registered one."""
_first = itemgetter(0)
"""Of a storage: its address."""


@dataclass(frozen=True)
class Layer:
    """One layer's KV tensor, in numbers.

    Attributes:
        storage, storage_bytes: address and size of the memory that it lies in.
        start, end: addresses of its first byte, and after its last.
        nbytes: bytes of its elements; less than what lies between where other layers lie there too.
        strides: in elements.
    """

    name: str
    storage: int
    start: int
    end: int
    nbytes: int
    storage_bytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def shares(self, other: Layer) -> bool:
        """Whether both lie on the same bytes: layers of two groups, each of which owns some of the blocks."""
        return (self.storage, self.start) == (other.storage, other.start)


class Caches:
    """The KV tensors of this process's worker."""

    def __init__(self) -> None:
        self.layers: dict[str, Layer] = {}
        self.address_taken = False
        self._blocks: dict[str, tuple[int, int]] = {}
        """Blocks and block size, as vLLM's KVCacheConfig says."""
        self._hints: dict[str, dict[int, Hint]] = {}
        """By layer and number of dimensions: a hook may get another view than the one that was registered
        (MLA's is without the dimension of its one head)."""
        self._tensors: dict[str, Any] = {}
        """Weak references, by layer."""
        self._storages: list[tuple[int, int, list[Layer]]] | None = None
        """(address, address of its end, layers) of each storage, ascending."""
        self._views: dict[tuple[int, View], tuple[Layer, ...]] = {}

    def register(self, kv_caches: Any) -> None:
        """``register_kv_caches``: {layer name: tensor, or tensors}; replaces what was known."""
        self.layers.clear()
        self._changed()
        for name, value in kv_caches.items():
            self.add(str(name), value)

    def configure(self, kv_cache_config: Any, context: Any) -> None:
        """Slots per layer, from vLLM's KVCacheConfig; layers not yet known, from the static
        forward context."""
        self._blocks.clear()
        self._hints.clear()
        blocks = getattr(kv_cache_config, "num_blocks", 0)
        for group in getattr(kv_cache_config, "kv_cache_groups", None) or ():
            size = getattr(getattr(group, "kv_cache_spec", None), "block_size", 0)
            for name in map(str, getattr(group, "layer_names", ())):
                if isinstance(blocks, int) and isinstance(size, int):
                    self._blocks[name] = blocks, size
                layer = context.get(name)
                if name not in self.layers:
                    self.add(name, getattr(layer, "kv_cache", None))
                if name in self.layers and isinstance(size, int):
                    ranks = {len(self.layers[name].shape), *_RANKS}
                    self._hints[name] = {rank: hint_of(layer, rank, size) for rank in ranks}
        for name in set(self.layers) - set(self._blocks) if self._blocks else ():
            del self.layers[name]
        self._changed()

    def add(self, name: str, value: Any) -> None:
        found = tensors(value)
        if len(found) != 1:
            return  # state caches of several tensors: no slots to speak of
        before, OWN.busy = OWN.busy, True
        try:
            layer = layer_of(name, found[0])
        finally:
            OWN.busy = before
        if layer is not None and (self.layers.get(name) != layer or self.tensor(name) is None):
            self._tensors[name] = weakref.ref(found[0])
            self.layers[name] = layer
            self._changed()

    def tensor(self, name: str) -> Any:
        """The layer's tensor, to be held while its memory is read in another moment than that of an operation
        on it; None where it is gone."""
        known = self._tensors.get(name)
        return known() if known is not None else None

    def _changed(self) -> None:
        self._storages = None
        self._views.clear()

    def on_the_same(self, one: str, other: str) -> bool:
        """Whether two layers lie on the same bytes."""
        layers = self.layers
        return one in layers and other in layers and layers[one].shares(layers[other])

    # --- slots ----------------------------------------------------------------------------

    def slot_bytes(self, layer: Layer) -> float:
        """Bytes of one token slot; 0 where unknown."""
        blocks, size = self._sizes(layer)
        return layer.nbytes / (blocks * size) if blocks * size else 0.0

    def layout(self, layer: Layer) -> Layout | None:
        """How its slots lie in memory; None where that is not known."""
        blocks, size = self._sizes(layer)
        if not blocks * size:
            return None
        return layout_of(layer.shape, layer.strides, layer.itemsize, blocks, size, self._hint(layer))

    def _hint(self, layer: Layer) -> Hint:
        return self._hints.get(layer.name, {}).get(len(layer.shape))

    def block_dim(self, layer: Layer) -> tuple[int, int] | None:
        """The dimension of its tensor that counts blocks, and how many of these a block of vLLM's KV cache
        manager is; None where that is not known."""
        blocks, size = self._sizes(layer)
        pair = dims_of(layer.shape, blocks, size, self._hint(layer)) if blocks * size else None
        return (pair[0], layer.shape[pair[0]] // blocks) if pair is not None else None

    def _sizes(self, layer: Layer) -> tuple[int, int]:
        return self._blocks.get(layer.name, (0, 0))

    # --- whose memory ---------------------------------------------------------------------

    def in_storage(self, tensor: Any) -> Sequence[Layer]:
        """All layers that lie in a tensor's storage; none where it has no elements, or no memory."""
        try:
            address = tensor.data_ptr()
        except Exception:
            return ()  # sparse, or fake
        if self._storages is None:
            self._storages = _storages(self.layers.values())
        at = bisect_right(self._storages, address, key=_first) - 1
        if at < 0 or address >= self._storages[at][1]:
            return ()
        return self._storages[at][2]

    def at(self, tensor: Any, view: View) -> tuple[Layer, ...]:
        """The layers of which a view may touch a part."""
        here = self.in_storage(tensor)
        if len(here) < 2:
            return tuple(here)
        key = (here[0].storage, view)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            found = self._views[key] = tuple(layer for layer in here if _may_touch(layer, view))
        return found


CACHES = Caches()


def _storages(layers: Iterable[Layer]) -> list[tuple[int, int, list[Layer]]]:
    found: dict[int, tuple[int, int, list[Layer]]] = {}
    for layer in layers:
        first = layer.storage
        found.setdefault(first, (first, first + layer.storage_bytes, []))[2].append(layer)
    return sorted(found.values(), key=_first)


def _may_touch(layer: Layer, view: View) -> bool:
    """False where a view surely lies beside a layer: before it, behind it, or between its blocks."""
    first = layer.storage + view.offset
    spans = [(size, stride * view.itemsize) for size, stride in zip(view.shape, view.strides, strict=True)]
    if first + sum((size - 1) * stride for size, stride in spans) + view.itemsize <= layer.start:
        return False
    if first >= layer.end:
        return False
    outer = max(layer.strides) * layer.itemsize
    own = layer.itemsize + sum(
        (size - 1) * stride * layer.itemsize
        for size, stride in zip(layer.shape, layer.strides, strict=True)
        if stride * layer.itemsize < outer
    )
    if any(stride >= outer and stride % outer for _, stride in spans):
        return True
    within = (first - layer.start) % outer
    reach = view.itemsize + sum((size - 1) * stride for size, stride in spans if stride < outer)
    return within < own or within + reach > outer


def layer_of(name: str, tensor: Any) -> Layer | None:
    """A tensor in numbers; None where it has no elements."""
    if not tensor.numel():
        return None
    storage = tensor.untyped_storage()
    start, itemsize = tensor.data_ptr(), tensor.element_size()
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    end = start + (last + 1) * itemsize
    return Layer(
        name, storage.data_ptr(), start, end, tensor.numel() * itemsize, storage.nbytes(),
        shape, strides, itemsize,
    )  # fmt: skip
