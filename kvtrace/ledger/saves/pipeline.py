"""Where the save pipeline of each store entry ended, by the trace alone: the first stage that failed."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvtrace.ledger.coverage import Bit, StoreStepBit, WorkerCoverage
from kvtrace.ledger.ends import SaveEnd
from kvtrace.ledger.run import Worker
from kvtrace.ledger.steps import Array, Executed, Mask, StepState, locate, step_states

Ends = NDArray[np.int8]
"""SaveEnd of each store step in each KV layer of a worker: shape (steps, layers)."""


def ends(worker: Worker, ran: Executed, coverage: WorkerCoverage) -> Ends:
    """How each store step ended in each KV layer of a worker."""
    stores, layers, seen = coverage.store_steps, worker.kv_layers, coverage.layers_seen
    state = step_states(ran, worker.stop_reason, stores.steps)[:, None]

    # Masks, which broadcast to shape (steps, layers).

    layer, step = partial(_having, stores.layers), partial(_having, stores.step[:, None])

    def among(steps: Array) -> Mask:
        return locate(steps, stores.steps)[1][:, None]

    saved, bound = layer(Bit.SAVE_OK), step(StoreStepBit.BOUND | StoreStepBit.WAIT_OK)
    if worker.saves_per_layer:
        # An exception ends the step: the layers after the one that raised never ran.
        worked, raised = saved, _in_any_layer(layer(Bit.SAVE_RAISED))
    else:
        worked, raised = step(StoreStepBit.WAIT_OK), step(StoreStepBit.WAIT_RAISED)
    unbound = layer(Bit.OP_NO_METADATA | Bit.SAVE_NO_METADATA) | step(StoreStepBit.WAIT_NO_METADATA)
    no_body = ~layer(Bit.OP_RAN | Bit.SAVE_OK)
    never_seen = no_body & ~np.array([name in seen for name in layers], bool)
    # Graphs were in use, and this layer's body is known from outside of real steps alone.
    graphs = any(mode > 0 for mode in worker.modes)
    captured = np.array([graphs and name in coverage.layers_outside for name in layers], bool)
    called_directly = np.array([worker.facts.direct_call.get(name) is True for name in layers], bool)
    tests = (
        (worker.connector_live is False, SaveEnd.NO_CONNECTOR),
        (raised & ~worked, SaveEnd.RAISED),
        (state == StepState.NOT_REACHED, SaveEnd.PENDING),
        (state == StepState.NOT_RECORDED, SaveEnd.NOT_OBSERVED),
        (worked, SaveEnd.SAVED),
        # Not one hook or body was seen in this worker: the agent did not get in there.
        (not coverage.any_call, SaveEnd.NOT_OBSERVED),
        (layer(Bit.OP_NO_CONNECTOR), SaveEnd.CONNECTOR_GONE),
        (layer(Bit.OP_CLEARED) & bound & _in_any_layer(saved), SaveEnd.CLEARED),
        (unbound, SaveEnd.NOT_BOUND),
        # An exception of vLLM's (Ctrl-C, out of memory) ended the step: what did not come is nobody's.
        (among(ran.failed), SaveEnd.NOT_OBSERVED),
        (among(ran.idle), SaveEnd.NO_FORWARD),
        # Whether a body ran can't be seen in this worker: vLLM's attention came before the agent.
        (no_body & worker.ops_late, SaveEnd.NOT_OBSERVED),
        (among(ran.full) & no_body, SaveEnd.GRAPH_REPLAY),
        (never_seen & captured, SaveEnd.ONLY_CAPTURED),
        (no_body & called_directly, SaveEnd.DIRECT_CALL),
        (never_seen, SaveEnd.NO_HOOK),
        (~bound & (stores.layers == 0), SaveEnd.NOT_BOUND),
        # The body was inside the hook's frame, and the call itself is not in the trace.
        (layer(Bit.OP_HOOKED), SaveEnd.NOT_OBSERVED),
    )
    found = np.select(
        [np.broadcast_to(test, stores.layers.shape) for test, _ in tests],
        [np.int8(end) for _, end in tests],
        default=np.int8(SaveEnd.NO_HOOK),
    )
    return found.astype(np.int8)


def _having(table: NDArray[np.uint8], bits: Bit | StoreStepBit) -> Mask:
    """Where any of these bits is set."""
    result: Mask = (table & np.uint8(bits)) != 0
    return result


def _in_any_layer(mask: Mask) -> Mask:
    """Steps in which it holds for any layer; shape (steps, 1)."""
    result: Mask = np.any(mask, axis=1, keepdims=True)
    return result
