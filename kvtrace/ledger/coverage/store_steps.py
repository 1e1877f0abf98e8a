"""What a worker did in the steps whose metadata held a store: the evidence of the ledger of saves."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag

import numpy as np
from numpy.typing import NDArray

from kvtrace.ledger.coverage.layers import Layers
from kvtrace.ledger.run import Worker
from kvtrace.ledger.steps import NEVER, Array, locate, of_engine
from kvtrace.trace import hooks, rows
from kvtrace.trace.format import Flag, Skip


class Bit(IntFlag):
    """What was seen of one layer in one step."""

    OP_RAN = 1
    OP_HOOKED = 2
    OP_NO_METADATA = 4
    OP_NO_CONNECTOR = 8
    SAVE_OK = 16
    SAVE_RAISED = 32
    SAVE_NO_METADATA = 64
    OP_CLEARED = 128
    """The body ran without metadata, after the step's had been cleared."""


class StoreStepBit(IntFlag):
    """What was seen of one step."""

    BOUND = 1
    WAIT_OK = 2
    WAIT_RAISED = 4
    WAIT_NO_METADATA = 8


@dataclass(frozen=True)
class StoreSteps:
    """Bits of one worker's store steps."""

    steps: Array  # sorted store steps of the worker's engine
    layers: NDArray[np.uint8]  # (steps, KV layers): Bit
    step: NDArray[np.uint8]  # (steps,): StepBit


class StoreStepReader:
    """Gathers the bits of one worker."""

    def __init__(self, worker: Worker, store_steps: Array, layers: Layers) -> None:
        self._layers, self._kv_layers = layers, worker.kv_layers
        self._steps = of_engine(store_steps, worker.engine)
        n = len(self._steps)
        self._pair = np.zeros((n, len(worker.kv_layers)), np.uint8)
        self._step = np.zeros(n, np.uint8)
        self._cleared = np.full(n, NEVER, np.int64)  # when the metadata was cleared first

    def result(self) -> StoreSteps:
        return StoreSteps(self._steps, self._pair, self._step)

    def add_hooks(self, call: rows.HookCall, layer: Array) -> None:
        """HOOK records of the worker's side; ``layer``: their layer numbers."""
        at, inside = locate(self._steps, call.step)
        if not inside.any():
            return
        codes, flags = rows.code(call.head), rows.flags(call.head)
        raised, unbound = (flags & Flag.RAISED) != 0, (flags & Flag.NO_METADATA) != 0
        fine = ~raised & ~unbound
        clear = inside & (codes == hooks.CLEAR_METADATA.code) & ~raised
        np.minimum.at(self._cleared, at[clear], call.t1[clear])
        wait = inside & (codes == hooks.WAIT_SAVE.code)
        for part, bit in (
            (inside & (codes == hooks.BIND_METADATA.code) & ~raised, StoreStepBit.BOUND),
            (wait & fine, StoreStepBit.WAIT_OK),
            (wait & raised, StoreStepBit.WAIT_RAISED),
            (wait & unbound, StoreStepBit.WAIT_NO_METADATA),
        ):
            self._step[at[part]] |= np.uint8(bit)
        pair = self._layers.index_in(self._kv_layers, layer)
        save = inside & (codes == hooks.SAVE_LAYER.code) & (pair >= 0)
        for part, of_pair in (
            (save & fine, Bit.SAVE_OK),
            (save & raised, Bit.SAVE_RAISED),
            (save & unbound, Bit.SAVE_NO_METADATA),
        ):
            self._pair[at[part], pair[part]] |= np.uint8(of_pair)

    def add_bodies(self, call: rows.OpCall, layer: Array) -> None:
        """OP records of attention bodies."""
        at, inside = locate(self._steps, call.step)
        if not inside.any():
            return
        pair = self._layers.index_in(self._kv_layers, layer)
        inside &= pair >= 0
        unbound = inside & (call.skip == Skip.NO_CONNECTOR_METADATA)
        cleared = unbound.copy()
        cleared[unbound] = call.t0[unbound] >= self._cleared[at[unbound]]
        for part, bit in (
            (inside, Bit.OP_RAN),
            (cleared, Bit.OP_CLEARED),
            (inside & (call.skip == Skip.HOOKED), Bit.OP_HOOKED),
            (unbound, Bit.OP_NO_METADATA),
            (inside & (call.skip == Skip.NO_CONNECTOR), Bit.OP_NO_CONNECTOR),
        ):
            self._pair[at[part], pair[part]] |= np.uint8(bit)
