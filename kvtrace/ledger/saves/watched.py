"""What was seen of one worker, and of which of its steps all is known."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvtrace.ledger.model import Worker
from kvtrace.ledger.saves.measured import Measured
from kvtrace.ledger.slots.reads import Slots
from kvtrace.ledger.steps import Array, Executed, locate


@dataclass(frozen=True)
class Watched:
    """What is known of one worker beside the ends of its hooks."""

    worker: Worker
    table: Measured
    slots: Slots
    ran: Executed
    followed: bool = True
    """No way was open on which it may have read KV with no record of it."""

    @property
    def by_position(self) -> bool:
        """Whether its spool says which slots were read, and which steps were watched for that."""
        return len(self.ran.watched) > 0 or self.slots.visible

    def settled(self, steps: Array) -> NDArray[np.bool_]:
        """The steps of which all is known that was read until the end of the step after."""
        known: NDArray[np.bool_] = locate(self.ran.watched, steps)[1] & ~np.isin(steps, self._in_part)
        known &= self.followed & (steps > self.slots.unplaced)
        if not self.slots.visible:
            certain = [self._picked_none(step) or not self._unsure(step) for step in steps.tolist()]
            known &= np.array(certain, dtype=bool) & (steps > max(self.slots.blind, default=0))
        return known

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
