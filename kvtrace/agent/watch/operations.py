"""What tensor operations take out of, and put into, the KV caches during one call.

A ``TorchDispatchMode`` in the calling thread sees every operation that runs. By storage:

- *read*: an input lies in a KV tensor's storage and an output does not. Which slots: those of the view, or
  what an index picks of it (``kv/access.py``, ``kv/touch.py``). An ``.cpu()`` of what was already picked is
  no read.
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

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

from kvtrace.agent import limits
from kvtrace.agent.kv.access import READS, WRITES, Access, Table, access_of, pattern_of, view_of
from kvtrace.agent.kv.caches import Caches, Layer
from kvtrace.agent.kv.layout import Layout
from kvtrace.agent.kv.memory import Copy, Memory
from kvtrace.agent.kv.tensors import OWN, is_tensor, tensors
from kvtrace.agent.kv.touch import Spans, slots_of, spans_of, text_of
from kvtrace.agent.origin import HERE
from kvtrace.agent.state import clock, processor_clock
from kvtrace.agent.watch.modes import OF_THE_VIEW, Modes, of_this_thread
from kvtrace.agent.watch.native import OPERATIONS, NativeCopy, copies_of, watching
from kvtrace.agent.wrap.tracing import set_trace
from kvtrace.trace.facts import Limit

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
    """Which slots of a layer one call touched. ``text``: as in SLOTS records. ``copied``: so many were, parts
    of slots and those that were touched again added up."""

    full: int
    partly: int
    text: str
    copied: int


NO_SLOTS = Touched(0, 0, "/", 0)
"""An operation picked slots, none of them."""


class CopyWatch:
    """Counts for one call. ``start`` and ``stop`` in the thread of the call.

    Args:
        named: the layer that the hook is called for: of layers on the same bytes that one is meant.
        alone: watches that began before it in this thread do not see what it sees.
    """

    def __init__(self, caches: Caches, named: str | None, alone: bool = False) -> None:
        self.alone = alone
        self.caches = caches
        self.named = named
        self._modes: Modes | None = None
        self.before: Callable[[], None] | None = None
        """Called before an operation on a KV tensor is added, where somebody wants that."""
        self.loads, self.saves = False, True
        """What an address that is given out may be for: writing, reading."""
        self._forget()

    def _forget(self) -> None:
        self.cost = 0
        """ns of processor time that watching took so far."""
        self.failed = False
        self.elsewhere = False
        """Native code copied memory that is in no known KV tensor."""
        self._touches: dict[tuple[str, str], list[Spans] | None] = {}
        """(layer, way) -> what was touched; None where it can't be said which slots."""
        self._times: dict[tuple[str, str], int] = {}
        self._later: list[tuple[Layer, str, Access | Memory]] = []
        self.blind: set[str] = set()
        """Layers of which other slots may have been read than those that are known."""
        self.maybe_written: set[str] = set()
        """Layers of which a load asked for the whole address: it may have written any slots."""
        self._took_none: set[str] = set()
        """Layers from which an operation picked slots, none of them."""

    def start(self) -> bool:
        """False where torch is not loaded."""
        modes = of_this_thread()
        if modes is None:
            return False
        modes.add(self)
        self._modes = modes
        return True

    def stop(self) -> None:
        if self._modes is not None:
            self._modes.remove(self)

    def take(self) -> CopyWatch:
        """What was seen so far, as a watch that is over; this one goes on from nothing."""
        seen = copy.copy(self)
        seen.before = None
        self._forget()
        return seen

    @property
    def saw(self) -> bool:
        """Whether a KV tensor was touched at all."""
        return bool(self._touches or self._later or self._took_none or self.blind or self.maybe_written)

    @property
    def whole(self) -> bool:
        """Whether all that was touched so far is known, and whole slots: of none is a half still to come."""
        return not self._later and all(slots and not slots.partly for slots in self.touched().values())

    def copied_some(self, way: str) -> bool:
        """Whether an operation that read (or wrote) slots was seen, as far as that is known yet."""
        known = any(found and its == way for (_, its), found in self._touches.items())
        return known or any(its == way for _, its, _ in self._later)

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
            layout = self.layout(key[0])
            if touches is None or layout is None or self.failed:
                found[key] = None
            elif touches:
                found[key] = _put_together(layout, tuple(touches))
        found = {key: slots for key, slots in found.items() if slots is None or slots.full or slots.partly}
        for layer in self._took_none if not self.unsure else ():
            found.setdefault((layer, READ), NO_SLOTS)
        return found

    def layout(self, layer: str) -> Layout | None:
        known = self.caches.layers.get(layer)
        return None if known is None else self.caches.layout(known)

    def parts_read(self, layer: str) -> list[Spans]:
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
        unknown = any(found is None for found in self._touches.values())
        return self._modes is None or self.failed or self.caches.address_taken or self.elsewhere or unknown

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
                    self._any_slot([layer.name for layer in layers])
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
            self._any_slot(self.caches.layers)
        finally:
            OWN.busy = before
            if tracer is not None:
                set_trace(tracer)
            self.cost += processor_clock() - began

    def _any_slot(self, layers: Iterable[str]) -> None:
        """Any slot of these may have been touched, unseen."""
        if self.loads:
            self.maybe_written.update(layers)
        if self.saves:
            self.blind.update(layers)

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
                self._unknown(layers, way)
            else:
                self._note(layers, way, memory)

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
            if not plan.known:
                limits.say(Limit.OPERATION, plan.full)
                self._unknown(self.caches.at(tensor, view_of(tensor)), WRITTEN if write else READ)
            elif write:
                self._which(plan, tensor, named, WRITES, WRITTEN)
            elif out:
                if plan.name in READS or (copies and out >= tensor.numel()):
                    self._which(plan, tensor, named, READS, READ)
                elif plan.name not in _SUMMARIES:
                    self._unknown(self.caches.at(tensor, view_of(tensor)), READ)
            elif plan.name in READS and tensor.numel():
                layers = self._meant(self.caches.at(tensor, view_of(tensor)))
                self._took_none.update(layer.name for layer in layers)

    # --- which slots ----------------------------------------------------------------------

    def _which(self, plan: Plan, tensor: Any, named: dict[str, Any], table: Table, way: str) -> None:
        access = access_of(tensor, table, plan.name, named)
        self._note(self.caches.at(tensor, access.view), way, access)

    def _note(self, layers: tuple[Layer, ...], way: str, access: Access | Memory) -> None:
        ready = access.ready()
        for layer in self._meant(layers):
            self._at(layer, way)
            if ready:
                self._touch(layer, way, access)
            else:
                self._later.append((layer, way, access))

    def _meant(self, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
        """Of layers on the same bytes the one that the hook is called for."""
        own = next((layer for layer in layers if layer.name == self.named), None)
        return layers if own is None else tuple(one for one in layers if one is own or not one.shares(own))

    def _unknown(self, layers: Iterable[Layer], way: str) -> None:
        for layer in layers:
            self._at(layer, way)
            self._touches[layer.name, way] = None

    def _at(self, layer: Layer, way: str) -> None:
        if way != WRITTEN or (layer.name, way) not in self._times:
            self._times[layer.name, way] = clock()

    def _touch(self, layer: Layer, way: str, access: Access | Memory) -> None:
        layout = self.caches.layout(layer)
        found = None if layout is None else _spans(layout, layer, access)
        here = self._touches.setdefault((layer.name, way), [])
        if here is not None and found is not None and len(here) < _MOST_TOUCHES:
            here.extend([found] if len(found.begins) else ())
        else:
            self._touches[layer.name, way] = None


def _untraced() -> Any:
    """Take this thread's trace function away from our own code: it is called for every function there. From
    3.12 on there is none of ours, and changing it would cost more."""
    if sys.version_info >= (3, 12):
        return None
    tracer = sys.gettrace()
    return tracer if tracer is not None and set_trace(None) else None


_memo: dict[tuple[Any, ...], Spans | None] = {}


def _spans(layout: Layout, layer: Layer, access: Access | Memory) -> Spans | None:
    """What an access touches of a layer. Layers of one shape are looked at once."""
    if not isinstance(access, Access):
        return access.spans(layout, layer)
    start = layer.start - layer.storage
    shifted = access._replace(view=access.view._replace(offset=access.view.offset - start))
    key = shifted.key()
    if key in _memo:
        return _memo[key]
    found = spans_of(pattern_of(access, start))
    if sum(len(part[-1]) for part in key[3:] if part) <= _MOST_KEY:
        if len(_memo) >= _MOST_MEMOS:
            _memo.clear()
        _memo[key] = found
    return found


@lru_cache(maxsize=_MOST_MEMOS)
def _put_together(layout: Layout, touches: tuple[Spans, ...]) -> Touched | None:
    slots = slots_of(layout, touches)
    if slots is None:
        return None
    return Touched(len(slots.full), len(slots.partly), text_of(slots), round(slots.copied))
