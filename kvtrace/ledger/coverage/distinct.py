"""Which hook or op fired in which real step for which layer, each counted once.

Calls are marked in a table: a row a step, a column for each hook or op of a layer. Chunks of a spool overlap
in a few steps at most: the rows of the last ones are carried from chunk to chunk.
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
_LAYER_BITS = 16
_UPDATES = [op.code for op in ops.UPDATES]
_NONE: Array = np.empty(0, dtype=np.int64)


class Key(NamedTuple):
    """One hook or op of one engine in one layer (its number, :mod:`~kvtrace.ledger.coverage.layers`)."""

    tag: int
    what: int
    layer: int


class Calls(NamedTuple):
    """Calls in real steps. ``step``: the place of the step; ``pair``: what << 16 | layer number; ``bits`` of
    each."""

    step: Array
    pair: Array
    bits: Array


NO_CALLS = Calls(_NONE, _NONE, _NONE)


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
    """Counts over one spool. ``steps``: its real forward steps."""

    def __init__(self, executed: Iterable[Executed]) -> None:
        ran = list(executed)
        empty: Array = np.empty(0, dtype=np.int64)
        self.steps, first = np.unique(np.concatenate([empty, *(one.steps for one in ran)]), return_index=True)
        self._mode: NDArray[np.int8] = np.concatenate(
            [np.empty(0, dtype=np.int8), *(one.mode_of for one in ran)]
        )[first]
        self._tag = self.steps >> STEP_SHIFT
        self._columns = _PairColumns()
        self._worked = empty, empty
        """Steps and columns of calls that were seen to do work."""
        self._carried: tuple[Array, NDArray[np.uint8]] = empty, np.empty((0, 0), np.uint8)
        """The last steps, and their rows."""
        self._counts: dict[tuple[int, int, int], Array] = {}
        """(bit, tag, graph mode) -> how often, by column"""

    def worked(self, calls: Calls) -> None:
        """Calls that did work, whatever they declare; to be said before they are counted."""
        order = np.argsort(calls.step, kind="stable")
        self._worked = calls.step[order], self._columns.of(calls.pair[order])

    def counted(self, bit: int) -> Counter[Key]:
        """The pairs in which a call had that bit."""
        found: Counter[Key] = Counter()
        for tag, _, what, layer, number in self._each(bit):
            found[Key(tag, what, layer)] += number
        return found

    @property
    def python(self) -> dict[tuple[int, int, int, int], int]:
        """(tag, graph mode, 0 attention body or 1 save hook, layer number) -> layer-steps"""
        return {
            (tag, mode, int(what == hooks.SAVE_LAYER.code), layer): number
            for tag, mode, what, layer, number in self._each(FIRED)
            if what == hooks.SAVE_LAYER.code or _IS_ATTENTION[what]
        }

    def _each(self, bit: int) -> Iterator[tuple[int, int, int, int, int]]:
        """(tag, graph mode, what, layer, count) of all that was counted."""
        for (of, tag, mode), counts in self._counts.items():
            for at in np.flatnonzero(counts).tolist() if of == bit else ():
                what, layer = divmod(self._columns.pairs[at], 1 << _LAYER_BITS)
                yield tag, mode, what, layer, int(counts[at])

    def calls(self, at: Array, inside: Mask, what: Array, layer: Array, bits: Array) -> Calls:
        """The calls that lie in real steps.

        Args:
            at: the places of their steps; inside: which of them count.
            what: as in Key; a call whose code does not fit counts as outside, as one of no known layer.
        """
        inside = inside & (layer >= 0) & (what >= 0)
        return Calls(at[inside], (what << _LAYER_BITS | layer)[inside], bits[inside])

    def add(self, parts: list[Calls]) -> None:
        """Count what is new in these calls since the steps that are carried."""
        step, pair, bits = (np.concatenate(column) for column in zip(NO_CALLS, *parts, strict=True))
        if not len(step):
            return
        column = self._columns.of(pair)
        begins = np.flatnonzero(np.diff(step, prepend=-1))  # records stand step by step
        steps, of_run = np.unique(step[begins], return_inverse=True)
        row = np.repeat(of_run, np.diff(begins, append=len(step)))
        table = np.zeros((len(steps), len(self._columns.pairs)), np.uint8)
        cell, cells = row * table.shape[1] + column, table.reshape(-1)
        for bit in (FIRED, WORK, RAISED):
            having = (bits & bit) != 0
            cells[cell if having.all() else cell[having]] |= bit
        work_in, work_of = self._worked
        first, last = np.searchsorted(work_in, (steps[0], steps[-1] + 1))
        at, here = locate(steps, work_in[first:last])
        worked = at[here], work_of[first:last][here]
        table[worked] |= WORK * (table[worked] & FIRED)
        self._count_new(steps, table)

    def _count_new(self, steps: Array, table: NDArray[np.uint8]) -> None:
        known, carried = self._carried
        before = np.zeros((len(known), table.shape[1]), np.uint8)
        before[:, : carried.shape[1]] = carried
        at, again = locate(steps, known)
        new = table.copy()
        new[at[again]] &= ~before[again]
        table[at[again]] |= before[again]
        self._count(steps, new)
        steps, table = np.concatenate([known[~again], steps]), np.concatenate([before[~again], table])
        last = np.argsort(steps)[-_CARRIED_STEPS:]
        self._carried = steps[last], table[last]

    def _count(self, steps: Array, new: NDArray[np.uint8]) -> None:
        tags, modes = self._tag[steps], self._mode[steps]
        for tag, mode in set(zip(tags.tolist(), modes.tolist(), strict=True)):
            rows = new[(tags == tag) & (modes == mode)]
            for bit in (FIRED, WORK, RAISED):
                counts = ((rows & bit) != 0).sum(axis=0)
                old = self._counts.get((bit, tag, mode), _NONE)
                counts[: len(old)] += old
                self._counts[bit, tag, mode] = counts


class _PairColumns:
    """A column for each hook or op of a layer, in the order in which they are met."""

    def __init__(self) -> None:
        self.pairs: list[int] = []
        self._bits = 0
        """Of the layers' numbers in :attr:`_known`."""
        self._known: Array = np.empty(0, np.int64)
        """Pair, with so many bits for its layer -> column, -1 none"""

    def of(self, pair: Array) -> Array:
        """The column of each pair."""
        layer = pair & ((1 << _LAYER_BITS) - 1)
        if (bits := int(layer.max(initial=0)).bit_length()) > self._bits or not len(self._known):
            self._bits = max(bits, self._bits)
            self._known = np.full(256 << self._bits, -1, np.int64)
            known = np.array(self.pairs, np.int64)
            self._known[self._short(known)] = np.arange(len(known))
        short = self._short(pair)
        found = self._known[short]
        if len(found) and found.min() < 0:
            new = np.unique(pair[found < 0])
            self._known[self._short(new)] = len(self.pairs) + np.arange(len(new))
            self.pairs += new.tolist()
            found = self._known[short]
        return found

    def _short(self, pair: Array) -> Array:
        return pair >> _LAYER_BITS << self._bits | pair & ((1 << self._bits) - 1)
