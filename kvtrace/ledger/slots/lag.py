"""Reads of which nobody can tell whose they were: the holder's of the blocks, or the one's before it.

Where prompts are alike in length and few blocks are free, a request gets the very blocks of the one before
it. A connector that copies some steps later, and does not hold the blocks back until then, reads the right
blocks, and finds the next one's tokens there. In each step it reads what the holder may rightly have stored.
What shows is the beginning: a request that was to be stored lost its blocks before any of them was read. From
then on a read of just the blocks of earlier requests may be for these. A connector whose first read is in
time does not lag behind.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Due(NamedTuple):
    """Blocks of a request (its row) that are to be stored from a step on."""

    row: int
    step: int
    blocks: frozenset[int]


@dataclass(frozen=True)
class Lag:
    """Of one layer.

    Attributes:
        doubted: (row of a request, step) of reads of its blocks that may be for an earlier holder.
        missed: rows of those earlier holders.
    """

    doubted: frozenset[tuple[int, int]] = frozenset()
    missed: frozenset[int] = frozenset()


@dataclass
class _Owners:
    """Of a block: the steps in which it was given out, and to whom (rows)."""

    steps: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def at(self, step: int) -> int:
        """-1 for nobody."""
        place = bisect_right(self.steps, step) - 1
        return self.rows[place] if place >= 0 else -1

    def until(self, step: int) -> int | None:
        """The step in which somebody else gets it."""
        place = bisect_right(self.steps, step)
        return self.steps[place] if place < len(self.steps) else None


def owners_of(given: Iterable[tuple[int, int, int]]) -> Mapping[int, _Owners]:
    """Args:
    given: (step, row of a request, block), by step; nothing that the prefix cache shares.
    """
    found: dict[int, _Owners] = defaultdict(_Owners)
    for step, row, block in given:
        found[block].steps.append(step)
        found[block].rows.append(row)
    return found


def lag(due: Sequence[Due], owners: Mapping[int, _Owners], reads: Mapping[int, Iterable[int]]) -> Lag:
    """Args:
    due: by step.
    reads: step -> blocks that it read in the layer.
    """
    waiting: list[tuple[Due, int]] = []
    doubted: set[tuple[int, int]] = set()
    missed: set[int] = set()
    in_time: set[int] = set()
    at = 0
    for step in sorted(reads):
        while at < len(due) and due[at].step <= step:
            until = _until(due[at], owners)
            if until is not None and due[at].row not in in_time:
                waiting.append((due[at], until))
            at += 1
        read = frozenset(reads[step])
        left, late = set(read), []
        for one, until in waiting:
            if until <= step and one.blocks <= left:
                left -= one.blocks
                late.append(one)
        if late and not left:
            missed |= {one.row for one in late}
            doubted |= {(owners[block].at(step), step) for block in read}
            waiting = [(one, until) for one, until in waiting if one not in late]
        elif not missed:
            break  # it was in time: this connector does not lag behind
        else:
            in_time |= {owners[block].at(step) for block in read if block in owners}
            waiting = [(one, until) for one, until in waiting if one.row not in in_time]
    return Lag(frozenset(doubted), frozenset(missed))


def _until(one: Due, owners: Mapping[int, _Owners]) -> int | None:
    """The step in which the last of its blocks is somebody else's; None where one never is."""
    steps = [owners[block].until(one.step) if block in owners else None for block in one.blocks]
    known = [step for step in steps if step is not None]
    return max(known) if known and len(known) == len(steps) else None
