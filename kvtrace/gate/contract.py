"""A report -> the contract of a good run (``kvtrace.baseline/1``), and its text.

Small, readable, the same from run to run: shares instead of counts, groups of layers instead of names,
no times, no step counts, no paths, nothing of the machine.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

from kvtrace.gate.baseline import (
    SCHEMA,
    Baseline,
    BaselineHook,
    BaselineOp,
    CoverageRow,
    EngineShape,
    GateError,
    Traffic,
)
from kvtrace.gate.cells import EVERY_STEP, CallCounts, by_layers, cells
from kvtrace.gate.explain import worst
from kvtrace.gate.layers import ranges
from kvtrace.gate.shares import shares
from kvtrace.grouped import grouped
from kvtrace.report.model import EngineRow, LedgerRow, Report
from kvtrace.terms import outcome_order


def make_baseline(report: Report, where: str = "report") -> Baseline:
    """The contract of the run that `report` is of.

    Raises:
        GateError: a run in which no engine executed a step: there is nothing to promise.
    """
    if not any(engine["real_steps"] for engine in report["run"]["engines"]):
        raise GateError("no engine executed a step in this run", where, "make the baseline from a good run")
    rows, found = cells(report), worst(report["findings"])
    return {
        "schema": SCHEMA,
        "made": {
            "kvtrace": report["run"]["kvtrace"],
            "vllm": report["run"]["vllm"],
            "models": models(report),
            "traffic": traffic(report),
        },
        "engines": shapes(report),
        "coverage": {
            "hooks": cast("list[BaselineHook]", _rows([cell for cell in rows if cell.what == "hook"])),
            "ops": cast("list[BaselineOp]", _rows([cell for cell in rows if cell.what == "op"])),
        },
        "ledger": {"saves": _ledger(report["ledger"]["saves"]), "loads": _ledger(report["ledger"]["loads"])},
        "findings": [{"id": id, "severity": found[id]["severity"]} for id in sorted(found)],
        "targets": sorted(
            {one["id"] for one in report["instrumentation"]["targets"] if one["status"] == "found"}
        ),
    }


def traffic(report: Report) -> Traffic:
    """What the engines were asked."""
    ledger = report["ledger"]
    return {
        "requests": min(report["requests"]["total"], 1_000_000),
        "prompt": round(ledger["loads"]["total_tokens"]),
        "computed": round(ledger["saves"]["total_tokens"]),
    }


def models(report: Report) -> list[str]:
    """The models of the engines, without the folders that they lie in on this machine; sorted."""
    found = {engine["model"] for engine in report["run"]["engines"]}
    return sorted(filter(None, (_model(name) for name in found)))


def _model(name: str) -> str:
    # "org/model" names a model everywhere; a path does so by its last part only
    local = name.startswith(("/", ".", "~")) or name.count("/") > 1
    return name.rstrip("/").rpartition("/")[2] if local else name


def shapes(report: Report) -> list[EngineShape]:
    """What each engine is, as far as a connector's hooks depend on it; in a stable order."""
    found = [_shape(engine) for engine in report["run"]["engines"]]
    return sorted(found, key=lambda shape: json.dumps(shape, sort_keys=True))


def _shape(engine: EngineRow) -> EngineShape:
    connector = engine["connector"]
    return {
        "connector": connector["name"] if connector else None,
        "class": connector["class"] if connector else "",
        "module": connector["module"] if connector else "",
        "role": connector["role"] if connector else "",
        "ranks": sorted(set(engine["ranks"])),
        "kv_layers": engine["kv_layers"],
    }


def rounded(share: float) -> float:
    """Four digits, never up: a hook that missed one call in a million is not complete."""
    return math.floor(share * 10_000 + 1e-6) / 10_000


def _rows(found: list[CallCounts]) -> list[CoverageRow]:
    due = [cell for cell in found if cell.eligible]
    rows: list[CoverageRow] = []
    for (name, group), members in grouped(due, lambda cell: (cell.name, cell.group)):
        always = all(cell.fired >= cell.eligible > 1 for cell in members)
        if members[0].what == "hook" and name not in EVERY_STEP and not always:
            continue  # called when there is a reason for it: how often depends on the traffic
        rows += _split(name, group, members)
    return rows


def _split(name: str, group: str | None, members: list[CallCounts]) -> list[CoverageRow]:
    """One row where all layers and ranks saw the same, else one for each kind of layers (and ranks)."""
    every = frozenset(cell.index for cell in members)
    # complete, never called, or between
    kinds = grouped(members, lambda cell: share if (share := rounded(cell.share)) in (0.0, 1.0) else None)
    rows = []
    for _, alike in kinds:
        sets = by_layers(alike)
        all_ranks = len(sets) == 1 and {cell.rank for cell in members} == {cell.rank for cell in alike}
        if len(kinds) == 1:  # pipeline-parallel ranks have different layers: no difference
            sets, all_ranks = {every: []}, True
        for chosen, ranks in sets.items():
            row: dict[str, Any] = {members[0].what: name}
            if group is not None:
                row.update(layers=group, count=len(chosen))
                if chosen != every:
                    row["only"] = ranges(chosen)
            if not all_ranks:
                row["ranks"] = sorted(rank for rank in ranks if rank is not None)
            row["share"] = min(rounded(cell.share) for cell in alike)
            row["work"] = _work(alike)
            rows.append(cast(CoverageRow, row))
    return rows


def _work(cells: Iterable[CallCounts]) -> bool | None:
    """True where each had work, else None where that is not known of one, else False."""
    found = {None if cell.work is None else cell.work > 0 for cell in cells}
    return None if None in found else False not in found


def _ledger(ledger: LedgerRow) -> dict[str, float]:
    part = {name: round(share, 4) for name, share in shares(ledger).items() if share >= 0.00005}
    return {name: part[name] for name in sorted(part, key=lambda name: (outcome_order(name), name))}


def baseline_text(baseline: Baseline) -> str:
    """The file: JSON with one line an engine, hook, op, finding and target."""
    return _text(cast("Mapping[str, object]", baseline), 0) + "\n"


def line_of(row: object) -> str:
    """The line (without indent and comma) that `row` has in :func:`baseline_text`."""
    return json.dumps(row, ensure_ascii=True)


def _text(value: object, depth: int) -> str:
    inner, outer = "  " * (depth + 1), "  " * depth
    if (
        isinstance(value, Mapping)
        and value
        and (depth == 0 or any(isinstance(v, (dict, list)) for v in value.values()))
    ):
        if depth < 2:
            parts = [f"{inner}{json.dumps(key)}: {_text(item, depth + 1)}" for key, item in value.items()]
            return "{\n" + ",\n".join(parts) + f"\n{outer}}}"
    elif isinstance(value, list) and value:
        return "[\n" + ",\n".join(inner + line_of(item) for item in value) + f"\n{outer}]"
    return line_of(value)
