"""What the workers did in a request's steps: op bodies and hooks, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvtrace.ledger.run import Engine, Worker
from kvtrace.story.records import Source, step_rows
from kvtrace.story.story import HookCalls, RankStep
from kvtrace.trace import hooks, ops, rows
from kvtrace.trace.format import DETAIL_IS_OP, MODES, Dispatch, Flag, Role, Skip
from kvtrace.trace.reader import SpoolError, layers_in


def on_ranks(
    steps: Sequence[int], engine: Engine, spools: Sequence[Source], began: int
) -> tuple[dict[int, list[RankStep]], list[str]]:
    """What every worker of the engine did in each step, and notes on spools that cannot be read.

    Args:
        steps: with the engine's tag.
        began: the time from which ``at_ns`` counts.
    """
    found: dict[int, list[RankStep]] = {step: [] for step in steps}
    notes: list[str] = []
    paths = {source.path.name: source.path for source in spools}
    for worker in engine.workers:
        path = paths.get(worker.spool)
        if path is None:
            continue
        try:
            names, by_step = step_rows(path, steps)
        except SpoolError as error:
            notes.append(str(error))
            continue
        for step in steps:
            in_step = _WorkerStep(worker, names, began)
            for row in by_step.get(step, ()):
                in_step.add(row)
            found[step].append(in_step.result())
    return found, notes


class _WorkerStep:
    """Gathers one step on one worker."""

    def __init__(self, worker: Worker, names: Mapping[int, str], began: int) -> None:
        self._worker, self._names, self._began = worker, names, began
        self._step = RankStep(worker.rank, "not-recorded", "", 0)
        self._calls: dict[tuple[str, str, str], HookCalls] = {}
        self._effects: list[rows.Effect] = []
        self._readers: dict[type[Any], Callable[[Any], None]] = {
            rows.Execution: self._execution,
            rows.HookCall: self._hook,
            rows.OpCall: self._op,
            rows.QuietCalls: self._quiet,
            rows.Effect: self._effects.append,
        }

    def add(self, row: rows.Row) -> None:
        self._readers[type(row)](row)

    def result(self) -> RankStep:
        for effect in self._effects:  # of calls that are known by then
            name = hooks.name_of(rows.code(effect.head))
            call = self._calls.get(("hook", name, self._names.get(effect.layer, "")))
            if call is not None:
                call.measured_slots = max(call.measured_slots, effect.slots)
                call.measured_bytes = max(call.measured_bytes, effect.bytes)
                call.measured_files = max(call.measured_files, effect.files)
        self._step.calls = sorted(self._calls.values(), key=lambda one: one.at_ns)
        return self._step

    def _call(
        self, row: rows.HookCall | rows.OpCall | rows.QuietCalls, kind: str, layer: str, spent: int
    ) -> HookCalls:
        name = (hooks if kind == "hook" else ops).name_of(rows.code(row.head))
        name = name or f"{kind} {rows.code(row.head)}"
        known = self._calls.setdefault(
            (kind, name, layer), HookCalls(name, kind, layer, 0, row.t0 - self._began, 0)
        )
        known.calls += 1
        known.total_ns += max(0, spent)
        return known

    def _execution(self, row: rows.Execution) -> None:
        idle = rows.flags(row.head) & Flag.NO_FORWARD or not row.tokens
        self._step.state = "no-forward" if idle else "ran"
        self._step.mode = MODES.get(row.mode, "")
        self._step.total_ns = max(0, row.t1 - row.t0)

    def _hook(self, row: rows.HookCall) -> None:
        if rows.role(row.head) != Role.WORKER:
            return
        marks = rows.flags(row.head)
        call = self._call(row, "hook", self._names.get(row.layer, ""), row.t1 - row.t0)
        call.slots = max(call.slots, row.slots)
        call.raised |= bool(marks & Flag.RAISED)
        call.no_metadata |= bool(marks & Flag.NO_METADATA)

    def _op(self, row: rows.OpCall) -> None:
        marks = rows.flags(row.head)
        if marks & Flag.CAPTURE:
            return
        call = self._call(row, "op", self._names.get(row.layer, ""), row.t1 - row.t0)
        call.raised |= bool(marks & Flag.RAISED)
        call.direct |= rows.detail(row.head) == Dispatch.DIRECT
        call.skip = Skip(row.skip).name if row.skip in Skip._value2member_map_ else f"SKIP_{row.skip}"

    def _quiet(self, row: rows.QuietCalls) -> None:
        is_op = bool(rows.detail(row.head) & DETAIL_IS_OP)
        for number, layer in enumerate(layers_in(self._names, row.layer_set) or [""]):
            # counts and times of a quiet step are kept for all layers together
            call = self._call(row, "op" if is_op else "hook", layer, row.total_ns if number == 0 else 0)
            call.summed = True
            if is_op:
                live = self._worker.connector_live is not False
                call.skip = Skip.HOOKED.name if live else Skip.NO_CONNECTOR.name
            else:
                call.slots = max(call.slots, 0)
