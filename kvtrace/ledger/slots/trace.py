"""What the workers' spools say about the slots that were touched, and when each layer was computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvtrace.ledger.model import Worker
from kvtrace.ledger.scan import SpoolScan
from kvtrace.ledger.steps import NEVER_RAN, Array, Executed, locate
from kvtrace.trace import ops, rows
from kvtrace.trace.format import STEP_MASK, STEP_SHIFT, Flag, Kind
from kvtrace.trace.reader import Records, Spool

_UPDATES = [op.code for op in ops.UPDATES]
NEVER = (1 << 62) - 1
"""The time of what did not happen."""


@dataclass(frozen=True)
class Touches:
    """One worker's SLOTS records, in the order of the steps in which they happened, then of their times.

    Attributes:
        records: shape (n,) each.
        names: of the spool.
        column: the worker's KV layer, by number.
        during: the last step that had begun by then.
        computed_t: (step, column) -> when the layer's first op body of that step began, NEVER.
        used_t: the same of its attention alone: a body that only writes the KV of new tokens reads none.
    """

    records: rows.SlotsTouched
    names: Mapping[int, str]
    column: Array
    during: Array
    steps: Array
    computed_t: Array
    used_t: Array

    def computed_at(self, step: int, column: int) -> int:
        """When a layer was computed in a step, NEVER where that is not in the trace."""
        at = int(np.searchsorted(self.steps, step))
        return int(self.computed_t[at, column])

    def used_at(self, step: int, column: int) -> int:
        """When a layer's attention began in a step, NEVER where that is not in the trace."""
        at = int(np.searchsorted(self.steps, step))
        return int(self.used_t[at, column])


def touches(scan: SpoolScan, worker: Worker) -> Touches:
    """The SLOTS records of a worker's layers.

    Raises:
        SpoolError: the spool vanished.
    """
    ran = scan.executed.get(worker.engine, NEVER_RAN)
    record = rows.columns(rows.SlotsTouched, scan.slots)
    columns = {name: i for i, name in enumerate(worker.kv_layers)}
    ids = {ident: columns[name] for ident, name in scan.names.items() if name in columns}
    column = np.array([ids.get(ident, -1) for ident in record.layer.tolist()], dtype=np.int64)
    tag = record.step >> STEP_SHIFT
    here = (column >= 0) & ((tag == worker.engine) | ((record.step & STEP_MASK) == 0))
    during = _during(ran, record.t, record.step)
    here &= during > 0
    order = np.lexsort((record.t[here], during[here]))
    table = scan.slots[here][order]
    steps = np.unique(during[here])
    computed, used = _bodies(scan, worker, columns, steps)
    return Touches(
        records=rows.columns(rows.SlotsTouched, table),
        names=scan.names,
        column=column[here][order],
        during=during[here][order],
        steps=steps,
        computed_t=computed,
        used_t=used,
    )


def _during(ran: Executed, t: Array, step: Array) -> Array:
    """The last step of the worker that had begun at ``t``; what a hook of a step did belongs to that step."""
    at = np.searchsorted(ran.began_t, t, side="right") - 1
    last = np.where(at >= 0, ran.began_steps[np.maximum(at, 0)] if len(ran.began_steps) else 0, 0)
    result: Array = np.maximum(last, np.where((step & STEP_MASK) > 0, step, 0))
    return result


def _bodies(scan: SpoolScan, worker: Worker, columns: Mapping[str, int], steps: Array) -> tuple[Array, Array]:
    """When each layer's first op body, and its first attention, began; shape (steps, KV layers)."""
    found = np.full((2, len(steps), len(worker.kv_layers)), NEVER, np.int64)
    if not len(steps):
        return found[0], found[1]
    spool = Spool(scan.path)
    for chunk in spool.chunks():
        head = chunk[:, 0]
        bodies = chunk[(rows.kind(head) == Kind.OP) & ((rows.flags(head) & Flag.CAPTURE) == 0)]
        if len(bodies):
            of_layer = {i: columns[n] for i, n in spool.names.items() if n in columns}
            _add_bodies(found[0], bodies, steps, of_layer)
            _add_bodies(found[1], bodies[~np.isin(rows.code(bodies[:, 0]), _UPDATES)], steps, of_layer)
    return found[0], found[1]


def _add_bodies(found: Array, bodies: Records, steps: Array, of_layer: Mapping[int, int]) -> None:
    call = rows.columns(rows.OpCall, bodies)
    at, inside = locate(steps, call.step)
    column: Array = np.full(len(call.layer), -1, np.int64)
    for ident in np.unique(call.layer).tolist():
        column[call.layer == ident] = of_layer.get(ident, -1)
    inside &= column >= 0
    np.minimum.at(found, (at[inside], column[inside]), call.t0[inside])
