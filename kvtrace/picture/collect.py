"""What the spools say of each layer in each step: a few marks a cell, filled as the file is streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtrace.ledger.run import Engine, Span, Worker
from kvtrace.ledger.steps import Array, locate, real_step, spent
from kvtrace.trace import hooks, ops, rows
from kvtrace.trace.format import DETAIL_IS_OP, SPOOL_DIR, STEP_SHIFT, Flag, Role, Skip
from kvtrace.trace.reader import Records, Spool, SpoolError, layers_in

Marks = NDArray[np.uint16]

RAN = 1
"""An attention body ran."""
CALLED = 2
WORK = 4
"""The save hook's metadata names slots."""
RAISED = 8
READ = 16
"""KV slots were seen to be read."""
NO_CONNECTOR = 32
NO_METADATA = 64
OTHER_SKIP = 128
FULL = 256
"""The step's graph mode."""
EXECUTED = 512
NO_FORWARD = 1024
LOADED = 2048
"""KV slots were seen to be written by the connector."""
LOAD_WORK = 4096
"""The load hook's metadata names slots."""
LOAD_CALLED = 8192
LOAD_RAISED = 16384
_OF_SKIP = {
    Skip.HOOKED: 0,
    Skip.NO_CONNECTOR: NO_CONNECTOR,
    Skip.NO_ATTN_METADATA: OTHER_SKIP,
    Skip.NO_CONNECTOR_METADATA: NO_METADATA,
    Skip.UNKNOWN: OTHER_SKIP,
}
_ATTENTION = [op.code for op in ops.TABLE if not op.updates_cache]
_FULL_MODE = 2
_SAVE, _WAIT = hooks.SAVE_LAYER.code, hooks.WAIT_SAVE.code
_LOADS = [hook.code for hook in hooks.LOADING]
_IN_STEP = [hook.code for hook in hooks.TABLE if hook.in_step]
_KEEPS = WORK | READ | RAISED | LOADED | LOAD_WORK | LOAD_RAISED
_EMPTY: Array = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class WorkerMarks:
    """One worker. ``marks``: shape (layers, steps); the others have one item a step of the engine."""

    worker: Worker
    marks: Marks
    t0: Array  # host time at which the step began, 0 where it was not executed
    spent: Array  # nanoseconds of execute_model
    in_hooks: Array
    tokens: Array


@dataclass(frozen=True)
class Runs:
    steps: Array
    t0: Array
    spent: Array
    tokens: Array
    modes: Array
    marks: Array


def executions(run_dir: Path, worker: Worker) -> Runs:
    """The steps that a worker ran, distinct and ascending: no dummy runs."""
    parts: list[Records] = []
    for chunk, _ in _chunks(run_dir, worker):
        parts.append(chunk[rows.kind(chunk[:, 0]) == rows.KIND_OF[rows.Execution]])
    table = np.concatenate(parts) if parts else np.empty((0, 8), dtype=np.int64)
    ran = rows.columns(rows.Execution, table)
    dummy = (rows.flags(ran.head) & Flag.DUMMY) != 0
    mine = real_step(ran.step) & ((ran.step >> STEP_SHIFT) == worker.engine) & ~dummy
    steps, first = np.unique(ran.step[mine], return_index=True)
    flags: Array = rows.flags(ran.head)
    return Runs(
        steps=steps, t0=ran.t0[mine][first], spent=spent(ran.t0, ran.t1)[mine][first],
        tokens=ran.tokens[mine][first],
        modes=ran.mode[mine][first], marks=flags[mine][first],
    )  # fmt: skip


def collect(run_dir: Path, engine: Engine, steps: Array, ran: Mapping[str, Runs]) -> list[WorkerMarks]:
    """What each worker of an engine did in these steps (sorted, with the engine's tag)."""
    return [_collect(run_dir, worker, steps, ran[worker.spool]) for worker in engine.workers]


def busy(steps: Array, seen: Sequence[WorkerMarks], spans: Sequence[Span]) -> tuple[Array, list[WorkerMarks]]:
    """Without the steps in which there was nothing to compute, nothing to save and nothing amiss."""
    keep = np.isin(steps, [span.step for span in spans])
    for one in seen:
        idle = (one.marks & NO_FORWARD) != 0
        keep |= ((one.marks & EXECUTED) != 0).any(axis=0) & ~idle.any(axis=0)
        keep |= ((one.marks & _KEEPS) != 0).any(axis=0)
    if keep.all():
        return steps, list(seen)
    return steps[keep], [
        replace(
            one, marks=one.marks[:, keep], t0=one.t0[keep], spent=one.spent[keep],
            in_hooks=one.in_hooks[keep], tokens=one.tokens[keep],
        )
        for one in seen
    ]  # fmt: skip


def _collect(run_dir: Path, worker: Worker, steps: Array, ran: Runs) -> WorkerMarks:
    marks: Marks = np.zeros((max(1, len(worker.kv_layers)), len(steps)), dtype=np.uint16)
    at, inside = locate(steps, ran.steps)
    at = at[inside]
    t0, took, tokens, in_hooks = (np.zeros(len(steps), dtype=np.int64) for _ in range(4))
    t0[at], took[at], tokens[at] = ran.t0[inside], ran.spent[inside], ran.tokens[inside]
    marks[:, at] |= EXECUTED
    marks[:, at[ran.modes[inside] == _FULL_MODE]] |= FULL
    marks[:, at[((ran.marks[inside] & Flag.NO_FORWARD) != 0) | (ran.tokens[inside] == 0)]] |= NO_FORWARD
    filling = _Filling(worker, steps, marks, in_hooks)
    for chunk, names in _chunks(run_dir, worker):
        filling.add(chunk, names)
    return WorkerMarks(worker, marks, t0, took, in_hooks, tokens)


def _chunks(run_dir: Path, worker: Worker) -> Iterator[tuple[Records, Mapping[int, str]]]:
    """The records of a worker's spool, and the names that they refer to."""
    try:
        spool = Spool(run_dir / SPOOL_DIR / worker.spool)
        for chunk in spool.chunks():
            yield chunk, spool.names
    except SpoolError:
        return


class _Filling:
    """Puts records into the marks of one worker."""

    def __init__(self, worker: Worker, steps: Array, marks: Marks, in_hooks: Array) -> None:
        self._steps, self._marks, self._in_hooks = steps, marks, in_hooks
        self._layers = {name: number for number, name in enumerate(worker.kv_layers)}
        self._per_layer = worker.saves_per_layer
        self._readers: Sequence[tuple[type[Any], Callable[[Records, Mapping[int, str]], None]]] = (
            (rows.HookCall, self._hooks),
            (rows.OpCall, self._ops),
            (rows.Effect, self._effects),
            (rows.SlotsTouched, self._slots),
            (rows.QuietCalls, self._quiet),
        )

    def add(self, chunk: Records, names: Mapping[int, str]) -> None:
        kinds = rows.kind(chunk[:, 0])
        for row, reader in self._readers:
            table = chunk[kinds == rows.KIND_OF[row]]
            if len(table):
                reader(table, names)

    def _row(self, layers: Array, names: Mapping[int, str]) -> Array:
        """The row of each layer's name id: -1 for none or a layer without KV."""
        unique, back = np.unique(layers, return_inverse=True)
        of = [self._layers.get(names.get(one, ""), -1) if one else -1 for one in unique.tolist()]
        found: Array = np.array(of, dtype=np.int64)[back.reshape(-1)]
        return found

    def _mark(self, mark: int, step: Array, row: Array, pick: NDArray[np.bool_], whole: bool = False) -> None:
        """`mark` in the cells of these records. `whole`: a record without a layer speaks of all of them."""
        at, known = locate(self._steps, step)
        pick = pick & known
        of_layer = pick & (row >= 0)
        self._marks[row[of_layer], at[of_layer]] |= np.uint16(mark)
        if whole:
            self._marks[:, np.unique(at[pick & (row < 0)])] |= np.uint16(mark)

    def _hooks(self, table: Records, names: Mapping[int, str]) -> None:
        call = rows.columns(rows.HookCall, table)
        code, flags = rows.code(call.head), rows.flags(call.head)
        worker = rows.role(call.head) == Role.WORKER
        at, known = locate(self._steps, call.step)
        timed = worker & known & np.isin(code, _IN_STEP)
        np.add.at(self._in_hooks, at[timed], spent(call.t0, call.t1)[timed])
        row = self._row(call.layer, names)
        saves = worker & ((code == _SAVE) | (code == _WAIT)) & ((flags & Flag.NO_METADATA) == 0)
        called = saves & (code == (_SAVE if self._per_layer else _WAIT))
        self._mark(CALLED, call.step, row, called, whole=not self._per_layer)
        self._mark(WORK, call.step, row, saves & (call.slots > 0), whole=not self._per_layer)
        self._mark(RAISED, call.step, row, saves & ((flags & Flag.RAISED) != 0), whole=True)
        loads = worker & np.isin(code, _LOADS) & ((flags & Flag.NO_METADATA) == 0)
        self._mark(LOAD_CALLED, call.step, row, loads, whole=True)
        self._mark(LOAD_WORK, call.step, row, loads & (call.slots > 0), whole=True)
        self._mark(LOAD_RAISED, call.step, row, loads & ((flags & Flag.RAISED) != 0), whole=True)

    def _ops(self, table: Records, names: Mapping[int, str]) -> None:
        op = rows.columns(rows.OpCall, table)
        real = np.isin(rows.code(op.head), _ATTENTION) & ((rows.flags(op.head) & Flag.CAPTURE) == 0)
        row = self._row(op.layer, names)
        self._mark(RAN, op.step, row, real)
        for skip, mark in _OF_SKIP.items():
            if mark:
                self._mark(mark, op.step, row, real & (op.skip == skip))

    def _effects(self, table: Records, names: Mapping[int, str]) -> None:
        effect = rows.columns(rows.Effect, table)
        flags, row = rows.flags(effect.head), self._row(effect.layer, names)
        self._mark(READ, effect.step, row, ((flags & Flag.STORE) != 0) & (effect.slots > 0))
        self._mark(LOADED, effect.step, row, ((flags & Flag.LOAD) != 0) & (effect.slots > 0))

    def _slots(self, table: Records, names: Mapping[int, str]) -> None:
        touched = rows.columns(rows.SlotsTouched, table)
        flags, row = rows.flags(touched.head), self._row(touched.layer, names)
        read, written = (flags & Flag.STORE) != 0, (flags & Flag.LOAD) != 0
        self._mark(READ, touched.step, row, read & ~written & (touched.slots > 0))
        self._mark(LOADED, touched.step, row, written & ~read & (touched.slots > 0))

    def _quiet(self, table: Records, names: Mapping[int, str]) -> None:
        for words in table.tolist():
            quiet = rows.QuietCalls._make(words)
            is_op = bool(rows.detail(quiet.head) & DETAIL_IS_OP)
            code = rows.code(quiet.head)
            saves = CALLED if code == (_SAVE if self._per_layer else _WAIT) else 0
            mark = RAN if is_op else LOAD_CALLED if code in _LOADS else saves
            at, known = locate(self._steps, np.array([quiet.step]))
            if not known[0]:
                continue
            if not is_op:
                self._in_hooks[at[0]] += max(0, min(quiet.total_ns, 1 << 60))
            if mark:
                told = layers_in(names, quiet.layer_set)
                rows_of = np.array([self._layers[one] for one in told if one in self._layers], dtype=np.int64)
                self._marks[rows_of if len(rows_of) else slice(None), at[0]] |= np.uint16(mark)
