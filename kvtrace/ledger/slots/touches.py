"""What the workers' spools say about the slots that were touched, and when each layer was computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtrace.ledger.run import Worker
from kvtrace.ledger.scan import SpoolScan
from kvtrace.ledger.steps import NEVER, NEVER_RAN, Array, Executed, locate
from kvtrace.trace import hooks, ops, rows
from kvtrace.trace.format import STEP_MASK, STEP_SHIFT, Flag, Kind, pack_head
from kvtrace.trace.reader import Spool

_UPDATES = [op.code for op in ops.UPDATES]
LOADING = [hook.code for hook in hooks.LOADING]
BACKGROUND = 0
"""The hook code of what no hook did itself: a thread, a job, a task of the connector."""
_BOTH, _CODES = int(Flag.STORE | Flag.LOAD), 256


def _was_done(marks: int, code: int) -> tuple[bool, bool]:
    """Whether the slots of a record were read, and whether they were written. Of memory of which the address
    was given out (both marks) the hook says for what: of work in the background either may be."""
    if marks == _BOTH and code != BACKGROUND:
        return (False, True) if code in LOADING else (True, False)
    return bool(marks & Flag.STORE), bool(marks & Flag.LOAD)


_DONE = np.array([[_was_done(marks, code) for code in range(_CODES)] for marks in range(_BOTH + 1)])


def was_read(head: Any) -> Any:
    """Of the head of a SLOTS record, or of an array of them."""
    return _DONE[rows.flags(head) & _BOTH, rows.code(head), 0]


def was_written(head: Any) -> Any:
    return _DONE[rows.flags(head) & _BOTH, rows.code(head), 1]


@dataclass(frozen=True)
class Touches:
    """One worker's SLOTS records, in the order of the steps in which they happened, then of their times.

    Attributes:
        records: shape (n,) each.
        names: of the spool.
        column: the worker's KV layer, by number.
        during: the last step that had begun by then.
        after: whether the layer had been computed in that step by then, or the trace does not tell; what a
            hook for loading touched came before, where no body is seen at all.
        used: whether its attention of that step had begun: a body that only writes the KV of new tokens
            reads none.
        watched: the steps that were watched for what they read.
    """

    records: rows.SlotsTouched
    names: Mapping[int, str]
    column: Array
    during: Array
    after: Array
    used: Array
    watched: Array


def columns_by_id(names: Mapping[int, str], worker: Worker) -> dict[int, int]:
    """Id of a layer's name in a spool -> the worker's KV layer, by number."""
    columns = {name: at for at, name in enumerate(worker.kv_layers)}
    return {ident: columns[name] for ident, name in names.items() if name in columns}


def columns_of(layer: Array, columns: Mapping[int, int]) -> Array:
    """The KV layer of each name's id, by number; -1 for what is none."""
    idents, at = np.unique(layer, return_inverse=True)
    return np.array([columns.get(ident, -1) for ident in idents.tolist()], dtype=np.int64)[at]


def touches(scan: SpoolScan, worker: Worker) -> Touches:
    """The SLOTS records of a worker's layers.

    Raises:
        SpoolError: the spool vanished.
    """
    ran = scan.executed.get(worker.engine, NEVER_RAN)
    record = rows.columns(rows.SlotsTouched, scan.slots)
    columns = columns_by_id(scan.names, worker)
    column = columns_of(record.layer, columns)
    tag = record.step >> STEP_SHIFT
    here = (column >= 0) & ((tag == worker.engine) | ((record.step & STEP_MASK) == 0))
    during = during_which(ran, record.t, record.step)
    here &= during > 0
    order = np.lexsort((record.t[here], during[here]))
    record = rows.columns(rows.SlotsTouched, scan.slots[here][order])
    column, during = column[here][order], during[here][order]
    steps, at = np.unique(during, return_inverse=True)
    computed, used = (t[at, column] for t in _bodies(scan, worker, columns, steps))
    told = (computed < NEVER) | np.isin(rows.code(record.head), LOADING)
    return Touches(
        records=record,
        names=scan.names,
        column=column,
        during=during,
        after=(record.t >= computed) | ~told,
        used=record.t >= used,
        watched=ran.watched,
    )


def during_which(ran: Executed, t: Array, step: Array) -> Array:
    """The last step of the worker that had begun at ``t``; what a hook of a step did belongs to that step."""
    at = np.searchsorted(ran.began_t, t, side="right") - 1
    last = np.where(at >= 0, ran.began_steps[np.maximum(at, 0)] if len(ran.began_steps) else 0, 0)
    result: Array = np.maximum(last, np.where((step & STEP_MASK) > 0, step, 0))
    return result


_BODY = pack_head(0xFF, flags=Flag.CAPTURE)
_CALL = pack_head(0xFF, code=0xFF)
_WAIT = pack_head(Kind.HOOK, code=hooks.WAIT_LAYER.code)


def _bodies(scan: SpoolScan, worker: Worker, columns: Mapping[int, int], steps: Array) -> tuple[Array, Array]:
    """When each layer's first op body, and its first attention, began; shape (steps, KV layers). Where
    vLLM's attention came before the agent, and no body is seen: when the layer was waited for."""
    found = np.full((2, len(steps), len(worker.kv_layers)), NEVER, np.int64)
    if not len(steps):
        return found[0], found[1]
    for chunk in Spool(scan.path).again(scan.info):
        near = locate(steps, rows.columns(rows.OpCall, chunk).step)[1]  # of a HOOK in the same place
        here = chunk[near]
        bodies = here[here[:, 0] & _BODY == int(Kind.OP)]
        if len(bodies):
            call = rows.columns(rows.OpCall, bodies)
            reads = ~np.isin(rows.code(call.head), _UPDATES)
            _add(found[0], call.step, call.layer, call.t0, steps, columns)
            _add(found[1], call.step[reads], call.layer[reads], call.t0[reads], steps, columns)
        elif worker.ops_late and len(here):
            # vLLM's attention waits for the load of its layer, and then begins.
            wait = rows.columns(rows.HookCall, here[here[:, 0] & _CALL == _WAIT])
            _add(found[0], wait.step, wait.layer, wait.t0, steps, columns)
            _add(found[1], wait.step, wait.layer, wait.t1, steps, columns)
    return found[0], found[1]


def _add(found: Array, step: Array, layer: Array, t: Array, steps: Array, columns: Mapping[int, int]) -> None:
    """The earliest of these times of each step and layer."""
    at, inside = locate(steps, step)
    column = columns_of(layer, columns)
    inside &= column >= 0
    np.minimum.at(found, (at[inside], column[inside]), t[inside])
