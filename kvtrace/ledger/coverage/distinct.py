"""Which hook or op fired in which real step for which layer, each counted once.

Chunks of a spool overlap in a few steps at most: the keys of the last steps are carried from chunk to
chunk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
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


def is_attention(what: Array) -> Mask:
    """Whether a key's ``what`` is an attention op."""
    result: Mask = (what >= OP) & ~np.isin(what & 0x7F, _UPDATES)
    return result


class Distinct:
    """Counts over one spool."""

    def __init__(self, executed: Iterable[Executed]) -> None:
        ran = list(executed)
        empty: Array = np.empty(0, dtype=np.int64)
        self._steps, first = np.unique(
            np.concatenate([empty, *(one.steps for one in ran)]), return_index=True
        )
        self._mode: NDArray[np.int8] = np.concatenate(
            [np.empty(0, dtype=np.int8), *(one.mode_of for one in ran)]
        )[first]
        self._carried = Calls(empty, empty)
        self.fired: Counter[Key] = Counter()
        self.with_work: Counter[Key] = Counter()
        self.raised: Counter[Key] = Counter()
        self.python: Counter[tuple[int, int, int, int]] = Counter()
        """(tag, graph mode, 0 attention body or 1 save hook, layer number) -> layer-steps"""

    def is_real(self, step: Array) -> Mask:
        """Whether each is a real forward step of this spool."""
        return locate(self._steps, step)[1]

    def calls(self, step: Array, what: Array, layer: Array, bits: Array) -> tuple[Calls, Mask]:
        """The calls that lie in real steps, and which of the given ones these are.

        Args:
            what: as in Key; a call whose code does not fit counts as outside, as one of no known layer.
        """
        at, inside = locate(self._steps, step)
        inside &= (layer >= 0) & (what >= 0)
        keys = at << 24 | what << 16 | (layer & 0xFFFF)
        return Calls(keys[inside], bits[inside]), inside

    def add(self, parts: list[Calls]) -> None:
        """Count what is new in these calls since the steps that are carried."""
        if not parts:
            return
        keys = np.concatenate([self._carried.keys, *(part.keys for part in parts)])
        bits = np.concatenate([self._carried.bits, *(part.bits for part in parts)])
        if not len(keys):
            return
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
        merged = np.bitwise_or.reduceat(bits[order], starts)
        bits[len(self._carried.bits) :] = 0
        before = np.bitwise_or.reduceat(bits[order], starts)
        unique = ordered[starts]
        self._count(unique, merged & ~before)
        step_at = unique >> 24
        keep = step_at >= np.unique(step_at)[-_CARRIED_STEPS:][0]
        self._carried = Calls(unique[keep], merged[keep])

    def _count(self, keys: Array, new: Array) -> None:
        self._count_python(keys[(new & FIRED) != 0])
        tags = self._steps[keys >> 24] >> STEP_SHIFT
        low = keys & 0xFFFFFF
        for bit, counts in ((FIRED, self.fired), (WORK, self.with_work), (RAISED, self.raised)):
            having = (new & bit) != 0
            for tag in np.unique(tags[having]).tolist():
                values, numbers = np.unique(low[having & (tags == tag)], return_counts=True)
                for value, n in zip(values.tolist(), numbers.tolist(), strict=True):
                    counts[Key(tag, value >> 16, value & 0xFFFF)] += n

    def _count_python(self, keys: Array) -> None:
        """Layer-steps with an attention body or a save hook, by the graph mode of their step."""
        what = keys >> 16 & 0xFF
        step_at = keys >> 24
        tags = self._steps[step_at] >> STEP_SHIFT
        mode_and_layer = self._mode[step_at].astype(np.int64) << 16 | (keys & 0xFFFF)
        for kind, having in enumerate((is_attention(what), what == hooks.SAVE_LAYER.code)):
            for tag in np.unique(tags[having]).tolist():
                values, counts = np.unique(mode_and_layer[having & (tags == tag)], return_counts=True)
                for value, n in zip(values.tolist(), counts.tolist(), strict=True):
                    self.python[(tag, value >> 16, kind, value & 0xFFFF)] += n
