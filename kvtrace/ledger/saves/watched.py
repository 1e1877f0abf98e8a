"""What was seen of one worker, and of which of its steps all is known."""

from __future__ import annotations

from dataclasses import dataclass

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

    @property
    def by_position(self) -> bool:
        """Whether its spool says which slots were read, and which steps were watched for that."""
        return len(self.ran.watched) > 0 or self.slots.visible

    def settled(self, steps: Array) -> NDArray[np.bool_]:
        """The steps of which all that they read is known."""
        watched = locate(self.ran.watched, steps)[1]
        if self.slots.visible:
            partly = {step for step, _ in self.slots.unknown}
            known: NDArray[np.bool_] = watched & ~np.isin(steps, np.array(sorted(partly), dtype=np.int64))
            return known
        certain = [self._picked_none(step) or not self._unsure(step) for step in steps.tolist()]
        result: NDArray[np.bool_] = watched & np.array(certain, dtype=bool)
        return result

    def _picked_none(self, step: int) -> bool:
        """Whether in every layer slots were picked to be read, and these were none."""
        return all((step, layer) in self.slots.none for layer in range(len(self.worker.kv_layers)))

    def _unsure(self, step: int) -> bool:
        cells = self.table.steps.get(step)
        return not cells or any(cell.unsure for cell in cells.values())
