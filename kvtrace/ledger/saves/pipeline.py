"""Where the save pipeline of each store entry ended, by the trace alone: the first stage that failed."""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from kvtrace.ledger.coverage import Bit, StoreStepBit, WorkerCoverage
from kvtrace.ledger.ends import SaveEnd
from kvtrace.ledger.run import Worker
from kvtrace.ledger.steps import Array, Executed, Mask, StepState, locate, step_states
from kvtrace.trace import hooks

Ends = NDArray[np.int8]
"""SaveEnd of each store step in each KV layer of a worker: shape (steps, layers)."""


def ends(worker: Worker, ran: Executed, coverage: WorkerCoverage) -> Ends:
    """How each store step ended in each KV layer of a worker."""
    of = _Evidence(worker, ran, coverage)
    tests = (
        (of.without_connector, SaveEnd.NO_CONNECTOR),
        (of.raised & ~of.worked, SaveEnd.RAISED),
        (of.in_state(StepState.NOT_REACHED), SaveEnd.PENDING),
        (of.in_state(StepState.NOT_RECORDED), SaveEnd.NOT_OBSERVED),
        (of.worked, SaveEnd.SAVED),
        (of.without_agent, SaveEnd.NOT_OBSERVED),
        (of.any_bit(Bit.OP_NO_CONNECTOR), SaveEnd.CONNECTOR_GONE),
        (of.cleared, SaveEnd.CLEARED),
        (of.unbound, SaveEnd.NOT_BOUND),
        (of.failed, SaveEnd.NOT_OBSERVED),
        (of.idle, SaveEnd.NO_FORWARD),
        (of.no_body & of.ops_unseen, SaveEnd.NOT_OBSERVED),
        (of.replayed & of.no_body, SaveEnd.GRAPH_REPLAY),
        (of.no_body & ~of.layer_seen & of.captured, SaveEnd.ONLY_CAPTURED),
        (of.no_body & of.called_directly, SaveEnd.DIRECT_CALL),
        (of.no_body & ~of.layer_seen, SaveEnd.NO_HOOK),
        (of.never_bound, SaveEnd.NOT_BOUND),
        # The body was inside the hook's frame, and the call itself is not in the trace.
        (of.any_bit(Bit.OP_HOOKED), SaveEnd.NOT_OBSERVED),
    )
    found = np.select(
        [np.broadcast_to(test, of.shape) for test, _ in tests],
        [np.int8(end) for _, end in tests],
        default=np.int8(SaveEnd.NO_HOOK),
    )
    return found.astype(np.int8)


class _Evidence:
    """What the trace shows of a worker's store steps; masks broadcast to shape (steps, layers)."""

    def __init__(self, worker: Worker, ran: Executed, coverage: WorkerCoverage) -> None:
        stores = coverage.store_steps
        self._worker, self._ran, self._coverage, self._steps = worker, ran, coverage, stores.steps
        self._bits, self._step_bits = stores.layers, stores.step[:, None]
        self._states = step_states(ran, worker.stop_reason, stores.steps)
        connector = worker.connector
        self._per_layer = connector is None or connector.does(hooks.SAVE_LAYER)
        self.shape = stores.layers.shape

    def any_bit(self, bits: Bit) -> Mask:
        result: Mask = (self._bits & np.uint8(bits)) != 0
        return result

    def any_step_bit(self, bits: StoreStepBit) -> Mask:
        result: Mask = (self._step_bits & np.uint8(bits)) != 0
        return result

    def in_state(self, state: StepState) -> Mask:
        result: Mask = (self._states == state)[:, None]
        return result

    def _executed_in(self, steps: Array) -> Mask:
        return locate(steps, self._steps)[1][:, None]

    def _layers(self, wanted: list[bool]) -> Mask:
        return np.array(wanted, dtype=bool)[None, :]

    @property
    def without_connector(self) -> Mask:
        return np.full((1, 1), self._worker.connector_live is False)

    @property
    def without_agent(self) -> Mask:
        """Not one hook or body was seen in this worker: the agent did not get in there."""
        return np.full((1, 1), not self._coverage.any_call)

    @property
    def ops_unseen(self) -> Mask:
        """Whether a body ran can't be seen in this worker: vLLM's attention came before the agent."""
        return np.full((1, 1), self._worker.ops_late)

    @cached_property
    def worked(self) -> Mask:
        """The hook in which this connector saves ran, with metadata."""
        return self.any_bit(Bit.SAVE_OK) if self._per_layer else self.any_step_bit(StoreStepBit.WAIT_OK)

    @property
    def raised(self) -> Mask:
        """An exception ends the step: the layers after the one that raised never ran."""
        if not self._per_layer:
            return self.any_step_bit(StoreStepBit.WAIT_RAISED)
        return _in_any_layer(self.any_bit(Bit.SAVE_RAISED))

    @property
    def cleared(self) -> Mask:
        bound = self.any_step_bit(StoreStepBit.BOUND | StoreStepBit.WAIT_OK)
        return self.any_bit(Bit.OP_CLEARED) & bound & _in_any_layer(self.any_bit(Bit.SAVE_OK))

    @property
    def unbound(self) -> Mask:
        in_layer = self.any_bit(Bit.OP_NO_METADATA | Bit.SAVE_NO_METADATA)
        return in_layer | self.any_step_bit(StoreStepBit.WAIT_NO_METADATA)

    @property
    def failed(self) -> Mask:
        """An exception of vLLM's (Ctrl-C, out of memory) ended the step: what did not come is nobody's."""
        return self._executed_in(self._ran.failed)

    @property
    def never_bound(self) -> Mask:
        result: Mask = ~self.any_step_bit(StoreStepBit.BOUND | StoreStepBit.WAIT_OK) & (self._bits == 0)
        return result

    @property
    def idle(self) -> Mask:
        return self._executed_in(self._ran.idle)

    @property
    def replayed(self) -> Mask:
        return self._executed_in(self._ran.full)

    @property
    def no_body(self) -> Mask:
        return ~self.any_bit(Bit.OP_RAN | Bit.SAVE_OK)

    @property
    def layer_seen(self) -> Mask:
        return self._layers([layer in self._coverage.layers_seen for layer in self._worker.kv_layers])

    @property
    def captured(self) -> Mask:
        """Graphs were in use, and this layer's body is known from outside of real steps alone."""
        graphs = any(mode > 0 for mode in self._worker.modes)
        outside = self._coverage.layers_outside
        return self._layers([graphs and layer in outside for layer in self._worker.kv_layers])

    @property
    def called_directly(self) -> Mask:
        direct = self._worker.facts.direct_call
        return self._layers([direct.get(layer) is True for layer in self._worker.kv_layers])


def _in_any_layer(mask: Mask) -> Mask:
    """Steps in which it holds for any layer; shape (steps, 1)."""
    result: Mask = np.any(mask, axis=1, keepdims=True)
    return result
