"""What the metadata names in each store step of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtrace.ledger.requests import Request
from kvtrace.ledger.steps import Array, Mask

_MOST_SLOTS = 1 << 40
"""A corrupt record can name any number: bounded, so that sums stay sums."""


@dataclass(frozen=True)
class Stores:
    """Arrays over the store steps of an engine."""

    steps: Array
    slots: Array  # of all requests
    whole: Array  # ... of these in whole blocks, entry by entry: a worker may round down to them
    implied: Mask  # named by no metadata: measured
    asynchronous: bool  # whether any save of the engine is
    alone: tuple[Request | None, ...]  # the request, in the steps that store for one only


def stores_of(requests: Sequence[Request], block: int, unfinished: bool) -> Stores:
    """The store steps of one engine's requests.

    Args:
        block: tokens of a block.
        unfinished: some asynchronous save of these requests did not end well.
    """
    steps: Array = np.unique(np.array([e.step for r in requests for e in r.entries], dtype=np.int64))
    at = {step: i for i, step in enumerate(steps.tolist())}
    block = max(1, block)
    slots, whole = np.zeros(len(steps), np.int64), np.zeros(len(steps), np.int64)
    implied = np.zeros(len(steps), bool)
    storing: list[dict[int, Request]] = [{} for _ in range(len(steps))]
    for row, request in enumerate(requests):
        for entry in request.entries:
            i = at[entry.step]
            size = min(max(0, entry.slots), _MOST_SLOTS)
            slots[i] += size
            whole[i] += size // block * block
            implied[i] |= entry.implied
            if size:
                storing[i][row] = request
    return Stores(
        steps=steps,
        slots=slots,
        whole=whole,
        implied=implied,
        asynchronous=unfinished or any(entry.asynchronous for r in requests for entry in r.entries),
        alone=tuple(next(iter(of.values())) if len(of) == 1 else None for of in storing),
    )
