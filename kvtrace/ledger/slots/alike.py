"""Layers whose slots were touched alike, all the run long: gone through once for all of them.

A connector treats most layers the same, each in a call of its own. What follows from their records is the
same then, but for the times, of which only the order counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvtrace.ledger.slots.touches import BACKGROUND, Touches
from kvtrace.trace import rows

_NO_THREAD = (1 << 48) - 1
"""Of the head of a record."""


class Alike(NamedTuple):
    """A record in each of these layers. ``layers``: which of the classes; ``record``: of the first of them,
    ``t``: the earliest; the others: as of Touches."""

    record: rows.SlotsTouched
    t: int
    layers: int
    during: int
    after: bool
    used: bool

    @property
    def background(self) -> bool:
        return bool(rows.code(self.record.head) == BACKGROUND)

    @property
    def asked_in(self) -> int:
        """The earlier step that asked for this work in the background; 0 where it was not asked for so."""
        return self.record.step if self.background and 0 < self.record.step < self.during else 0


class Classes(NamedTuple):
    """``columns``: of each class its layers, by number; ``records``: in the order of time."""

    columns: Sequence[Sequence[int]]
    records: Sequence[Alike]


def classes(touches: Touches, group: Sequence[int], account: Callable[[int], Hashable]) -> Classes:
    """The layers by what was touched of them.

    Args:
        group: KV cache group of each layer.
        account: what is known of what a call (its number) took.
    """
    record = touches.records
    calls, at = np.unique(record.call, return_inverse=True)
    known: dict[Hashable, int] = {}
    labels = [known.setdefault(account(call), len(known)) for call in calls.tolist()]
    said = np.column_stack([
        touches.during, record.head & _NO_THREAD, record.step, record.slot_set, record.slots, record.partly,
        touches.after, touches.used, np.array(labels, np.int64)[at],
    ])  # fmt: skip
    found: dict[Hashable, list[tuple[int, np.ndarray]]] = defaultdict(list)
    for column in np.unique(touches.column).tolist():
        own = np.flatnonzero(touches.column == column)
        same_call = np.unique(record.call[own], return_inverse=True)[1]
        found[group[column], said[own].tobytes(), same_call.tobytes()].append((column, own))
    return Classes(
        [[column for column, _ in members] for members in found.values()],
        sorted(_records(touches, list(found.values())), key=lambda one: (one.during, one.t)),
    )


def _records(touches: Touches, found: Sequence[Sequence[tuple[int, np.ndarray]]]) -> Iterator[Alike]:
    for at, members in enumerate(found):
        own = members[0][1]
        t = np.min([touches.records.t[one] for _, one in members], axis=0)
        words = zip(*(column[own].tolist() for column in touches.records), strict=True)
        marks = (column[own].tolist() for column in (touches.during, touches.after, touches.used))
        for record, first, during, after, used in zip(words, t.tolist(), *marks, strict=True):
            yield Alike(rows.SlotsTouched._make(record), first, at, during, after, used)
