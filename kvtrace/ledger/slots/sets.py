"""Sets of KV slots, as the records name them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from kvtrace.ledger.intervals import Interval, length

_MOST = 1 << 40
"""A corrupt text can name any number: what is greater is left out."""


@dataclass(frozen=True)
class SlotSet:
    """Slots as intervals of block * block size + offset: those touched in full, and in part."""

    full: tuple[Interval, ...]
    partly: tuple[Interval, ...] = ()

    @property
    def slots(self) -> int:
        """Of those touched in full."""
        return length(self.full)


@lru_cache(1 << 12)  # the layers of a step have the same ones
def parse(text: str) -> SlotSet:
    """The set that a name of :class:`kvtrace.trace.rows.SlotsTouched` gives: ``1280+128,2048+64/3000+1``.
    What can't be read is left out."""
    full, _, partly = text.partition("/")
    return SlotSet(_runs(full), _runs(partly))


def _runs(text: str) -> tuple[Interval, ...]:
    found: list[Interval] = []
    for run in text.split(",") if text else ():
        first, _, count = run.partition("+")
        if first.isdecimal() and count.isdecimal() and int(first) < _MOST and 0 < int(count) < _MOST:
            found.append((int(first), int(first) + int(count)))
    return tuple(found)


def blocks_in(runs: Iterable[Interval], size: int) -> Iterator[tuple[int, int, int]]:
    """(block, first offset, end of the offsets) of each block that the runs touch."""
    for start, end in runs:
        for block in range(start // size, (end - 1) // size + 1):
            yield block, max(start - block * size, 0), min(end - block * size, size)
