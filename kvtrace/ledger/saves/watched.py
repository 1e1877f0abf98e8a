"""What was seen of one worker, and of which of its steps all is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvtrace.ledger.run import Worker
from kvtrace.ledger.saves.measured import MeasuredCells
from kvtrace.ledger.slots.reads import Slots
from kvtrace.ledger.steps import Array, Executed, Mask, Steps, locate


@dataclass(frozen=True)
class Watched:
    """What is known of one worker beside the ends of its hooks."""

    worker: Worker
    table: MeasuredCells
    slots: Slots
    ran: Executed
    followed: bool = True
    """No way was open on which it may have read KV with no record of it."""

    def blind(self, steps: Array) -> Mask:
        """Of each step whether it can't be told what was read until the end of the step after."""
        slots = self.slots
        if self.worker.connector is not None and self.worker.connector.without_kv:
            return np.zeros(len(steps), np.bool_)
        in_part = np.isin(steps, self._in_part) | (steps <= slots.unplaced)
        if not slots.visible:
            certain = [self._picked_none(step) or not self._unsure(step) for step in steps.tolist()]
            in_part |= ~np.array(certain, dtype=bool) | (steps <= max(slots.blind, default=0))
        found: Mask = ~locate(self.ran.watched, steps)[1] | in_part
        return found if self.followed else np.ones(len(steps), np.bool_)

    def read_repeatedly(self, step: int, column: int) -> int:
        """Slots that one call read more than once, in a step in a layer."""
        cell = self.table.steps.get(step, {}).get(column)
        return max(0, cell.slots - self.slots.amount(step, column).read) if cell else 0

    @cached_property
    def _in_part(self) -> Array:
        """Steps of which it is known that slots were read, and not which; or in the step after."""
        ran = self.ran.began_steps
        before = ran[:-1][np.isin(ran[1:], list(self.slots.blind))]
        unknown = np.array(sorted({step for step, _ in self.slots.unknown}), dtype=np.int64)
        found: Array = np.union1d(unknown, before)
        return found

    def _picked_none(self, step: int) -> bool:
        """Whether in every layer slots were picked to be read, and these were none."""
        return all((step, layer) in self.slots.none for layer in range(len(self.worker.kv_layers)))

    def _unsure(self, step: int) -> bool:
        cells = self.table.steps.get(step)
        return not cells or any(cell.unsure for cell in cells.values())


def settled_steps(workers: Sequence[Watched], steps: Array) -> Steps:
    """The steps of which it is known what every worker read."""
    if not workers:
        return Steps()
    return Steps(steps[~np.logical_or.reduce([one.blind(steps) for one in workers])])
