"""The state tensors of this process's worker (Mamba, linear attention), and which states a connector reads
and writes.

A layer with a state keeps it in several tensors, each with one part of a state in each block of the layer's
KV cache group. They are watched like KV, by a watch of their own beside it: what a slot is there is a block
here. They mostly lie in memory that attention layers use too: whose a block was, the scheduler's block tables
say.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from kvtrace.agent.ids import Names
from kvtrace.agent.kv.caches import Caches, Layer, layer_of
from kvtrace.agent.kv.layout import Layout, layout_of
from kvtrace.agent.kv.memory import Copy, Numbered
from kvtrace.agent.kv.tensors import OWN, tensors
from kvtrace.agent.state import AGENT
from kvtrace.agent.watch.operations import GIVEN_OUT, CopyWatch, Touched
from kvtrace.agent.watch.records import FLAGS, Touching
from kvtrace.trace.format import Kind, Role, pack_head
from kvtrace.trace.rows import StatesTouched

_MOST_NAMES = 64


class StatePart(NamedTuple):
    """One tensor of a layer's state: the ``at``-th of ``parts``."""

    layer: str
    at: int
    parts: int


class StateCaches(Caches):
    """``layers``: by layer and number of the tensor. ``complete``: all that the KV cache has are known."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, StatePart] = {}
        self.complete = False

    def register(self, kv_caches: Any) -> None:
        """``register_kv_caches``: of {layer name: tensor, or tensors} those of several tensors: states."""
        self.parts.clear()
        self.complete = False
        several = {str(name): value for name, value in kv_caches.items() if len(tensors(value)) > 1}
        super().register(several)

    def configure(self, kv_cache_config: Any, context: Any, kept: Mapping[str, str] | None = None) -> None:
        """Blocks, from vLLM's KVCacheConfig; layers not yet known, from the static forward context.

        Args:
            kept: layer -> what it keeps, of those that keep no KV of tokens.
        """
        wanted = [name for name, what in (kept or {}).items() if what == "state"]
        blocks = getattr(kv_cache_config, "num_blocks", 0)
        known = {part.layer for part in self.parts.values()}
        for name in wanted:
            if name not in known:
                self.add(name, getattr(context.get(name), "kv_cache", None))
        for key, part in list(self.parts.items()):
            layer = self.layers.get(key)
            if part.layer not in wanted or layer is None or layer.shape[0] != blocks:
                self.layers.pop(key, None)
                del self.parts[key]
        self._blocks = dict.fromkeys(self.parts, (blocks, 1))
        seen = [part.layer for part in self.parts.values()]
        sizes = {part.layer: part.parts for part in self.parts.values()}
        self.complete = bool(wanted) and all(seen.count(name) == sizes.get(name, -1) for name in wanted)
        self._changed()

    def add(self, name: str, value: Any) -> None:
        found = tensors(value)
        before, OWN.busy = OWN.busy, True
        try:
            for at, tensor in enumerate(found):
                key = f"{name}#{at}"
                layer = layer_of(key, tensor)
                if layer is not None and layer.shape:
                    self._tensors[key] = weakref.ref(tensor)
                    self.layers[key] = layer
                    self.parts[key] = StatePart(name, at, len(found))
        finally:
            OWN.busy = before
        self._changed()

    def layout(self, layer: Layer) -> Layout | None:
        """A block is a slot of its own."""
        (blocks, *inner), (stride, *strides) = layer.shape, layer.strides
        shape, steps = (blocks, 1, *inner), (stride, stride, *strides)
        return layout_of(shape, steps, layer.itemsize, blocks, 1, (0, 1))


STATES = StateCaches()


class StateWatch(CopyWatch):
    """What one call does with states."""

    def __init__(self) -> None:
        super().__init__(STATES, None)

    def copied(self, copies: Iterable[Copy]) -> None:
        """Slots by number are those of KV of tokens: which states lie there is not known."""
        copies = list(copies)
        self.elsewhere |= any(isinstance(memory, Numbered) for _, memory in copies)
        super().copied([one for one in copies if not isinstance(one[1], Numbered)])


class TouchingStates(Touching):
    """The same of states. ``sure``: of a hook's call, whether nothing else can have read or written a state
    in it; None of work in the background."""

    sure: bool | None = None

    def _write(self, known: bool = True) -> None:
        touched: dict[tuple[str, str], Touched | None] = dict(self.watch.touched())
        if not known:
            touched.update(self.watch.unsettled())
        for (key, way), blocks in touched.items():
            if key not in STATES.parts or (blocks is not None and not blocks.full + blocks.partly):
                continue
            part = STATES.parts[key]
            # What was given out by address, or is not known, is no touch of known blocks.
            ident = _NAMES.id(blocks.text) if blocks is not None and way != GIVEN_OUT else 0
            t = 0 if self.code else self.watch.time(key, way)
            self._add(FLAGS[way], t, AGENT.id(part.layer), ident, part)
        if self.sure is not None:
            sure = self.sure and known and not self.watch.unsure
            self._add(0, 0, 0, 0, StatePart("", int(sure), 0))

    def _add(self, marks: int, t: int, layer: int, blocks: int, part: StatePart) -> None:
        head = pack_head(Kind.STATES, Role.WORKER, self.code, self.connector, marks, self.thread)
        AGENT.add(StatesTouched(head, t or self.t, layer, self.step, blocks, part.at, part.parts, self.call))


_NAMES = Names(_MOST_NAMES)
