"""Run directory -> report: the run and its diagnosis, as ``kvtrace.report/2``.

The one place where the analysis' tables become JSON: every value is made a plain Python one, every
list is capped, and the result is held against the published schema before anybody sees it.
"""

from __future__ import annotations

import math
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, cast, get_args

import pandas as pd

from kvtrace import __version__, causes, ledger
from kvtrace.causes import model as cause_model
from kvtrace.ledger import model as ledger_model
from kvtrace.ledger.device import DeviceTimes
from kvtrace.ledger.graphs import graph_uses
from kvtrace.report import model
from kvtrace.report.validate import schema_problem
from kvtrace.trace.facts import Engine, Header, KvTransfer
from kvtrace.trace.format import SPOOL_DIR, STEP_MASK

_TRUSTS, _ROLES = get_args(model.Trust), get_args(model.Role)


def build_report(run_dir: str | Path) -> model.Report:
    """The report of a run directory, from its spools and its ``run.json``.

    Raises:
        KvtraceError: no readable spool; or a trace so damaged that its numbers make no report.
    """
    run_dir = Path(run_dir)
    run = ledger.read_run(run_dir)
    report = assemble(run, causes.diagnose(run))
    if found := schema_problem(report):
        raise model.ReportError(
            "the trace makes no valid report", run_dir, found, "its spools may be damaged"
        )
    return report


def assemble(run: ledger_model.Run, diagnosis: cause_model.Diagnosis) -> model.Report:
    """The report of an analysed run; not yet checked against the schema."""
    notes: list[str] = list(run.notes)
    for pid, where, error in run.agent_errors:
        notes.append(f"the agent turned (a part of) itself off in process {pid}: {where}: {error}")
    notes.extend(f"the engine did not start: {line}" for line in run.start_failures)
    for worker in run.workers():
        if worker.device_off:
            notes.append(f"device times were not taken in {worker.process}: {worker.device_off}")
    report: model.Report = {
        "schema": model.SCHEMA,
        "run": _run(run, notes),
        "verdict": diagnosis.verdict,
        "instrumentation": _instrumentation(run, notes),
        "coverage": _coverage(run, notes),
        "stages": [
            {
                "stage": int(row.stage),
                "name": row.stage.label,
                "in": row.into,
                "out": row.out,
                "note": row.note,
            }
            for row in diagnosis.stages
        ],
        "ledger": {"saves": _ledger(diagnosis.saves), "loads": _ledger(diagnosis.loads)},
        "findings": [_finding(one) for one in diagnosis.findings],
        "ruled_out": [{"id": one.id, "evidence": one.evidence} for one in diagnosis.ruled_out],
        "not_observed": [{"id": one.id, "why": one.why} for one in diagnosis.not_observed],
        "requests": _requests(diagnosis.requests),
        "timing": _timing(run.timing),
        "limits": {
            "notes": notes,
            "lost_records": sum(spool.lost for spool in run.spools),
            "damaged": [
                {"spool": f"{SPOOL_DIR}/{spool.name}", "detail": spool.detail or spool.end}
                for spool in run.spools
                if spool.end in ("cut", "damaged")
            ],
            "tracer": {
                "spool_bytes": sum(spool.size for spool in run.spools),
                "records": sum(spool.records for spool in run.spools),
            },
        },
    }
    if graphs := _graphs(run, notes):
        report["graphs"] = graphs
    if run.device.calls or run.device.steps:
        report["device"] = _device(run.device)
    return report


# ------------------------------------------------------------------------------ what ran


def _run(run: ledger_model.Run, notes: list[str]) -> model.RunFacts:
    file = run.run
    header = next((one.header for one in run.processes if one.agent), Header())
    started, ended = file.started_wall_ns, file.ended_wall_ns
    if started is not None and ended is not None:
        seconds = max(0.0, (ended - started) / 1e9)
    else:
        seen = [(one.t_first, one.t_last) for one in run.engines if one.t_last]
        seconds = max(0, max(t for _, t in seen) - min(t for t, _ in seen)) / 1e9 if seen else 0.0
        notes.append("the run's end is not recorded: its duration is that of the engines' steps")
    engine = next((one.facts for one in run.engines if one.facts.known), Engine())
    processes = run.processes[: model.MAX_PROCESSES]
    if len(processes) < len(run.processes):
        notes.append(f"{len(processes)} of {len(run.processes)} processes are listed")
    return {
        "name": file.name or run.directory.resolve().name,
        "command": list(file.command or header.argv),
        "started": _iso(started),
        "seconds": round(seconds, 3),
        "exit_code": file.exit_code,
        "signal": file.signal or None,
        "kvtrace": file.kvtrace or header.kvtrace or __version__,
        "vllm": engine.vllm or next((one.header.vllm for one in run.processes if one.header.vllm), None),
        "torch": engine.torch or None,
        "python": header.python or file.python or None,
        "host": file.host or header.host,
        "processes": [_process(one) for one in processes],
        "engines": [_engine(one) for one in run.engines[: model.MAX_PROCESSES]],
    }


def _process(one: ledger_model.Process) -> model.Process:
    return {
        "pid": one.pid,
        "name": one.name,
        "role": cast("Any", one.role if one.role in _ROLES else "other"),
        "rank": one.rank,
        "spool": f"{SPOOL_DIR}/{one.spool}" if one.spool else None,
        "records": int(one.records),
        "end": one.end,
        "agent": one.agent,
    }


def _engine(one: ledger_model.Engine) -> model.Engine:
    facts = one.facts
    return {
        "tag": one.tag,
        "dp_rank": max(0, facts.dp_rank),
        "platform": facts.platform or "",
        "model": facts.model,
        "connector": _connector(one),
        "tp": _count_or_none(facts.tp),
        "pp": _count_or_none(facts.pp),
        "block_size": _count_or_none(facts.block_size),
        "prefix_caching": facts.prefix_caching,
        "max_num_batched_tokens": _count_or_none(facts.max_num_batched_tokens),
        "chunked_prefill": facts.chunked_prefill,
        "enforce_eager": facts.enforce_eager,
        "cudagraph_mode": facts.cudagraph_mode or "",
        "kv_layers": one.layers,
        "pairs": int(one.pairs),
        "ranks": sorted({worker.rank for worker in one.workers}),
        "steps": int(one.steps),
        "real_steps": int(one.real_steps),
        "requests": int(one.requests),
    }


def _connector(one: ledger_model.Engine) -> model.Connector | None:
    """What is live and what is configured; an empty class says that none is live."""
    configured = one.configured
    live = one.connector
    if live is None:
        live = next((worker.connector for worker in one.workers if worker.connector), None)
    if configured is None and live is None:
        return None
    configured = configured or KvTransfer()
    works = live is not None and live.ok
    return {
        "name": configured.connector or (live.configured if live else "") or "",
        "class": live.cls if live and works else "",
        "module": live.module if live and works else "",
        "file": live.file if live and works else "",
        "role": configured.role or "",
    }


def _instrumentation(run: ledger_model.Run, notes: list[str]) -> model.Instrumentation:
    counts = {
        status: sum(one.status == status for one in run.targets) for status in ("found", "missing", "failed")
    }
    shown = sorted(run.targets, key=lambda one: one.status in ("found", "pending"))[: model.MAX_TARGETS]
    return {
        "targets": [
            {
                "id": one.id,
                "module": one.module,
                "attr": one.attr,
                "status": cast("Any", one.status),
                "processes": int(one.processes),
                "detail": one.detail,
            }
            for one in sorted(shown, key=lambda one: one.id)
        ],
        "found": counts["found"],
        "missing": counts["missing"],
        "failed": counts["failed"],
    }


# ------------------------------------------------------------------------------ coverage


def _coverage(run: ledger_model.Run, notes: list[str]) -> model.Coverage:
    hooks, ops = _named(run.hooks), _named(run.ops)
    summary: list[model.SummaryRow] = []
    for name, group in hooks.groupby("hook", sort=False):
        eligible, fired = int(group["eligible"].sum()), int(group["fired"].sum())
        summary.append(
            {
                "hook": str(name),
                "eligible": eligible,
                "fired": fired,
                "with_work": int(group["with_work"].sum()),
                "share": round(fired / eligible, 6) if eligible else None,
            }
        )
    return {
        "hooks": [
            cast(model.HookRow, row) for row in _coverage_rows(hooks, "hook", ("with_work", "raised"), notes)
        ],
        "ops": [cast(model.OpRow, row) for row in _coverage_rows(ops, "op", ("direct",), notes)],
        "summary": summary,
    }


def _named(table: pd.DataFrame) -> pd.DataFrame:
    """The table with process names that are told apart where engines use the same ones."""
    if table.empty:
        return table
    owners = table[["engine", "pid", "process"]].drop_duplicates()
    twice = set(owners.loc[owners["process"].duplicated(keep=False), "process"])
    if not twice:
        return table
    names = [
        f"{process} (engine {engine}, pid {pid})" if process in twice else str(process)
        for process, engine, pid in zip(table["process"], table["engine"], table["pid"], strict=True)
    ]
    named: pd.DataFrame = table.assign(process=names)
    return named


def _coverage_rows(
    table: pd.DataFrame, what: str, numbers: tuple[str, ...], notes: list[str]
) -> list[dict[str, object]]:
    cap = model.MAX_COVERAGE_ROWS
    if len(table) > cap:
        notes.append(f"{cap} of {len(table)} coverage rows ({what}s) are listed, the incomplete ones first")
        keep = (table["fired"] >= table["eligible"]).sort_values(kind="stable").index[:cap]
        table = table.loc[keep.sort_values()]
    rows: list[dict[str, object]] = []
    for one in table.to_dict("records"):
        rank = _int_or_none(one["rank"])
        row: dict[str, object] = {
            "process": str(one["process"]),
            "rank": rank if rank is not None and rank >= 0 else None,
            "layer": str(one["layer"]) or None,
            what: str(one[what]),
            "eligible": int(one["eligible"]),
            "fired": int(one["fired"]),
        }
        row.update({name: int(one[name]) for name in numbers})
        rows.append(row)
    return rows


# ------------------------------------------------------------------------------ the answer


def _ledger(one: ledger_model.Ledger) -> model.Ledger:
    one.check()
    return {
        "unit": "token-layers",
        "total": int(one.total),
        "accounts": {name: int(amount) for name, amount in one.accounts.items()},
        "pairs": None if one.pairs is None else int(one.pairs),
        "tokens": {name: _number(amount) for name, amount in one.tokens.items()},
        "total_tokens": _number(one.total_tokens),
        "trust": cast("Any", one.trust if one.trust in _TRUSTS else "unknown"),
        "trust_note": one.trust_note,
    }


def _finding(one: cause_model.Finding) -> model.Finding:
    return {
        "id": one.id,
        "severity": cast("Any", one.severity),
        "stage": None if one.stage is None else int(one.stage),
        "tokens": _number(one.tokens),
        "share": min(1.0, _number(one.share, 6)),
        "requests": int(one.requests),
        "title": one.title,
        "evidence": list(one.evidence),
        "events": [
            {
                "request": event.request,
                "step": int(event.step) & STEP_MASK,
                "rank": event.rank,
                "layer": event.layer or None,
                "text": event.text,
            }
            for event in one.events[: model.MAX_EVENTS]
        ],
        "remedy": list(one.remedy),
        "versions": one.versions,
        "docs": one.docs or f"docs/causes/{one.id}.md",
    }


def request_rows(table: pd.DataFrame) -> list[model.RequestRow]:
    """The rows of the diagnosis' table of requests (``Diagnosis.requests``) as a report writes them."""
    return [
        {
            "id": str(one["id"]),
            "client": _text(one["client"]) or None,
            "engine": _count(one["engine"]),
            "prompt": _count(one["prompt"]),
            "computed": _count(one["computed"]),
            "output": _count(one["output"]),
            "local": _count(one["local"]),
            "external": _count(one["external"]),
            "chunks": _count(one["chunks"]),
            "chunk_tokens": [_count(part) for part in one["chunk_tokens"][: model.MAX_CHUNKS_SHOWN]],
            "saved": _number(one["saved_tokens"]),
            "not_saved": _number(one["not_saved_tokens"]),
            "verdict": str(one["verdict"]),
            "status": _text(one["status"]),
            "first_step": _count(one["first_step"]) & STEP_MASK,
            "last_step": _count(one["last_step"]) & STEP_MASK,
            "block": _count(one["block"]),
        }
        for one in table.to_dict("records")
    ]


def _requests(table: pd.DataFrame) -> model.Requests:
    rows = request_rows(table.head(model.MAX_REQUEST_ROWS))
    return {"total": len(table), "shown": len(rows), "rows": rows}


def _timing(table: pd.DataFrame) -> list[model.TimingRow]:
    rows: list[model.TimingRow] = []
    for one in table.to_dict("records"):
        if one["kind"] != "hook":
            continue
        share = one["share_of_steps"]
        rows.append(
            {
                "hook": str(one["hook"]),
                "clock": cast("Any", one["clock"]),
                "count": _count(one["count"]),
                "p50_ns": _count(one["p50_ns"]),
                "p99_ns": _count(one["p99_ns"]),
                "total_ns": _count(one["total_ns"]),
                "share_of_steps": None if share is None or pd.isna(share) else _number(share, 6),
            }
        )
    return rows


def _graphs(run: ledger_model.Run, notes: list[str]) -> list[model.GraphRow]:
    uses = graph_uses(run)
    if len(uses) > model.MAX_GRAPH_ROWS:
        notes.append(f"the CUDA graphs of {model.MAX_GRAPH_ROWS} of {len(uses)} workers are listed")
    return [
        {
            "process": one.worker.process,
            "rank": max(0, one.worker.rank),
            "runner": one.runner,
            "asked": one.asked,
            "configured": one.configured,
            "used": one.used,
            "why": one.why,
            "breakable": one.breakable,
            "captured": None if one.captured is None else _count(one.captured),
            "capturing_steps": _count(one.capturing_steps),
            "modes": [
                {
                    "mode": mode.mode,
                    "steps": _count(mode.steps),
                    "tokens": _count(mode.tokens),
                    "padded": _count(mode.padded),
                    "layer_steps": _count(mode.layer_steps),
                    "bodies": _count(mode.bodies),
                    "saves": _count(mode.saves),
                }
                for mode in one.modes
            ],
        }
        for one in uses[: model.MAX_GRAPH_ROWS]
    ]


def _device(times: DeviceTimes) -> model.DeviceTimes:
    return {
        "steps": _count(times.steps),
        "calls": _count(times.calls),
        "untimed": _count(times.untimed),
        "lost": _count(times.lost),
        "own_ns": _count(times.own_ns),
        "busy_ns": _count(times.busy_ns),
        "rows": [
            {
                "name": row.name,
                "kind": cast("Any", row.kind),
                "count": _count(row.count),
                "host_p50_ns": _count(row.host[0]),
                "host_p99_ns": _count(row.host[1]),
                "host_total_ns": _count(row.host[2]),
                "device_p50_ns": _count(row.device[0]),
                "device_p99_ns": _count(row.device[1]),
                "device_total_ns": _count(row.device[2]),
                "other_stream": _count(row.other_stream),
                "behind": _count(row.behind),
                "waited": _count(row.waited),
            }
            for row in times.rows()
        ],
    }


# ------------------------------------------------------------------------------ plain values


def _text(value: object) -> str:
    """A string, "" for anything that is none (absent, NaN)."""
    return value if isinstance(value, str) else ""


def _int_or_none(value: object) -> int | None:
    if value is None or isinstance(value, (bool, str)):
        return None
    try:
        return int(cast(Any, value))
    except (TypeError, ValueError, OverflowError):
        return None


def _count(value: object) -> int:
    return max(0, _int_or_none(value) or 0)


def _count_or_none(number: int | None) -> int | None:
    return None if number is None or number < 0 else number


def _number(value: object, digits: int = 3) -> float:
    number = float(cast(Any, value))
    return max(0.0, round(number, digits)) if math.isfinite(number) else 0.0


def _iso(wall_ns: int | None) -> str | None:
    if wall_ns is None:
        return None
    try:
        return datetime.fromtimestamp(wall_ns / 1e9, tz=timezone.utc).isoformat(timespec="seconds")
    except (OverflowError, OSError, ValueError):
        return None
