"""Which hook or op fired in which real step for which layer, each counted once.

Chunks of a spool overlap in a few steps at most: the keys of the last steps are carried from chunk to
chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtrace.ledger.steps import Array, Executed, Mask, locate
from kvtrace.trace import hooks, ops
from kvtrace.trace.format import STEP_SHIFT

FIRED, WORK, RAISED = 1, 2, 4
"""Bits of a call. WORK: of an op that its body was called directly."""

OP = 0x80
"""In the ``what`` of a key: an op, no hook; the rest is its code."""
_CARRIED_STEPS = 8
_BITS = 3
_HOOKS = 128
"""In the counts of graph modes: from here on of save hooks, before it of attention bodies."""
_UPDATES = [op.code for op in ops.UPDATES]


class Key(NamedTuple):
    """One hook or op of one engine in one layer (its number, :mod:`~kvtrace.ledger.coverage.layers`)."""

    tag: int
    what: int
    layer: int


class Calls(NamedTuple):
    """Calls in real steps: a key of (place of the step, what, layer number) and bits each."""

    keys: Array
    bits: Array


def what_of(codes: Array, is_op: bool) -> Array:
    """The ``what`` of hooks or ops by their codes, -1 where a code does not fit."""
    result: Array = np.where(codes < OP, codes | (OP if is_op else 0), -1)
    return result


_IS_ATTENTION = (np.arange(256) >= OP) & ~np.isin(np.arange(256) & 0x7F, _UPDATES)


def is_attention(what: Array) -> Mask:
    """Whether a key's ``what`` is an attention op."""
    result: Mask = _IS_ATTENTION[what] & (what >= 0)
    return result


class Distinct:
    """Counts over one spool. ``steps``: its real forward steps; ``work``: sorted keys of calls that were seen
    to do work, whatever they declare."""

    def __init__(self, executed: Iterable[Executed]) -> None:
        ran = list(executed)
        empty: Array = np.empty(0, dtype=np.int64)
        self.steps, first = np.unique(np.concatenate([empty, *(one.steps for one in ran)]), return_index=True)
        self._mode: NDArray[np.int8] = np.concatenate(
            [np.empty(0, dtype=np.int8), *(one.mode_of for one in ran)]
        )[first]
        self._tag = self.steps >> STEP_SHIFT
        self._carried = Calls(empty, empty)
        self.work = empty
        self._of = {bit: _Counts() for bit in (FIRED, WORK, RAISED)}
        self._python = _Counts()

    def counted(self, bit: int) -> Counter[Key]:
        """The pairs in which a call had that bit."""
        return _keyed(self._of[bit])

    @property
    def python(self) -> dict[tuple[int, int, int, int], int]:
        """(tag, graph mode, 0 attention body or 1 save hook, layer number) -> layer-steps"""
        return {
            (tag, what % _HOOKS - 1, int(what >= _HOOKS), layer): n
            for tag, what, layer, n in self._python.items()
        }

    def calls(self, at: Array, inside: Mask, what: Array, layer: Array, bits: Array) -> Calls:
        """The calls that lie in real steps.

        Args:
            at: the places of their steps; inside: which of them count.
            what: as in Key; a call whose code does not fit counts as outside, as one of no known layer.
        """
        inside = inside & (layer >= 0) & (what >= 0)
        keys = at << 24 | what << 16 | (layer & 0xFFFF)
        return Calls(keys[inside], bits[inside])

    def add(self, parts: list[Calls]) -> None:
        """Count what is new in these calls since the steps that are carried."""
        given = [part.keys << _BITS | part.bits for part in parts if len(part.keys)]
        if not given:
            return
        sorted_ = np.sort(np.concatenate(given), kind="stable")  # in order already, for the most part
        keys = sorted_ >> _BITS
        starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        unique: Array = keys[starts]
        bits: Array = np.bitwise_or.reduceat(sorted_ & ((1 << _BITS) - 1), starts)
        first, last = np.searchsorted(self.work, unique[[0, -1]])
        at, called = locate(unique, self.work[first : last + 1])
        bits[at[called]] |= WORK
        at, again = locate(unique, self._carried.keys)
        before = np.zeros_like(bits)
        before[at[again]] = self._carried.bits[again]
        self._count(unique, bits & ~before)
        old = Calls(self._carried.keys[~again], self._carried.bits[~again])
        self._carry(np.concatenate([old.keys, unique]), np.concatenate([old.bits, bits | before]))

    def _carry(self, keys: Array, bits: Array) -> None:
        """Keep what is known of the last steps."""
        step_at = keys >> 24
        last = step_at >= np.unique(step_at)[-_CARRIED_STEPS:][0]
        keys, bits = keys[last], bits[last]
        order = np.argsort(keys)
        self._carried = Calls(keys[order], bits[order])

    def _count(self, keys: Array, new: Array) -> None:
        step_at, what, layer = keys >> 24, keys >> 16 & 0xFF, keys & 0xFFFF
        tags = self._tag[step_at]
        for bit, counts in self._of.items():
            having = (new & bit) != 0
            if having.all():
                counts.add(tags, what, layer)
            elif having.any():
                counts.add(tags[having], what[having], layer[having])
        fired = (new & FIRED) != 0
        body = fired & is_attention(what)
        save = fired & (what == hooks.SAVE_LAYER.code)
        for first, having in ((0, body), (_HOOKS, save)):
            if having.any():
                mode = self._mode[step_at[having]].astype(np.int64) + 1 + first
                self._python.add(tags[having], mode, layer[having])


class _Counts:
    """How often each (tag, what, layer) was counted, ``what`` below 256."""

    def __init__(self) -> None:
        self._found: dict[int, Array] = {}  # tag -> (256, layers)

    def add(self, tags: Array, what: Array, layer: Array) -> None:
        width = 1 << int(layer.max()).bit_length()
        here = np.unique(tags[np.concatenate([[True], tags[1:] != tags[:-1]])]).tolist()
        for tag in here:
            mine = slice(None) if len(here) == 1 else tags == tag
            flat = np.bincount(what[mine] * width + layer[mine], minlength=256 * width)
            new = flat.reshape(256, width).astype(np.int64, copy=False)
            old = self._found.get(tag)
            if old is None or old.shape[1] < width:
                self._found[tag] = new
                new = old if old is not None else new[:, :0]
            self._found[tag][:, : new.shape[1]] += new

    def items(self) -> Iterator[tuple[int, int, int, int]]:
        """(tag, what, layer, count) of all that was counted."""
        for tag, counts in self._found.items():
            for what, layer in np.argwhere(counts).tolist():
                yield tag, what, layer, int(counts[what, layer])


def _keyed(counts: _Counts) -> Counter[Key]:
    return Counter({Key(tag, what, layer): n for tag, what, layer, n in counts.items()})
