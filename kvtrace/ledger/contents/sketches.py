"""How far loaded KV is from what its tokens computed to, by sketches (SKETCHES records).

Of KV that has nothing in common half of the signs differ, or fewer where all KV of a model is alike: how far
blocks of different tokens are apart is measured in the run, and is the unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from statistics import median

from kvtrace.ledger.contents.distance import Distance
from kvtrace.ledger.contents.prints import Block, Origin, Printed
from kvtrace.trace.rows import SIGNS, SIZE_STEPS

_FEWEST, _MOST = 3, 256
"""Pairs of blocks of different tokens that are compared."""
_MASK = (1 << SIGNS) - 1


class Sketches:
    """Those of the workers of one shape."""

    def __init__(self, workers: Sequence[Printed]) -> None:
        self._workers = workers

    @cached_property
    def _of(self) -> Mapping[tuple[int, int, int], int]:
        """(row, begin, step) of a block -> its sketch."""
        return {key: value for one in self._workers for key, value in one.sketches().items()}

    def of(self, block: Block) -> int:
        return self._of.get((block.row, block.start, block.step), 0)

    @cached_property
    def usual(self) -> float:
        """How many signs differ between blocks of different tokens; 0.0 not known."""
        every = (block for one in self._workers for block in one.blocks)
        computed = [block for block in every if block.origin is Origin.COMPUTED]
        found = [
            (self.of(one) ^ self.of(other)) & _MASK
            for one, other in pairwise(computed[:: len(computed) // _MOST + 1])
            if (one.row, one.start) != (other.row, other.start) and self.of(one) and self.of(other)
        ]
        differing = [signs.bit_count() for signs in found if signs]
        return median(differing) if len(differing) >= _FEWEST else 0.0

    def distance(self, block: Block, computed: Iterable[Block], part: float) -> Distance | None:
        """From the nearest of these; None where it is not known. ``part``: of its layers, that differ."""
        own, others = self.of(block), [self.of(one) for one in computed]
        found = [_distance(own, other, self.usual, part) for other in others if own and other and self.usual]
        return min(found, key=lambda one: one.differing, default=None)


def _distance(one: int, other: int, usual: float, part: float) -> Distance:
    """Each sign is that of a sum over all layers: of two sums it differs by the angle between them."""
    cosine = 1 - part * (1 - math.cos(math.pi * usual / SIGNS))
    times = 2 ** (((one >> SIGNS) - (other >> SIGNS)) / SIZE_STEPS / part)
    return Distance(((one ^ other) & _MASK).bit_count(), SIGNS * math.acos(cosine) / math.pi, times)
