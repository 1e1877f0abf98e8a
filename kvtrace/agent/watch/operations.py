"""What tensor operations take out of, and put into, the KV caches during one call.

A ``TorchDispatchMode`` in the calling thread sees every operation that runs. By storage:

- *read*: an input lies in a KV tensor's storage and an output does not. Which slots: those of the view, or
  what an index picks of it (``kv/access.py``, ``kv/touch.py``). How much: min(elements of the input, elements
  of the output) x the input's item size, so an index that picks rows counts the rows, and an ``.cpu()`` of
  what was already picked counts nothing.
- *written*: an argument that the operation's schema calls mutated lies in a KV storage; which slots,
  likewise.
- *given out*: the memory of a part of a KV tensor was asked for by address (``numpy``, ``data_ptr``, ...
  under a ``TorchFunctionMode``): it may have been read or written, or neither.
- views count nothing; neither do operations that only look at shapes (``empty_like``), nor those that make
  one number of many (``sum``): nothing that could be put back comes out.

What can't be said exactly is not known, never guessed: a custom operation on a KV tensor, or one of torch's
that makes less of its input in a way that is not in the table. A connector that once took the address of a
whole KV tensor may copy by it at any time later: it keeps that mark (see ``escapes.py`` for what else can
hide). Functions that a connector compiled with torch.compile may run uncompiled in a watched call.

Nothing here keeps a tensor of the connector's: addresses, sizes and names are numbers and text.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from kvtrace.agent import limits
from kvtrace.agent.kv.access import READS, WRITES, Access, Table, access_of, pattern_of, view_of
from kvtrace.agent.kv.caches import Caches, Layer
from kvtrace.agent.kv.memory import Copy, Memory
from kvtrace.agent.kv.tensors import OWN, is_tensor, tensors
from kvtrace.agent.kv.touch import LayerTouch, TouchedSlots, text_of, together, touched
from kvtrace.agent.origin import HERE
from kvtrace.agent.state import clock, processor_clock
from kvtrace.agent.watch.modes import OF_THE_VIEW, Modes, of_this_thread
from kvtrace.agent.watch.native import OPERATIONS, NativeCopy, copies_of, watching
from kvtrace.agent.wrap.tracing import set_trace
from kvtrace.trace.facts import Limit
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
_SUMMARIES = {
    "sum",
    "nansum",
    "mean",
    "prod",
    "norm",
    "linalg_vector_norm",
    "std",
    "var",
    "var_mean",
    "std_mean",
}
_SUMMARIES |= {"max", "min", "amax", "amin", "aminmax", "argmax", "argmin", "count_nonzero", "median", "mode"}
"""One number, or one for each row, comes out: no content that could be put back."""
_MIXES = {"mm", "bmm", "addmm", "baddbmm", "mv", "dot", "convolution", "_scaled_mm", "cumsum", "histc"}
_INDEX_TYPES = {"torch.int64", "torch.int32", "torch.bool"}
READ, WRITTEN, GIVEN_OUT = "read", "written", "given out"
_SEEN = (
    "read", "written", "opaque_reads", "opaque_writes", "failed", "elsewhere", "_touches", "_times", "_later",
    "_took_none", "blind", "maybe_written",
)  # fmt: skip
"""What a watch saw, by the names of its attributes."""
_DISPATCH = 5_000
"""ns that an operation takes longer because it goes through a mode, more or less."""
_MOST_MEMOS = 512
_MOST_KEY = 1 << 20
_MOST_TOUCHES = 1 << 15


class Plan(NamedTuple):
    """What an operation's schema says: looked up once. ``arguments``: (name, whether it is written)."""

    name: str
    known: bool
    looks: bool
    """It only looks at shapes."""
    aliases: bool
    """It gives a view, or may: ``to``, ``contiguous`` and ``reshape`` copy where they must."""
    arguments: tuple[tuple[str, bool], ...]
    full: str
    """The name with its namespace."""
    native: NativeCopy | None
    """It copies by address, and is known: which argument is which, its schema says."""


_plans: dict[Any, Plan] = {}


def _plan(func: Any) -> Plan:
    schema = func._schema
    name = schema.name.partition("::")[2]
    arguments = tuple(
        (one.name, one.alias_info is not None and one.alias_info.is_write) for one in schema.arguments
    )
    aliases = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
    known = func.namespace in _TORCH_NAMESPACES
    looks = known and name in _SHAPE_ONLY
    native = OPERATIONS.get(schema.name)
    plan = _plans[func] = Plan(name, known, looks, known and aliases, arguments, schema.name, native)
    return plan


class Touched(NamedTuple):
    """Which slots of a layer one call touched. ``text``: as in SLOTS records."""

    full: int
    partly: int
    text: str


_NO_SLOTS = Touched(0, 0, "/")


class CopyWatch:
    """Counts for one call. ``start`` and ``stop`` in the thread of the call.

    Args:
        named: the layer that the hook is called for: of layers on the same bytes that one is meant.
        block_size: of a layer that no KVCacheConfig named.
        alone: watches that began before it in this thread do not see what it sees.
    """

    def __init__(self, caches: Caches, named: str | None, block_size: int = 0, alone: bool = False) -> None:
        self.alone = alone
        self.cost = 0
        """ns of processor time that watching took so far."""
        self.caches = caches
        self.named = named
        self.block_size = block_size
        self.read: dict[str, float] = {}
        self.written: dict[str, float] = {}
        self.opaque_reads: set[str] = set()
        self.opaque_writes: set[str] = set()
        """Layers of which it can't be said how much was read, or written."""
        self.failed = False
        self.elsewhere = False
        """Native code copied memory that is in no known KV tensor."""
        self._touches: dict[tuple[str, str], list[LayerTouch] | None] = {}
        """(layer, way) -> what was touched; None where it can't be said which slots."""
        self._times: dict[tuple[str, str], int] = {}
        self._later: list[tuple[Layer, str, Access | Memory]] = []
        self._modes: Modes | None = None
        self.blind: set[str] = set()
        """Layers of which other slots may have been read than those that are known."""
        self.maybe_written: set[str] = set()
        """Layers of which a load asked for the whole address: it may have written any slots."""
        self._took_none: set[str] = set()
        """Layers from which an operation picked slots, none of them."""
        self.before: Callable[[], None] | None = None
        """Called before an operation on a KV tensor is added, where somebody wants that."""
        self.loads, self.saves = False, True
        """What an address that is given out may be for: writing, reading."""

    def start(self) -> bool:
        """False where torch is not loaded."""
        self._modes = of_this_thread()
        if self._modes is None:
            return False
        self._modes.add(self)
        return True

    def stop(self) -> None:
        if self._modes is not None:
            self._modes.remove(self)

    def take(self) -> CopyWatch:
        """What was seen so far, as a watch that is over; this one goes on from nothing."""
        seen = CopyWatch(self.caches, self.named, self.block_size)
        seen.cost, self.cost = self.cost, 0
        for name in _SEEN:
            fresh = getattr(seen, name)
            setattr(seen, name, getattr(self, name))
            setattr(self, name, fresh)
        return seen

    @property
    def saw(self) -> bool:
        """Whether a KV tensor was touched at all."""
        return bool(self._touches or self._later or self._took_none or self.blind or self.maybe_written)

    @property
    def whole(self) -> bool:
        """Whether all that was touched so far is known, and whole slots: of none is a half still to come."""
        touches = self._touches.values()
        return not self._later and all(
            found is not None and all(one.part is None for one in found) for found in touches
        )

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

    def settled(self) -> bool:
        """Whether all values that name elements have come from the device; asks, and never waits."""
        waiting = []
        for layer, way, access in self._later:
            if access.ready():
                self._touch(layer, way, access)
            else:
                waiting.append((layer, way, access))
        self._later = waiting
        return not waiting

    def touched(self) -> dict[tuple[str, str], Touched | None]:
        """(layer, way) -> which slots; None where that is not known. Once :meth:`settled`."""
        found: dict[tuple[str, str], Touched | None] = {}
        for key, touches in self._touches.items():
            if touches is None or self.failed:
                found[key] = None
            elif touches:
                found[key] = _put_together(tuple(touches))
        for layer in self._took_none if not self.unsure else ():
            found.setdefault((layer, READ), _NO_SLOTS)
        return found

    def parts_read(self, layer: str) -> list[LayerTouch]:
        """What was read of a layer of which the slots are known: whole slots, and parts."""
        return self._touches.get((layer, READ)) or []

    def time(self, layer: str, way: str) -> int:
        """Host time, ns: of the first write into a layer, of the last read."""
        return self._times.get((layer, way), 0)

    def unsettled(self) -> dict[tuple[str, str], Touched | None]:
        """(layer, way) of what has not come yet, each as not known."""
        return {(layer.name, way): None for layer, way, _ in self._later}

    @property
    def unsure(self) -> bool:
        """Whether something may have been copied that was not counted."""
        opaque = self.elsewhere or bool(self.opaque_reads | self.opaque_writes)
        return self.failed or self.caches.address_taken or opaque

    def ran(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """One operation is done."""
        plan = _plans.get(func) or _plan(func)
        self.cost += _DISPATCH
        if plan.looks:
            return
        with self.own():
            if plan.aliases and any(self.caches.in_storage(view) for view in tensors(result)[:1]):
                return
            if plan.native is not None:
                if watching(within=True):
                    named = dict(zip((name for name, _ in plan.arguments), args, strict=False))
                    self.copied(copies_of(plan.native, (), {**named, **kwargs}, result))
            else:
                self._count(plan, args, kwargs, result)

    def address(self, args: Any, name: str) -> None:
        """A tensor's memory was asked for by address, with the method of that name."""
        if OWN.busy or not args:
            return
        OWN.busy = True
        try:
            if not is_tensor(args[0]):
                return
            if self.caches.in_storage(args[0]):
                self.caches.address_taken = True
                if self.before is not None:
                    self.before()
                HERE.did = clock()
                view = view_of(args[0])
                layers = self.caches.at(args[0], view)
                size = args[0].numel() * view.itemsize
                if name in OF_THE_VIEW and all(size < one.nbytes for one in layers):
                    self._note(layers, GIVEN_OUT, Access(view))
                else:
                    limits.say(Limit.ADDRESS, name)
                    names = [layer.name for layer in layers]
                    self.maybe_written.update(names if self.loads else ())
                    self.blind.update(names if self.saves else ())
        except Exception:
            self.caches.address_taken = True
        finally:
            OWN.busy = False

    @contextmanager
    def own(self) -> Iterator[None]:
        """What runs in here is our own accounting: what it asks of tensors is not the connector's, its time
        is the watch's, and it never raises."""
        began, before, OWN.busy = processor_clock(), OWN.busy, True
        tracer = _untraced()
        try:
            with sys.modules["torch"]._C.DisableTorchFunction():
                yield
        except Exception:
            self.failed = True
        finally:
            OWN.busy = before
            if tracer is not None:
                set_trace(tracer)
            self.cost += processor_clock() - began

    def copied(self, copies: Iterable[Copy]) -> None:
        """Native code copied by address, without an error. Call it within :meth:`own`.

        Args:
            copies: whether the KV caches were written (else read), and which memory; None where that can't be
                said: then it may be any layer's.
        """
        every = tuple(self.caches.layers.values())
        found = [(one, memory, every if memory is None else memory.layers(every)) for one, memory in copies]
        if not any(layers for _, _, layers in found):
            self.elsewhere |= bool(found)
            return
        if self.before is not None:
            self.before()
        HERE.did = clock()
        for written, memory, layers in found:
            way = WRITTEN if written else READ
            if memory is None:
                (self.opaque_writes if written else self.opaque_reads).update(layer.name for layer in layers)
                for layer in layers:
                    self._at(layer, way)
                    self._touches[layer.name, way] = None
            else:
                self._note(layers, way, memory)
                self._weigh(layers, memory, written)

    def _weigh(self, layers: tuple[Layer, ...], memory: Memory, written: bool) -> None:
        """How much of each layer a native copy touched."""
        into, opaque = (self.written, self.opaque_writes) if written else (self.read, self.opaque_reads)
        for layer in layers:
            layout = self.caches.layout(layer, self.block_size) if memory.ready() else None
            found = None if layout is None else memory.touches(layout, layer)
            if found is None:
                opaque.add(layer.name)
            elif found:
                size = self.caches.slot_bytes(layer, self.block_size)
                parts = (
                    len(one.slots) * (1.0 if one.part is None else float(one.part.mean())) for one in found
                )
                into[layer.name] = into.get(layer.name, 0.0) + size * sum(parts)

    # --- one operation --------------------------------------------------------------------

    def _count(self, plan: Plan, args: Any, kwargs: Any, result: Any) -> None:
        inputs: list[tuple[Any, bool]] = []
        others: list[Any] = []  # written, and nobody's KV
        picks = False  # something else names elements, for all that is known
        named: dict[str, Any] = {}
        for index, (name, write) in enumerate(plan.arguments):
            value = named[name] = args[index] if index < len(args) else kwargs.get(name)
            for tensor in tensors(value):
                if self.caches.in_storage(tensor):
                    inputs.append((tensor, write))
                elif write:
                    others.append(tensor)
                elif str(tensor.dtype) in _INDEX_TYPES:
                    picks = True
        if not inputs:
            return
        if self.before is not None:
            self.before()
        HERE.did = clock()
        results = [t for t in tensors(result) if not self.caches.in_storage(t)] or others
        out = sum(t.numel() for t in results if str(t.dtype) != "torch.bool")
        copies = not picks and (len(results) == 1 or results is others) and plan.name not in _MIXES
        for tensor, write in inputs:
            layers = self.caches.find(tensor, self.named)
            if not plan.known:
                limits.say(Limit.OPERATION, plan.full)
                (self.opaque_writes if write else self.opaque_reads).update(layer.name for layer, _ in layers)
                self._unknown(tensor, WRITTEN if write else READ)
            elif write:
                self._add(layers, tensor, _written(plan.name, tensor, named), True)
                self._which(plan, tensor, named, WRITES, WRITTEN)
            elif out:
                self._add(layers, tensor, min(tensor.numel(), out), False)
                if plan.name in READS or (copies and out >= tensor.numel()):
                    self._which(plan, tensor, named, READS, READ)
                elif plan.name not in _SUMMARIES:
                    self._unknown(tensor, READ)
            elif plan.name in READS and tensor.numel():
                self._took_none.update(layer.name for layer, _ in layers)

    def _add(self, layers: list[tuple[Layer, float]], tensor: Any, numel: int, write: bool) -> None:
        into, opaque = (self.written, self.opaque_writes) if write else (self.read, self.opaque_reads)
        for layer, share in layers:
            if share:
                into[layer.name] = into.get(layer.name, 0.0) + numel * share * tensor.element_size()
            else:
                opaque.add(layer.name)

    # --- which slots ----------------------------------------------------------------------

    def _which(self, plan: Plan, tensor: Any, named: dict[str, Any], table: Table, way: str) -> None:
        access = access_of(tensor, table, plan.name, named)
        self._note(self.caches.at(tensor, access.view), way, access)

    def _note(self, layers: tuple[Layer, ...], way: str, access: Access | Memory) -> None:
        ready = access.ready()
        own = next((layer for layer in layers if layer.name == self.named), None)
        if own is not None:
            layers = tuple(one for one in layers if one is own or not one.shares(own))
        for layer in layers:
            self._at(layer, way)
            if ready:
                self._touch(layer, way, access)
            else:
                self._later.append((layer, way, access))

    def _unknown(self, tensor: Any, way: str) -> None:
        for layer in self.caches.at(tensor, view_of(tensor)):
            self._at(layer, way)
            self._touches[layer.name, way] = None

    def _at(self, layer: Layer, way: str) -> None:
        if way != WRITTEN or (layer.name, way) not in self._times:
            self._times[layer.name, way] = clock()

    def _touch(self, layer: Layer, way: str, access: Access | Memory) -> None:
        found = _touches_of(self.caches, layer, self.block_size, access)
        here = self._touches.setdefault((layer.name, way), [])
        if here is not None and found is not None and len(here) + len(found) <= _MOST_TOUCHES:
            here.extend(found)
        else:
            self._touches[layer.name, way] = None


def _untraced() -> Any:
    """Take this thread's trace function away from our own code: it is called for every function there. From
    3.12 on there is none of ours, and changing it would cost more."""
    if sys.version_info >= (3, 12):
        return None
    tracer = sys.gettrace()
    return tracer if tracer is not None and set_trace(None) else None


_memo: dict[tuple[Any, ...], list[LayerTouch] | None] = {}
_texts: dict[tuple[LayerTouch, ...], Touched | None] = {}


def _touches_of(
    caches: Caches, layer: Layer, block_size: int, access: Access | Memory
) -> list[LayerTouch] | None:
    """What an access touches of a layer. Layers of one shape are looked at once."""
    layout = caches.layout(layer, block_size)
    if layout is None:
        return None
    if not isinstance(access, Access):
        return access.touches(layout, layer)
    start = layer.start - layer.storage
    shifted = access._replace(view=access.view._replace(offset=access.view.offset - start))
    key = (id(layout), shifted.key())
    if key in _memo:
        return _memo[key]
    found = touched(layout, pattern_of(access, start))
    if sum(len(part[-1]) for part in key[1][3:] if part) <= _MOST_KEY:
        if len(_memo) >= _MOST_MEMOS:
            _memo.clear()
        _memo[key] = found
    return found


def _put_together(touches: tuple[LayerTouch, ...]) -> Touched | None:
    if touches in _texts:
        return _texts[touches]
    slots: TouchedSlots | None = together(touches)
    made = None if slots is None else Touched(len(slots.full), len(slots.partly), text_of(slots))
    if len(_texts) >= _MOST_MEMOS:
        _texts.clear()
    _texts[touches] = made
    return made


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
        if is_tensor(value):
            # copy_ broadcasts its source over the whole target
            return whole if name == "copy_" else min(whole, int(value.numel()))
    return whole
