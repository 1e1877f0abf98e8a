"""What tensor operations take out of, and put into, the KV caches during one call.

A ``TorchDispatchMode`` in the calling thread sees every operation that runs. By storage:

- *read*: an input lies in a KV tensor's storage and an output does not. It counts
  min(elements of the input, elements of the output) x the input's item size, so an index that
  picks rows counts the rows, and an ``.cpu()`` of what was already picked counts nothing.
- *written*: an argument that the operation's schema calls mutated lies in a KV storage
  (``index_put_``: the elements that the indices name; else those of the source).
- views count nothing; neither do operations that only look at shapes (``empty_like``).

Bytes become slots by the bytes of one token slot in that layer. What the mode can't see is
said, never guessed: a custom operation on a KV tensor, and memory that was asked for by
address (``data_ptr``, ``numpy``, ``untyped_storage``, ... under a ``TorchFunctionMode``) leave the
slots unknown. A connector that once took an address keeps that mark: it may copy by it at any
time later (see ``wayout.py`` for what else can hide). Functions that a connector compiled with
torch.compile may run uncompiled in a watched call.

Nothing here keeps a tensor: addresses, sizes and names are numbers and text.
"""

from __future__ import annotations

import math
import sys
import threading
from dataclasses import dataclass
from typing import Any

from kvtrace.trace.format import UNKNOWN

_TORCH_NAMESPACES = {"aten", "prims", "prim"}
_SHAPE_ONLY = {
    "empty_like",
    "zeros_like",
    "ones_like",
    "full_like",
    "rand_like",
    "randn_like",
    "new_empty",
    "new_empty_strided",
    "new_zeros",
    "new_ones",
    "new_full",
    "is_same_size",
    # in place, and still no element moves
    "detach_",
    "resize_",
    "set_",
    "t_",
    "transpose_",
    "squeeze_",
    "unsqueeze_",
    "as_strided_",
    "requires_grad_",
}
_ADDRESS = {"data_ptr", "numpy", "__array__", "tolist", "__dlpack__", "untyped_storage", "storage"}
_ADDRESS |= {"_typed_storage", "share_memory_"}


@dataclass(frozen=True)
class Layer:
    """One layer's KV tensor, in numbers."""

    name: str
    storage: int
    start: int
    end: int
    nbytes: int
    storage_bytes: int
    shape: tuple[int, ...]


class Caches:
    """The KV tensors of this process's worker."""

    def __init__(self) -> None:
        self.layers: dict[str, Layer] = {}
        self.address_taken = False
        self._slots: dict[str, int] = {}
        self._block_size = 0
        self._by_storage: dict[int, list[Layer]] | None = None

    def register(self, kv_caches: Any) -> None:
        """``register_kv_caches``: {layer name: tensor, or tensors}; replaces what was known."""
        self.layers.clear()
        self._by_storage = None
        for name, value in kv_caches.items():
            self.add(str(name), value)

    def configure(self, kv_cache_config: Any, context: Any) -> None:
        """Slots per layer, from vLLM's KVCacheConfig; layers not yet known, from the static
        forward context."""
        self._slots.clear()
        blocks = getattr(kv_cache_config, "num_blocks", 0)
        for group in getattr(kv_cache_config, "kv_cache_groups", None) or ():
            size = getattr(getattr(group, "kv_cache_spec", None), "block_size", 0)
            for name in getattr(group, "layer_names", ()):
                if isinstance(blocks, int) and isinstance(size, int):
                    self._slots[str(name)] = blocks * size
                if name not in self.layers:
                    self.add(str(name), getattr(context.get(name), "kv_cache", None))
        for name in set(self.layers) - set(self._slots) if self._slots else ():
            del self.layers[name]
        self._by_storage = None

    def add(self, name: str, value: Any) -> None:
        tensors = _tensors(value)
        if len(tensors) != 1:
            return  # state caches of several tensors: no slots to speak of
        before, _own.busy = getattr(_own, "busy", False), True
        try:
            layer = _layer(name, tensors[0])
        finally:
            _own.busy = before
        if layer is not None and self.layers.get(name) != layer:
            self.layers[name] = layer
            self._by_storage = None

    def slot_bytes(self, layer: Layer, block_size: int = 0) -> float:
        """Bytes of one token slot; 0 where unknown. ``block_size``: for a layer that no
        KVCacheConfig named."""
        slots = self._slots.get(layer.name, 0)
        if not slots and block_size and len(layer.shape) > 1:
            blocks = layer.shape[1] if layer.shape[0] == 2 else layer.shape[0]
            slots = blocks * block_size
        return layer.nbytes / slots if slots else 0.0

    def find(self, tensor: Any, named: str | None) -> list[tuple[Layer, float]]:
        """The layers in whose storage a tensor lies, with the share of it that is each one's."""
        if self._by_storage is None:
            self._by_storage = {}
            for layer in self.layers.values():
                self._by_storage.setdefault(layer.storage, []).append(layer)
        here = self._by_storage.get(tensor.untyped_storage().data_ptr())
        if not here:
            return []
        if len(here) == 1:
            return [(here[0], 1.0)]
        start, end = _extent(tensor)
        inside = [layer for layer in here if layer.start <= start and end <= layer.end]
        own = [layer for layer in inside if layer.name == named] or inside
        if len(own) == 1:
            return [(own[0], 1.0)]
        every = sum(layer.nbytes for layer in here)
        if every <= here[0].storage_bytes:
            return [(layer, layer.nbytes / every) for layer in here]
        # Layers of different groups share this memory: nothing says whose it is now.
        return [(layer, 0.0) for layer in here]


CACHES = Caches()

# True while this thread runs our own accounting (a watch inside another's call included).
_own = threading.local()


class Watch:
    """Counts for one call. ``start`` and ``stop`` in the thread of the call."""

    def __init__(self, caches: Caches, named: str | None) -> None:
        self.caches = caches
        self.named = named
        self.read: dict[str, float] = {}
        self.written: dict[str, float] = {}
        self.opaque_reads: set[str] = set()
        self.opaque_writes: set[str] = set()
        """Layers of which it can't be said how much was read, or written."""
        self.failed = False
        self._modes: list[Any] = []

    def start(self) -> bool:
        """False where torch is not loaded."""
        modes = _modes()
        if modes is None:
            return False
        for mode in (modes[0](self), modes[1](self)):
            mode.__enter__()
            self._modes.append(mode)
        return True

    def stop(self) -> None:
        while self._modes:
            self._modes.pop().__exit__(None, None, None)

    def slots(self, written: bool, block_size: int) -> dict[str, int]:
        """Slots per layer that was touched: written into it, or read from it; -1 unknown."""
        counts = self.written if written else self.read
        opaque = self.opaque_writes if written else self.opaque_reads
        found: dict[str, int] = {}
        for name, layer in self.caches.layers.items():
            if name in counts or name in opaque:
                size = self.caches.slot_bytes(layer, block_size)
                known = size and name not in opaque and not self.failed
                found[name] = round(counts[name] / size) if known else UNKNOWN
        return found

    @property
    def unsure(self) -> bool:
        """Whether something may have been copied that was not counted."""
        return self.failed or self.caches.address_taken or bool(self.opaque_reads | self.opaque_writes)

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """One operation is done."""
        _own.busy = True
        try:
            self._count(func, args, kwargs, result)
        except Exception:
            self.failed = True
        finally:
            _own.busy = False

    def address(self, args: Any) -> None:
        """A tensor's memory was asked for by address."""
        if getattr(_own, "busy", False) or not args:
            return
        _own.busy = True
        try:
            if _is_tensor(args[0]) and self.caches.find(args[0], self.named):
                self.caches.address_taken = True
        except Exception:
            self.caches.address_taken = True
        finally:
            _own.busy = False

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        inputs: list[tuple[Any, list[tuple[Layer, float]], bool]] = []
        others: list[Any] = []  # written, and nobody's KV
        named: dict[str, Any] = {}
        for index, argument in enumerate(func._schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            named[argument.name] = value
            write = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in _tensors(value):
                layers = self.caches.find(tensor, self.named)
                if layers:
                    inputs.append((tensor, layers, write))
                elif write:
                    others.append(tensor)
        if not inputs:
            return
        if func.namespace not in _TORCH_NAMESPACES:
            for _, layers, write in inputs:
                (self.opaque_writes if write else self.opaque_reads).update(layer.name for layer, _ in layers)
            return
        name = func._schema.name.partition("::")[2]
        if name in _SHAPE_ONLY:
            return
        results = [t for t in _tensors(result) if not self.caches.find(t, self.named)] or others
        out = sum(t.numel() for t in results if str(t.dtype) != "torch.bool")
        for tensor, layers, write in inputs:
            if write:
                numel, into, opaque = _written(name, tensor, named), self.written, self.opaque_writes
            elif out:
                numel, into, opaque = min(tensor.numel(), out), self.read, self.opaque_reads
            else:
                continue
            for layer, share in layers:
                if share:
                    into[layer.name] = into.get(layer.name, 0.0) + numel * share * tensor.element_size()
                else:
                    opaque.add(layer.name)


def _written(name: str, tensor: Any, named: dict[str, Any]) -> int:
    """Elements that a mutating operation wrote into ``tensor``."""
    whole: int = tensor.numel()
    indices = named.get("indices")
    if name in ("index_put_", "_index_put_impl_") and indices is not None:
        picked = [index for index in indices if index is not None]
        if any(str(index.dtype) in ("torch.bool", "torch.uint8") for index in picked):
            return min(whole, int(named["values"].numel()))
        shape = sys.modules["torch"].broadcast_shapes(*(index.shape for index in picked))
        kept = [size for at, size in enumerate(tensor.shape) if at >= len(indices) or indices[at] is None]
        return int(math.prod(shape) * math.prod(kept))
    for source in ("source", "src", "tensor_src"):
        value: Any = named.get(source)
        if _is_tensor(value):
            # copy_ broadcasts its source over the whole target
            return whole if name == "copy_" else min(whole, int(value.numel()))
    return whole


def _tensors(value: Any) -> list[Any]:
    if _is_tensor(value):
        return [value]
    if isinstance(value, (list, tuple)):
        return [item for item in value if _is_tensor(item)]
    return []


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _extent(tensor: Any) -> tuple[int, int]:
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _layer(name: str, tensor: Any) -> Layer | None:
    if not tensor.numel():
        return None
    storage = tensor.untyped_storage()
    start, end = _extent(tensor)
    nbytes = tensor.numel() * tensor.element_size()
    return Layer(name, storage.data_ptr(), start, end, nbytes, storage.nbytes(), tuple(tensor.shape))


_made: tuple[Any, Any] | None = None


def _modes() -> tuple[Any, Any] | None:
    """The two mode classes; None where torch is not loaded (it is never imported for this)."""
    global _made
    if _made is None and "torch" in sys.modules:
        from torch.overrides import TorchFunctionMode
        from torch.utils._python_dispatch import TorchDispatchMode

        interface = sys.modules["torch"].Tensor.__cuda_array_interface__

        class Operations(TorchDispatchMode):  # type: ignore[misc]
            def __init__(self, watch: Watch) -> None:
                super().__init__()
                self.watch = watch

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                self.watch.ran(func, args, kwargs or {}, result)
                return result

        class Addresses(TorchFunctionMode):  # type: ignore[misc]
            def __init__(self, watch: Watch) -> None:
                super().__init__()
                self.watch = watch

            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if getattr(func, "__name__", "") in _ADDRESS or getattr(func, "__self__", None) is interface:
                    self.watch.address(args)
                return func(*args, **(kwargs or {}))

        _made = (Operations, Addresses)
    return _made
