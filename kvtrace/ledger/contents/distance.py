"""How far loaded KV may be from what was computed, and still be that, rounded."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median
from typing import NamedTuple

FAR = 0.5
"""Of the way to KV of other tokens: a store of eight bits a number goes 0.01 of it, one of two about 0.2, one
of four with one scale for channels of very different size 0.3."""
TWO_BITS = 0.2
"""What is farther may have been rounded, or is in part another's."""
OTHER_TOKENS = "KV of other tokens"
"""Words of what is said of a distance."""
TIMES = 2**0.5
"""Numbers that are so much larger, or smaller, are none that were rounded."""


class Distance(NamedTuple):
    """Of one block, or of several.

    Attributes:
        differing: signs that do.
        usual: so many would in KV of other tokens.
        times: how many times as large as what was computed.
    """

    differing: int
    usual: float
    times: float

    @property
    def share(self) -> float:
        """0.0 for equal KV, about 1.0 for KV of other tokens."""
        return self.differing / self.usual

    @property
    def far(self) -> bool:
        """Whether it is surely not what was computed: few signs say less."""
        return self.share >= FAR + self.usual**-0.5 or self._of_other_size

    @property
    def near(self) -> bool:
        """Whether it surely is that, rounded."""
        return self.share <= FAR - self.usual**-0.5 and not self._of_other_size

    @property
    def _of_other_size(self) -> bool:
        return not 1 / TIMES < self.times < TIMES

    def __str__(self) -> str:
        way = f"{self.share * 100:.0f} % of the way to" if self.share < 1 else "no nearer than"
        return f"{way} {OTHER_TOKENS}, {self.times:.2f} times as large"


def sum_of(found: Iterable[Distance | None]) -> Distance | None:
    """Of several blocks together; None where it is not known of any."""
    every = [one for one in found if one is not None]
    if not every:
        return None
    differing, usual = sum(one.differing for one in every), sum(one.usual for one in every)
    return Distance(differing, usual, median(one.times for one in every))
