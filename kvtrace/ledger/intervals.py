"""Half-open intervals of positions, as sorted lists of (start, end)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

Interval = tuple[int, int]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Sorted, disjoint, non-empty intervals that cover the same positions."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            if end > merged[-1][1]:
                merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def subtract(intervals: list[Interval], holes: list[Interval]) -> list[Interval]:
    """What of ``intervals`` lies outside ``holes``; both as :func:`union` returns them."""
    left: list[Interval] = []
    for start, end in intervals:
        at = start
        for low, high in holes:
            if high <= at:
                continue
            if low >= end:
                break
            if low > at:
                left.append((at, low))
            at = max(at, high)
        if at < end:
            left.append((at, end))
    return left


def intersect(intervals: list[Interval], others: list[Interval]) -> list[Interval]:
    """What of ``intervals`` lies inside ``others``; both as :func:`union` returns them."""
    return subtract(intervals, subtract(intervals, others))


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in intervals)


def covers(intervals: list[Interval], position: int) -> bool:
    """Whether a :func:`union` holds ``position``."""
    at = bisect_right(intervals, (position, 1 << 62)) - 1
    return at >= 0 and position < intervals[at][1]
