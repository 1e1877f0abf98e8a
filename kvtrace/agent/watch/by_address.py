"""KV that a connector reads by the address of a whole tensor: found again by its content.

``kv.numpy()[slots]`` reads KV past torch's dispatcher: that the address of all of a layer was given out is
seen, which slots were read is not. So what stands in the slots is noted when the address is asked for, and
when a call begins that may still have it: of each slot in a block that a prompt got lately its first and
last bytes (``contents.py``). They are looked for in the tensors that the connector goes on with, and in what
leaves the process. What is found was read, where all that it was found in is known blocks and zeros; else,
where nothing is found, and of the zeros, it stays unknown which slots were.

Nothing is done before the address of a whole KV tensor in host memory was given out.
"""

from __future__ import annotations

import ctypes
import threading
import zlib
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtrace.agent.block_tables import groups_of
from kvtrace.agent.state import AGENT, clock
from kvtrace.agent.watch.caches import CACHES, Layer
from kvtrace.agent.watch.contents import Contents, Found, pieces_of, prints_of
from kvtrace.agent.watch.late import Late
from kvtrace.agent.watch.layout import Layout
from kvtrace.agent.watch.tensors import extent
from kvtrace.agent.watch.touch import Touch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[Any]
else:
    np = Late("numpy")

_MOST_GIVEN = 512
"""Lists of blocks that the scheduler gave out, the latest."""
_MOST_SLOTS = 1 << 16
"""Of one layer at one moment, those of the latest blocks."""
_MOST_TENSOR = 8 << 20
_LEAST_TENSOR = 128
_MOST_OTHER, _SHARE_OTHER = 512, 0.005
"""Of some bytes that hold KV, such as are of no slot: headers and keys."""
_LEAST_BLOCK = 1024
"""Bytes in which nothing was found that may hold KV; questions and headers are shorter."""
_ZEROS = bytes(16)
_MOST_SEEN = 256
"""Tensors of one call that are known by what was in them."""


class Read(NamedTuple):
    """Blocks of a layer that were read by address.

    Attributes:
        times: how often each of ``blocks`` was found.
        size: slots in a block.
        new: slots of those of which that was not known.
        now: the new ones still hold what was found. ``t``: host time at which they were known to.
    """

    layer: Layer
    blocks: Array
    times: Array
    size: int
    new: Array
    now: bool
    t: int


class Here:
    """Of one call. ``asked``: layers of which the address was given out in it: their blocks may be read once
    more; ``said``: layer -> blocks, with their prints, that were found in it; ``blank``: as many zeros as a
    block has stood beside them: of which one they are can't be said."""

    def __init__(self) -> None:
        self.asked: set[str] = set()
        self.said: dict[str, set[tuple[int, int]]] = {}
        self.blank = False


class ByAddress:
    """Of this process's worker. Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        self.given: dict[str, Layer] = {}
        """Layers in host memory of which the address of all was given out."""
        self.on = False
        """There is something to look for, of one connector at least."""
        self._asked: set[int] = set()
        self._exact: set[int] = set()
        """Connectors that were given an address; those whose copies by address out of KV are seen one by one.
        0 stands for all: whose work it was is not known."""
        self._blocks: deque[tuple[int, int, list[int]]] = deque(maxlen=_MOST_GIVEN)
        """(group, step, blocks)"""
        self._groups: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._contents = Contents()
        self._taken: dict[str, tuple[int, int]] = {}
        self._known: dict[tuple[int, str], set[tuple[int, int]]] = {}
        """(connector, layer) -> slots and keys of what was seen to be read: what is kept may leave more than
        once."""

    def open(self, kv_cache_config: Any) -> None:
        """The worker's KV cache is made."""
        self._lock = threading.Lock()
        with self._lock:
            self._open()
            for group, one in enumerate(getattr(kv_cache_config, "kv_cache_groups", None) or ()):
                for name in getattr(one, "layer_names", ()):
                    self._groups[str(name)] = group

    def forget(self) -> None:
        """A spool begins. In a forked child a lock that another thread held stays held: it gets a new one."""
        groups, blocks = self._groups, self._blocks
        self._lock = threading.Lock()
        self._open()
        self._groups, self._blocks = groups, blocks

    def hidden(self, connector: int) -> bool:
        """Whether a connector may read by address what can only be found again."""
        mine = {0, connector}
        return self.on and not mine & self._exact and (not connector or bool(mine & self._asked))

    def copies(self, connector: int) -> None:
        """A connector's copy by address out of KV was seen, as it was made."""
        if connector not in self._exact:
            self._exact.add(connector)
            self._settle()

    def _settle(self) -> None:
        self.on = 0 not in self._exact and not self._asked <= self._exact

    def scheduled(self, output: Any, step: int) -> None:
        """A step that computes prompt tokens begins: the blocks that were given out for it."""
        for new in output.scheduled_new_reqs:
            self._gave(new.block_ids, step)
        cached = getattr(output, "scheduled_cached_reqs", [])
        every = [one.new_block_ids for one in cached] if isinstance(cached, list) else cached.new_block_ids
        for blocks in every:
            if blocks:
                self._gave(blocks, step)

    def _gave(self, blocks: Any, step: int) -> None:
        for group, own in enumerate(groups_of(blocks)):
            if own:
                self._blocks.append((group, step, list(own)))

    # --- what stands in the slots ---------------------------------------------------------

    def give(self, layers: tuple[Layer, ...], call: int, connector: int) -> None:
        """The address of all of these, in host memory, was given to a connector in that call."""
        for layer in layers:
            self.given[layer.name] = layer
        if connector not in self._asked:
            self._asked.add(connector)
            self._settle()
        if self.hidden(connector):
            self.note(call, layers)

    def note(self, call: int, layers: tuple[Layer, ...] = (), named: str | None = None) -> None:
        """Note what stands in the slots now, once a call. Never raises.

        Args:
            layers: () for all of which the address was given out, or ``named`` alone.
        """
        try:
            wanted = layers or tuple(self.given.values())
            own = [layer for layer in wanted if layer.name == named]
            with self._lock:
                for layer in own or wanted:
                    step = AGENT.worker.latest
                    if self._taken.get(layer.name) != (step, call) and CACHES.layers.get(layer.name) == layer:
                        self._taken[layer.name] = step, call
                        self._note(layer)
        except Exception:
            self._gives_up()

    def _note(self, layer: Layer) -> None:
        alive = CACHES.tensor(layer.name)
        if alive is None:
            return
        layout = CACHES.layout(layer)
        found = self._candidates(layer.name, layout) if layout is not None else None
        if layout is None or found is None:
            return
        blocks, given = found
        pieces = pieces_of(layer.start, layer.end - layer.start, layout, blocks)
        if pieces is not None:
            number = self._numbers.setdefault(layer.name, len(self._numbers))
            self._contents.add(number, blocks, given, pieces, clock())

    def _candidates(self, name: str, layout: Layout) -> tuple[Array, Array] | None:
        """(blocks, as the tensor counts them; the step in which each was given out) of the latest."""
        group, size = self._groups.get(name, 0), layout.dims[layout.slot_at].size
        blocks: dict[int, int] = {}
        for of_group, step, own in reversed(self._blocks):
            if of_group == group:
                for block in own:
                    blocks.setdefault(block, step)
            if len(blocks) * size >= _MOST_SLOTS:
                break
        blocks.pop(0, None)  # the null block is nobody's
        if not blocks:
            return None
        split = (CACHES.block_dim(CACHES.layers[name]) or (0, 1))[1]
        ids = np.array(sorted(blocks), dtype=np.int64)
        given = np.repeat([blocks[block] for block in ids.tolist()], split)
        parts: Array = (ids[:, None] * split + np.arange(split)).ravel()
        good = parts < layout.dims[layout.block_at].size
        return parts[good], given[good]

    # --- what was found -------------------------------------------------------------------

    def look(self, data: Any, here: Here, connector: int, step: int = 1) -> list[Read] | None:
        """Slots that were read, for all that these bytes say; None where some of the bytes are of no slots
        that are known, but for zeros. Never raises.

        Args:
            here: what is known of the call.
            connector: whose call it is, 0 where that is not known.
        """
        try:
            with self._lock:
                found = self._contents.look(data, step)
                layouts = [self._layer(one.layer) for one in found]
                if self._contents.unsure or not _explained(data, found, layouts):
                    return None
                here.blank |= _has_blank(data, layouts)
                return [
                    self._read(one, *own, here, connector) for one, own in zip(found, layouts, strict=True)
                ]
        except Exception:
            self._gives_up()
            return None

    def _layer(self, wanted: int) -> tuple[Layer, Layout]:
        name = next(name for name, number in self._numbers.items() if number == wanted)
        layout = CACHES.layout(CACHES.layers[name])
        if layout is None:
            raise ValueError(name)
        return CACHES.layers[name], layout

    def _read(self, found: Found, layer: Layer, layout: Layout, here: Here, connector: int) -> Read:
        known = self._known.setdefault((connector, layer.name), set())
        somebody = self._known.get((0, layer.name), known)
        names = list(zip(found.blocks.tolist(), found.prints.tolist(), strict=True))
        again = layer.name in here.asked
        said = here.said.setdefault(layer.name, set())
        before = (said,) if again else (known, somebody)
        new = np.array([not any(one in there for there in before) for one in names], dtype=bool)
        known.update(names)
        said.update(names)
        blocks, prints = found.blocks[new], found.prints[new]
        alive = CACHES.tensor(layer.name)
        pieces = (
            pieces_of(layer.start, layer.end - layer.start, layout, blocks) if alive is not None else None
        )
        now = pieces is not None and bool((prints_of(pieces.keys()) == prints).all())
        size = layout.dims[layout.slot_at].size
        slots = (blocks[:, None] * size + np.arange(size)).ravel()
        return Read(layer, found.blocks, found.times, size, slots, now, found.t)

    def saw(self, layer: Layer, touches: list[Touch], connector: int) -> None:
        """A tensor operation of a connector was seen to read these: what is found of them later is no other
        read."""
        try:
            number = self._numbers.get(layer.name)
            if number is not None:
                with self._lock:
                    known = self._known.setdefault((connector, layer.name), set())
                    layout = CACHES.layout(layer)
                    size = layout.dims[layout.slot_at].size if layout is not None else 1
                    for touch in touches:
                        blocks = np.unique(touch.slots // size)
                        known.update(self._contents.known(number, blocks))
        except Exception:
            self._gives_up()

    def _gives_up(self) -> None:
        self.given, self.on = {}, False
        AGENT.failed("by address")


BY_ADDRESS = ByAddress()


class Tensors:
    """The tensors of one call in which it was looked for KV."""

    def __init__(self) -> None:
        self._seen: set[tuple[int, int]] = set()

    def bytes_of(self, tensor: Any) -> bytes | None:
        """What lies in a tensor in host memory; None where it is too little, too much or was seen."""
        first, last = extent(tensor)
        size = last - first
        if not _LEAST_TENSOR <= size <= _MOST_TENSOR or size > 2 * tensor.numel() * tensor.element_size():
            return None
        data = ctypes.string_at(first, size)
        key = size, zlib.crc32(data)
        if key in self._seen or len(self._seen) >= _MOST_SEEN:
            return None
        self._seen.add(key)
        return data


def _has_blank(data: Any, layouts: list[tuple[Layer, Layout]]) -> bool:
    """Whether there are zeros where a block may be."""
    sizes = [layer.nbytes // layout.dims[layout.block_at].size for layer, layout in layouts]
    return bool(sizes) and data.find(bytes(min(sizes))) >= 0


def _explained(data: Any, found: list[Found], layouts: list[tuple[Layer, Layout]]) -> bool:
    """Whether some bytes are of these blocks, but for zeros, headers, keys and what is too short for a block.
    Not where they are too short for all of these: what one that was half full held stands in another one,
    too."""
    if not found:
        return len(data) < _LEAST_BLOCK
    size = 0
    for one, (layer, layout) in zip(found, layouts, strict=True):
        block = layer.nbytes // layout.dims[layout.block_at].size
        size += int(one.times.sum()) * block
    if size > len(data):
        return False
    rest = len(data) - data.count(_ZEROS) * len(_ZEROS) - size
    return bool(rest <= _MOST_OTHER + len(data) * _SHARE_OTHER)
