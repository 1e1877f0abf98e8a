"""The KV tensors of this process's worker: whose memory a tensor is, and how slots lie in it. Nothing here
keeps a tensor alive: addresses, sizes and names are numbers and text."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvtrace.agent.kv.access import View
from kvtrace.agent.kv.layout import Hint, Layout, dims_of, hint_of, layout_of
from kvtrace.agent.kv.tensors import OWN, extent, tensors

_MOST_VIEWS = 4096
_RANKS = (3, 4)
"""Numbers of dimensions that a layer's KV tensor may have in a hook beside that of the registered one."""


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

    def slot_bytes(self, layer: Layer, block_size: int = 0) -> float:
        """Bytes of one token slot; 0 where unknown. ``block_size``: for a layer that no
        KVCacheConfig named."""
        blocks, size = self._sizes(layer, block_size)
        return layer.nbytes / (blocks * size) if blocks * size else 0.0

    def layout(self, layer: Layer, block_size: int = 0) -> Layout | None:
        """How its slots lie in memory; None where that is not known."""
        blocks, size = self._sizes(layer, block_size)
        if not blocks * size:
            return None
        return layout_of(layer.shape, layer.strides, layer.itemsize, blocks, size, self._hint(layer))

    def _hint(self, layer: Layer) -> Hint:
        return self._hints.get(layer.name, {}).get(len(layer.shape))

    def block_dim(self, layer: Layer) -> tuple[int, int] | None:
        """The dimension of its tensor that counts blocks, and how many of these a block of vLLM's KV cache
        manager is; None where that is not known."""
        blocks, size = self._sizes(layer, 0)
        pair = dims_of(layer.shape, blocks, size, self._hint(layer)) if blocks * size else None
        return (pair[0], layer.shape[pair[0]] // blocks) if pair is not None else None

    def _sizes(self, layer: Layer, block_size: int) -> tuple[int, int]:
        known = self._blocks.get(layer.name)
        if known is not None:
            return known
        if block_size and len(layer.shape) > 1:
            return layer.shape[1] if layer.shape[0] == 2 else layer.shape[0], block_size
        return 0, 0

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

    def find(self, tensor: Any, named: str | None) -> list[tuple[Layer, float]]:
        """The layers in whose storage a tensor lies, with the share of it that is each one's."""
        here = self.in_storage(tensor)
        if not here:
            return []
        if len(here) == 1:
            return [(here[0], 1.0)]
        start, end = extent(tensor)
        inside = [layer for layer in here if layer.start <= start and end <= layer.end]
        own = [layer for layer in inside if layer.name == named] or inside
        if len(own) == 1:
            return [(own[0], 1.0)]
        every = sum(layer.nbytes for layer in here)
        if every <= here[0].storage_bytes:
            return [(layer, layer.nbytes / every) for layer in here]
        # Layers of different groups share this memory: nothing says whose it is now.
        return [(layer, 0.0) for layer in here]

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


def _first(storage: tuple[int, int, list[Layer]]) -> int:
    return storage[0]


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
    start, end = extent(tensor)
    itemsize = tensor.element_size()
    return Layer(
        name, storage.data_ptr(), start, end, tensor.numel() * itemsize, storage.nbytes(),
        tuple(tensor.shape), tuple(tensor.stride()), itemsize,
    )  # fmt: skip
