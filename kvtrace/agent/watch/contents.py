"""Which blocks of KV some bytes hold, by their content.

Of each slot of a block its first bytes and its last are kept, as they stood in the KV cache at a moment: of
sixteen bytes each one number. A block all of whose pieces stand in some bytes was copied into them; of single
slots nothing is said: in the first layer the same token has the same content wherever it stands. Passing over
the bytes costs the same however many blocks are known: a table says which numbers may begin a piece.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtrace.agent.watch.late import Late
from kvtrace.agent.watch.layout import INNER, Layout

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[Any]
else:
    np = Late("numpy")

PIECE = 16
"""Bytes of a slot's begin, and of its end."""
MOST_KNOWN = 1 << 18
"""Slots, each at one moment; the oldest are forgotten."""
_LEAST_PIECES = 6
"""Of a block; with fewer nothing is said of it."""
_LEAST_VALUES = 6
"""Different bytes in a piece: fewer stand in too many other places."""
_MOST_HITS = 1 << 16
_BITS = 20
_WORD = 8
_ODD, _OTHER = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F


class Moment(NamedTuple):
    """Blocks of one layer as they stood at one moment.

    Attributes:
        layer: its number.
        blocks: of shape (n,).
        given: the step in which each was given out.
        prints: of all that is known of each.
        t: host time, ns.
        keys: of all their pieces that tell anything, rising; ``of``: of which block each is, its place.
        counts: pieces of each block.
    """

    layer: int
    blocks: Array
    given: Array
    prints: Array
    t: int
    keys: Array
    of: Array
    counts: Array


class Found(NamedTuple):
    """Blocks of one layer whose content stands in some bytes. ``prints``: of that content; ``times``: how
    often it stands there; ``t``: when it last was known to stand in the blocks."""

    layer: int
    blocks: Array
    prints: Array
    times: Array
    t: int


class Pieces(NamedTuple):
    """``words``: two numbers of each piece, of shape (blocks, pieces of a block, 2); ``telling``: whether
    there are enough different bytes in it."""

    words: Array
    telling: Array

    def keys(self) -> Array:
        """One number a piece, of shape (blocks, pieces); 0 for those that tell nothing."""
        keys: Array = np.where(self.telling, _keys_of(self.words), np.uint64(0))
        return keys


def pieces_of(address: int, nbytes: int, layout: Layout, blocks: Array) -> Pieces | None:
    """Each slot's first bytes and its last; None where elements of a slot do not lie side by side.

    Args:
        address, nbytes: of the layer in host memory.
        blocks: as the layer's tensor counts them.
    """
    run = layout.dims[-1]
    length = run.size * layout.itemsize
    if run.part != INNER or run.stride != layout.itemsize or length < PIECE:
        return None
    memory: Array = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
    slot, inner = layout.dims[layout.slot_at], layout.inner_at[:-1]
    last = length - PIECE + sum((layout.dims[at].size - 1) * layout.dims[at].stride for at in inner)
    within = (np.arange(slot.size)[:, None] * slot.stride + np.array([0, last])).ravel()
    begins = blocks[:, None] * layout.dims[layout.block_at].stride + within
    data = memory[begins[..., None] + np.arange(PIECE)]
    ordered = np.sort(data, axis=-1)
    telling = (ordered[..., 1:] != ordered[..., :-1]).sum(axis=-1) + 1 >= _LEAST_VALUES
    return Pieces(data.view("<u8"), telling)


def _keys_of(words: Array) -> Array:
    """One number for two. Never 0."""
    one, other = words[..., 0], words[..., 1]
    mixed: Array = (one * np.uint64(_ODD)) ^ (other * np.uint64(_OTHER)) ^ (other >> np.uint64(29))
    keys: Array = mixed | np.uint64(1)
    return keys


def _places(words: Array) -> Array:
    """In the table."""
    places: Array = (words * np.uint64(_ODD)) >> np.uint64(64 - _BITS)
    return places


def prints_of(keys: Array) -> Array:
    """One number a block."""
    odd = np.arange(1, 2 * keys.shape[1], 2, dtype=np.uint64)
    prints: Array = (keys * odd).sum(axis=1, dtype=np.uint64)
    return prints


class Contents:
    """All blocks that are known, each as it stood when it was last looked at, and before."""

    def __init__(self) -> None:
        self._moments: list[Moment] = []
        self._table: Any = None
        self._latest: dict[int, dict[int, int]] = {}
        """Layer -> block -> its print as it was last seen."""
        self.unsure = False
        """The last look found content of which it can't be said in which block it stood."""

    def __len__(self) -> int:
        return sum(len(moment.keys) for moment in self._moments) // 2

    def add(self, layer: int, blocks: Array, given: Array, pieces: Pieces, t: int) -> None:
        """What stands in these blocks now; those that hold what they held are left out."""
        keys = pieces.keys()
        prints = prints_of(keys)
        latest = self._latest.setdefault(layer, {})
        pairs = list(zip(blocks.tolist(), prints.tolist(), strict=True))
        new = np.array([latest.get(block) != own for block, own in pairs], dtype=bool)
        new &= pieces.telling.any(axis=1)
        latest.update(pairs)
        if not new.any():
            return
        own = keys[new]
        of, at = np.nonzero(own)
        order = np.argsort(own[of, at], kind="stable")
        counts = np.bincount(of, minlength=len(own))
        rising = own[of, at][order]
        self._moments.append(
            Moment(layer, blocks[new], given[new], prints[new], t, rising, of[order], counts)
        )
        if self._table is None:
            self._table = np.zeros(1 << _BITS, dtype=bool)
        self._table[_places(pieces.words[new][of, at, 0])] = True
        while len(self._moments) > 1 and len(self) > MOST_KNOWN:
            self._moments.pop(0)  # its bits stay in the table: they only cost

    def known(self, layer: int, blocks: Array) -> list[tuple[int, int]]:
        """Of these blocks those that were seen, with their prints."""
        latest = self._latest.get(layer, {})
        return [(block, latest[block]) for block in blocks.tolist() if block in latest]

    def look(self, data: Any, step: int = 1) -> list[Found]:
        """Blocks whose pieces all stand in ``data``.

        Args:
            data: bytes.
            step: pieces begin at whole multiples of so many bytes.
        """
        self.unsure = False
        words = self._words(data, step)
        if words is None:
            return []
        keys, times = np.unique(words, return_counts=True)
        named: dict[tuple[int, int], list[_Seen]] = {}
        for moment in self._moments:
            for seen in self._in_moment(moment, keys, times):
                named.setdefault((moment.layer, seen.print), []).append(seen)
        found: dict[int, list[_Seen]] = {}
        for (layer, _), same in named.items():
            newest = max(one.given for one in same)
            own = {one.block: one for one in same if one.given == newest}
            if len(own) == 1:
                found.setdefault(layer, []).extend(own.values())
            else:
                self.unsure = True  # blocks of one step that hold the same
        return [_found(layer, every) for layer, every in found.items()]

    def _words(self, data: Any, step: int) -> Array | None:
        """Keys of all places in ``data`` at which a piece may stand."""
        whole = np.frombuffer(data, dtype=np.uint8)
        if self._table is None or not self._moments or len(whole) < PIECE:
            return None
        places = []
        for first in range(0, _WORD, step):
            count = (len(whole) - first) // _WORD
            if count > 0:
                words = np.frombuffer(data, dtype="<u8", offset=first, count=count)
                places.append(np.flatnonzero(self._table[_places(words)]) * _WORD + first)
        at = np.concatenate(places)
        at = at[at <= len(whole) - PIECE]
        if not len(at):
            return None
        return _keys_of(whole[at[:, None] + np.arange(PIECE)].view("<u8"))

    def _in_moment(self, moment: Moment, keys: Array, times: Array) -> list[_Seen]:
        """Blocks of a moment all of whose pieces are among ``keys``."""
        low = np.searchsorted(moment.keys, keys, side="left")
        counts = np.searchsorted(moment.keys, keys, side="right") - low
        total = int(counts.sum())
        if not total:
            return []
        if total > _MOST_HITS:
            self.unsure = True
            return []
        at = np.repeat(low - np.concatenate(([0], np.cumsum(counts)[:-1])), counts) + np.arange(total)
        pieces = np.bincount(moment.of[at], minlength=len(moment.blocks))
        rarest = np.full(len(moment.blocks), _MOST_HITS, dtype=np.int64)
        np.minimum.at(rarest, moment.of[at], np.repeat(times, counts))
        whole = np.flatnonzero(pieces == moment.counts)
        told = whole[moment.counts[whole] >= _LEAST_PIECES]
        self.unsure |= len(told) < len(whole)
        columns = (moment.blocks, moment.prints, moment.given, rarest)
        rows = zip(*(column[told].tolist() for column in columns), strict=True)
        return [_Seen(block, own, given, count, moment.t) for block, own, given, count in rows]


class _Seen(NamedTuple):
    """One block whose content was found ``times`` times; see Moment."""

    block: int
    print: int
    given: int
    times: int
    t: int


def _found(layer: int, every: list[_Seen]) -> Found:
    latest: dict[int, _Seen] = {}
    for one in sorted(every, key=lambda one: one.t):
        latest[one.block] = one
    rows = [latest[block] for block in sorted(latest)]
    blocks = np.array([one.block for one in rows], dtype=np.int64)
    prints = np.array([one.print for one in rows], dtype=np.uint64)
    times = np.array([one.times for one in rows], dtype=np.int64)
    return Found(layer, blocks, prints, times, max(one.t for one in rows))
