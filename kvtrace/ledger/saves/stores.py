"""What the metadata names in each store step of an engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvtrace.ledger.intervals import Interval, union
from kvtrace.ledger.requests import Request, StoreEntry
from kvtrace.ledger.steps import Array

_MOST_SLOTS = 1 << 40
"""A corrupt record can name any number: bounded, so that sums stay sums."""


@dataclass(frozen=True)
class Stores:
    """Arrays over the store steps of an engine."""

    steps: Array
    slots: Array  # of all requests
    named: tuple[Mapping[int, list[Interval]], ...]
    """Row of a request -> its positions that the step's metadata names, as far as they had KV."""

    @cached_property
    def rows_of(self) -> Mapping[int, Sequence[int]]:
        """Row of a request -> the rows of the steps whose metadata names it, ascending."""
        found: dict[int, list[int]] = defaultdict(list)
        for at, named in enumerate(self.named):
            for request in named:
                found[request].append(at)
        return found


def stores_of(requests: Mapping[int, Request]) -> Stores:
    """The store steps of one engine's requests, by row."""
    steps: Array = np.unique(np.array([e.step for r in requests.values() for e in r.entries], dtype=np.int64))
    at = {step: i for i, step in enumerate(steps.tolist())}
    slots = np.zeros(len(steps), np.int64)
    named: list[dict[int, list[Interval]]] = [{} for _ in range(len(steps))]
    for row, request in requests.items():
        for entry in request.entries:
            i = at[entry.step]
            size = min(max(0, entry.slots), _MOST_SLOTS)
            slots[i] += size
            if size and not entry.implied:
                named[i].setdefault(row, []).append(positions(request, entry))
    return Stores(
        steps=steps,
        slots=slots,
        named=tuple({row: union(parts) for row, parts in of.items()} for of in named),
    )


def positions(request: Request, entry: StoreEntry) -> Interval:
    """What a store entry names, as far as the request had KV."""
    end = min(entry.start + min(max(0, entry.slots), _MOST_SLOTS), entry.available, request.computed)
    return entry.start, max(entry.start, end)
