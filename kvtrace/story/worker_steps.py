"""What the workers did in a request's steps: op bodies and hooks, layer by layer."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping

from kvtrace.ledger.model import Engine, Worker
from kvtrace.story.model import Call, Moment, RankStep
from kvtrace.story.records import Source, step_rows
from kvtrace.trace.format import HOOKS, OPS, QUIET_IS_OP, Dispatch, Flag, Kind, Role, Skip
from kvtrace.trace.reader import SpoolError

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


def _rank_step(worker: Worker, rows: list[list[int]], names: Mapping[int, str], began: int) -> RankStep:
    result = RankStep(worker.rank, worker.process, len(worker.kv_layers), "not-recorded", "", 0, 0)
    calls: dict[tuple[str, str, str], Call] = {}

    def call(
        kind: str, table: tuple[str, ...], code: int, layer: str, t0: int, spent: int, n: int = 1
    ) -> Call:
        name = table[code] if code < len(table) else f"{kind} {code}"
        known = calls.get((kind, name, layer))
        if known is None:
            known = calls[(kind, name, layer)] = Call(name, kind, layer, 0, t0 - began, 0)
        known.calls += n
        known.total_ns += max(0, spent)
        return known

    measured: list[list[int]] = []
    for row in rows:
        w0, t0, t1, _, layer_id, e, f, g = row
        kind, marks, code, pair = w0 & 0xFF, (w0 >> 32) & 0xFFFF, (w0 >> 16) & 0xFF, (w0 >> 24) & 0xFF
        if kind == Kind.EXEC:
            result.state = "no-forward" if marks & Flag.NO_FORWARD or not layer_id else "ran"
            result.mode = MODES.get(f, "")
            result.at_ns, result.total_ns = t0 - began, max(0, t1 - t0)
        elif kind == Kind.HOOK and (w0 >> 8) & 0xFF == Role.WORKER:
            known = call("hook", HOOKS, code, names.get(layer_id, ""), t0, t1 - t0)
            known.slots = max(known.slots, e)
            known.raised |= bool(marks & Flag.RAISED)
            known.no_metadata |= bool(marks & Flag.NO_METADATA)
        elif kind == Kind.OP and not marks & Flag.CAPTURE:
            known = call("op", OPS, code, names.get(layer_id, ""), t0, t1 - t0)
            known.tokens = max(known.tokens, e)
            known.raised |= bool(marks & Flag.RAISED)
            known.direct |= pair == Dispatch.DIRECT
            known.skip = Skip(g).name if g in Skip._value2member_map_ else f"SKIP_{g}"
        elif kind == Kind.QUIET:
            is_op = bool(pair & QUIET_IS_OP)
            layers = _layers(names.get(t1, "[]"), names)
            for number, layer in enumerate(layers):
                # counts and times of a quiet step are kept for all layers together
                known = call("op" if is_op else "hook", OPS if is_op else HOOKS, code, layer, t0,
                             e if number == 0 else 0)  # fmt: skip
                known.summed = True
                if is_op:
                    known.skip = Skip.HOOKED.name if worker.connector_live is not False else "NO_CONNECTOR"
                else:
                    known.slots = max(known.slots, 0)
        elif kind == Kind.EFFECT:
            measured.append(row)
    for w0, _, layer_id, _, slots, size, files, _ in measured:
        code = (w0 >> 16) & 0xFF
        name = HOOKS[code] if code < len(HOOKS) else ""
        known_call = calls.get(("hook", name, names.get(layer_id, "")))
        if known_call is not None:
            known_call.measured_slots = max(known_call.measured_slots, slots)
            known_call.measured_bytes = max(known_call.measured_bytes, size)
            known_call.measured_files = max(known_call.measured_files, files)
    result.calls = sorted(calls.values(), key=lambda one: one.at_ns)
    return result


def _layers(text: str, names: Mapping[int, str]) -> list[str]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = []
    ids = [one for one in value if isinstance(one, int)] if isinstance(value, list) else []
    return [names.get(one, "") for one in ids] or [""]
