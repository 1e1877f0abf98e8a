"""What the workers did in a request's steps: op bodies and hooks, layer by layer."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from kvtrace.ledger.model import Engine, Worker
from kvtrace.story.model import Call, Moment, RankStep
from kvtrace.story.records import Source, step_rows
from kvtrace.trace import hooks, ops
from kvtrace.trace.format import DETAIL_IS_OP, Dispatch, Flag, Role, Skip
from kvtrace.trace.reader import SpoolError
from kvtrace.trace.rows import Effect, Execution, HookCall, OpCall, QuietCalls, Row, code, detail, flags, role

MODES = {0: "NONE", 1: "PIECEWISE", 2: "FULL"}


def fill(
    moments: Mapping[int, Moment],
    steps: Collection[int],
    engine: Engine,
    spools: list[Source],
    began: int,
) -> list[str]:
    """Adds to each step's moment what every worker of the engine did in it; returns notes."""
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
            moments[step].ranks.append(_rank_step(worker, by_step.get(step, []), names, began))
    return notes


def _rank_step(worker: Worker, rows: list[Row], names: Mapping[int, str], began: int) -> RankStep:
    result = RankStep(worker.rank, worker.process, len(worker.kv_layers), "not-recorded", "", 0, 0)
    calls: dict[tuple[str, str, str], Call] = {}

    def call(row: HookCall | OpCall | QuietCalls, kind: str, layer: str, spent: int) -> Call:
        table = hooks if kind == "hook" else ops
        name = table.name_of(code(row.head)) or f"{kind} {code(row.head)}"
        known = calls.get((kind, name, layer))
        if known is None:
            known = calls[(kind, name, layer)] = Call(name, kind, layer, 0, row.t0 - began, 0)
        known.calls += 1
        known.total_ns += max(0, spent)
        return known

    for row in rows:
        marks = flags(row.head)
        if isinstance(row, Execution):
            result.state = "no-forward" if marks & Flag.NO_FORWARD or not row.tokens else "ran"
            result.mode = MODES.get(row.mode, "")
            result.at_ns, result.total_ns = row.t0 - began, max(0, row.t1 - row.t0)
        elif isinstance(row, HookCall) and role(row.head) == Role.WORKER:
            known = call(row, "hook", names.get(row.layer, ""), row.t1 - row.t0)
            known.slots = max(known.slots, row.slots)
            known.raised |= bool(marks & Flag.RAISED)
            known.no_metadata |= bool(marks & Flag.NO_METADATA)
        elif isinstance(row, OpCall) and not marks & Flag.CAPTURE:
            known = call(row, "op", names.get(row.layer, ""), row.t1 - row.t0)
            known.tokens = max(known.tokens, row.tokens)
            known.raised |= bool(marks & Flag.RAISED)
            known.direct |= detail(row.head) == Dispatch.DIRECT
            known.skip = Skip(row.skip).name if row.skip in Skip._value2member_map_ else f"SKIP_{row.skip}"
        elif isinstance(row, QuietCalls):
            is_op = bool(detail(row.head) & DETAIL_IS_OP)
            for number, layer in enumerate(_layers(names.get(row.layer_set, "[]"), names)):
                # counts and times of a quiet step are kept for all layers together
                known = call(row, "op" if is_op else "hook", layer, row.total_ns if number == 0 else 0)
                known.summed = True
                if is_op:
                    known.skip = Skip.HOOKED.name if worker.connector_live is not False else "NO_CONNECTOR"
                else:
                    known.slots = max(known.slots, 0)
    for row in rows:
        if isinstance(row, Effect):
            measured = calls.get(("hook", hooks.name_of(code(row.head)), names.get(row.layer, "")))
            if measured is not None:
                measured.measured_slots = max(measured.measured_slots, row.slots)
                measured.measured_bytes = max(measured.measured_bytes, row.bytes)
                measured.measured_files = max(measured.measured_files, row.files)
    result.calls = sorted(calls.values(), key=lambda one: one.at_ns)
    return result


def _layers(text: str, names: Mapping[int, str]) -> list[str]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = []
    ids = [one for one in value if isinstance(one, int)] if isinstance(value, list) else []
    return [names.get(one, "") for one in ids] or [""]
