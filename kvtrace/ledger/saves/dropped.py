"""KV that was read and never left, in steps in which other KV of the same request did."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvtrace.ledger.intervals import Interval, intersect, length, subtract, union
from kvtrace.ledger.saves.rest import Fate
from kvtrace.ledger.slots.reads import Touch


def left_in_part(touches: Sequence[Touch]) -> dict[int, list[Interval]]:
    """Steps in which some of what was read of a request left -> positions of which nothing did, it is sure:
    of several layers nothing at all, and of none all of it. One layer's pieces may just not have been found
    again, or a few of the first layer's in another prompt's KV."""
    read: dict[int, list[Touch]] = defaultdict(list)
    for touch in touches:
        read[touch.step].append(touch)
    found: dict[int, list[Interval]] = {}
    for step, some in read.items():
        if all(touch.fate == Fate.NEVER_LEFT for touch in some):
            continue
        lost: dict[int, list[Interval]] = defaultdict(list)
        for touch in some:
            for layer in range(touch.columns.bit_length()):
                if touch.columns >> layer & 1 and touch.fate == Fate.NEVER_LEFT:
                    lost[layer] += touch.positions
        left = union(
            part
            for touch in some
            if touch.fate not in (Fate.NEVER_LEFT, Fate.READ)
            for part in touch.positions
        )
        found[step] = subtract(_in_several(list(lost.values())), left)
    return found


_SHARE_LOST = 0.2
_LEAST_LAYERS = 2
_LEAST_STEPS = 3


def often_lost(reads: Mapping[int, Sequence[Touch]]) -> bool:
    """Whether so much of what a worker read never left, in several layers or always the same ones, that
    pieces which were not found again don't explain it: then each layer's loss stands for itself.

    Args:
        reads: by the request's row.
    """
    lost = total = layers = 0
    for touch in (touch for touches in reads.values() for touch in touches):
        amount = length(touch.positions) * touch.columns.bit_count()
        total += amount
        if touch.fate == Fate.NEVER_LEFT:
            lost, layers = lost + amount, layers | touch.columns
    several = layers.bit_count() >= _LEAST_LAYERS and lost >= _SHARE_LOST * total
    return several or _always_the_same(reads)


_LEAST_CUT = 3


def cut_records(reads: Mapping[int, Sequence[Touch]], unit: int) -> bool:
    """Whether of all that a worker read the same first part left, again and again, and nothing of the rest,
    and that part ends within what the metadata treats as one: then each record is cut. What is dropped on its
    way to the store is dropped by the unit, or anywhere.

    Args:
        reads: by the request's row.
        unit: tokens; all that the metadata names begins and ends at multiples of it. 0 where that is unknown.
    """
    found = [
        (row, *_left_and_lost([touch for touch in touches if touch.columns >> layer & 1]))
        for row, touches in reads.items()
        for layer in range(max((touch.columns.bit_length() for touch in touches), default=0))
    ]
    size = math.gcd(*(low for _, left, _, _ in found for low, _ in left))
    heads = {high - low for _, left, _, _ in found for low, high in left}
    if not unit or not size or size % unit or len(heads) != 1 or not (head := heads.pop()) % unit:
        return False
    cut: Counter[int] = Counter()
    for row, left, lost, read in found:
        if subtract(read, [(low, low + size) for low, _ in left]):
            return False
        cut[row] += sum(
            intersect(lost, [(low + head, low + size)]) == [(low + head, low + size)] for low, _ in left
        )
    return len(+cut) > 1 and cut.total() >= _LEAST_CUT


def _left_and_lost(touches: Sequence[Touch]) -> tuple[list[Interval], list[Interval], list[Interval]]:
    """Positions of a request in a layer: what left, what never did, all that was read."""
    lost = [part for one in touches if one.fate == Fate.NEVER_LEFT for part in one.positions]
    left = [part for one in touches if one.fate not in (Fate.NEVER_LEFT, Fate.READ) for part in one.positions]
    return union(left), union(lost), union(part for one in touches for part in one.positions)


def _always_the_same(reads: Mapping[int, Sequence[Touch]]) -> bool:
    """Whether of some layers nothing ever left, in several steps, and of each other one all did: one piece
    may be missed, not every one of a layer beside none of the others."""
    fates: dict[int, set[Fate]] = defaultdict(set)
    steps: dict[int, set[int]] = defaultdict(set)
    every = [touch for touches in reads.values() for touch in touches]
    newest = max((touch.step for touch in every), default=0)
    for touch in every:
        if touch.step == newest and touch.fate == Fate.READ:
            continue  # it may still be on its way
        for layer in range(touch.columns.bit_length()):
            if touch.columns >> layer & 1:
                fates[layer].add(touch.fate)
                steps[layer].add(touch.step)
    gone = {layer for layer, said in fates.items() if said == {Fate.NEVER_LEFT}}
    others = {fate for layer, said in fates.items() if layer not in gone for fate in said}
    seen = others and others.isdisjoint((Fate.NEVER_LEFT, Fate.READ))
    return bool(seen) and any(len(steps[layer]) >= _LEAST_STEPS for layer in gone)


def _in_several(layers: Sequence[list[Interval]]) -> list[Interval]:
    """Positions that stand in more than one of them."""
    once: list[Interval] = []
    several: list[Interval] = []
    for parts in map(union, layers):
        several += intersect(once, parts)
        once = union([*once, *parts])
    return union(several)


def split(touch: Touch, sure: list[Interval]) -> list[Touch]:
    """A touch of which nothing was seen to leave, by whether it is sure that it did not."""
    gone = intersect(list(touch.positions), sure)
    rest = subtract(list(touch.positions), gone)
    by_fate = ((Fate.NEVER_LEFT, gone), (Fate.READ, rest))
    return [replace(touch, fate=fate, positions=tuple(parts)) for fate, parts in by_fate if parts]
