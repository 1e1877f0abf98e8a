"""Run directory -> report: the run and its diagnosis, as ``kvtrace.report/2``.

The one place where the analysis' tables become JSON: every value is made a plain Python one, every
list is capped, and the result is held against the published schema before anybody sees it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TypeVar

from kvtrace import __version__, causes, ledger
from kvtrace.causes import diagnosis as cause_model
from kvtrace.causes.evidence.logs import place, shortened
from kvtrace.grouped import grouped
from kvtrace.ledger import run as ledger_model
from kvtrace.ledger.device import ClockRow as DeviceTiming
from kvtrace.ledger.device import DeviceTotals
from kvtrace.ledger.run import HookSteps, OpSteps
from kvtrace.report import model
from kvtrace.report.digest import seal
from kvtrace.report.graphs import asked_for, graph_rows, runner_of, used_by
from kvtrace.report.published import SCHEMA, ReportError
from kvtrace.report.running import left_behind, still_running
from kvtrace.report.shape import row
from kvtrace.report.validate import problem
from kvtrace.terms import Grade
from kvtrace.trace.facts import HOOKS, NOT_OF_TOKENS, EngineFact, Header, KvTransfer
from kvtrace.trace.format import SPOOL_DIR, STEP_MASK
from kvtrace.words import count, plural

T = TypeVar("T")
Covered = TypeVar("Covered", HookSteps, OpSteps)


def build_report(run_dir: str | Path, progress: ledger.Progress = ledger.unwatched) -> model.Report:
    """The report of a run directory, from its spools and its ``run.json``.

    Raises:
        KvtraceError: no readable spool; or a trace so damaged that its numbers make no report.
    """
    run_dir = Path(run_dir)
    run = ledger.read_run(run_dir, progress=progress)
    report = assemble(run, causes.diagnose(run))
    if found := problem(report, model.report_schema()):
        raise ReportError("the trace makes no valid report", run_dir, found, "its spools may be damaged")
    return seal(report)


def assemble(run: ledger_model.Run, diagnosis: cause_model.Diagnosis) -> model.Report:
    """The report of an analysed run; not yet checked against the schema."""
    notes = list(run.notes)
    if few := run.partly_watched:
        share = f"{count(few.watched)} of {plural(few.steps, 'step')}"
        notes.append(f"{share} with prompt tokens were watched, the others not")
    for pid, where, error in run.agent_errors:
        off = f"the agent turned (a part of) itself off at {where}"
        what = "not every call of a hook is seen" if where == HOOKS else off
        notes.append(f"{what} in process {pid}: {error}")
    notes.extend(f"the engine did not start: {one.line}" for one in run.start_failures)
    for worker in run.workers():
        if worker.device_off:
            notes.append(f"device times were not taken in {worker.process}: {worker.device_off}")
    report: model.Report = {
        "schema": SCHEMA,
        "run": _run(run, notes),
        "verdict": diagnosis.verdict,
        "instrumentation": _instrumentation(run),
        "coverage": _coverage(run, notes),
        "stages": [
            {
                "stage": int(one.stage),
                "name": one.stage.label,
                "in": one.into,
                "out": one.out,
                "note": one.note,
            }
            for one in diagnosis.stages
        ],
        "ledger": _ledgers(run, diagnosis),
        "findings": [_finding(one) for one in diagnosis.findings],
        "ruled_out": [row(model.RuledOutRow, one) for one in diagnosis.ruled_out],
        "not_observed": [row(model.NotObservedRow, one) for one in diagnosis.not_observed],
        "requests": _requests(diagnosis.requests),
        "timing": [row(model.TimingRow, one, clock="host", count=one.calls) for one in run.timing],
        "limits": _limits(run, notes),
        "places": [row(model.PlaceRow, one) for one in run.places[: model.MAX_PLACES]],
    }
    if logged := _logged(run):
        report["logged"] = logged
    if layers := _layers(run):
        report["layers"] = layers
    if connectors := _connectors(run, diagnosis, notes):
        report["connectors"] = connectors
    if graphs := _graphs(run, notes):
        report["graphs"] = graphs
    if run.device.calls or run.device.steps:
        report["device"] = _device(run.device)
    return report


# ------------------------------------------------------------------------------ what ran


def _limits(run: ledger_model.Run, notes: list[str]) -> model.Limits:
    limits: model.Limits = {
        "notes": notes,
        "lost_records": sum(spool.lost + spool.left_out for spool in run.spools),
        "damaged": [
            {"spool": f"{SPOOL_DIR}/{spool.name}", "detail": spool.detail or spool.end}
            for spool in run.spools
            if spool.end in ("cut", "damaged")
        ],
        "tracer": {
            "spool_bytes": sum(spool.size for spool in run.spools),
            "records": sum(spool.records for spool in run.spools),
            "in_c": sum(spool.windowed for spool in run.spools),
        },
    }
    if few := run.partly_watched:
        limits["partly_watched"] = {"watched": few.watched, "steps": few.steps}
    return limits


def _run(run: ledger_model.Run, notes: list[str]) -> model.RunFacts:
    file = run.run
    header = next((one.header for one in run.processes if one.agent), Header())
    started, ended = file.started_wall_ns, file.ended_wall_ns
    running = still_running(run)
    if started is not None and ended is not None:
        seconds = max(0.0, (ended - started) / 1e9)
    else:
        seen = [(one.t_first, one.t_last) for one in run.engines if one.t_last]
        seconds = max(0, max(t for _, t in seen) - min(t for t, _ in seen)) / 1e9 if seen else 0.0
        why = "the run's end is not recorded (it still goes on, or kvtrace run was killed)"
        why = "the run still goes on" if running else why
        notes.append(f"{why}: its duration is that of the engines' steps, and what comes later is missing")
    notes += left_behind(file)
    engine = next((one.facts for one in run.engines if one.facts.known), EngineFact())
    processes = run.processes[: model.MAX_PROCESSES]
    if len(processes) < len(run.processes):
        notes.append(f"{len(processes)} of {len(run.processes)} processes are listed")
    facts: model.RunFacts = {
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
    if running:
        facts["running"] = True
    if file.profiles:
        facts["profiles"] = list(file.profiles[: model.MAX_PROCESSES])
    return facts


def _process(one: ledger_model.Process) -> model.ProcessRow:
    return row(model.ProcessRow, one, spool=f"{SPOOL_DIR}/{one.spool}" if one.spool else None)


def _engine(one: ledger_model.Engine) -> model.EngineRow:
    backends = Counter(name for worker in one.workers for name in worker.facts.backends.values())
    direct = [flag for worker in one.workers for flag in worker.facts.direct_call.values()]
    runners = {runner_of(worker) for worker in one.workers}
    modes = dict.fromkeys(used_by(one, worker) for worker in one.workers)
    return row(
        model.EngineRow, one.facts, tag=one.tag, connector=_connector(one), kv_layers=one.layers,
        pairs=one.pairs, ranks=sorted({worker.rank for worker in one.workers}), steps=one.steps,
        real_steps=one.real_steps, requests=one.requests,
        attention=[name for name, _ in backends.most_common()],
        runner=runners.pop() if len(runners) == 1 else "",
        graphs_asked=asked_for(one), graphs_used=" and ".join(filter(None, modes)),
        direct_calls=sum(direct) if direct else None, block_size=one.block_size or None,
        kv_groups=_kv_groups(one),
    )  # fmt: skip


def _kv_groups(one: ledger_model.Engine) -> list[model.KvGroups]:
    """Groups of one kind and block size together, in vLLM's order."""
    alike = grouped(one.facts.kv_groups, lambda group: (group.kind, group.block_size))
    rows: list[model.KvGroups] = [
        {
            "kind": kind,
            "keeps": NOT_OF_TOKENS.get(kind, "tokens"),
            "block_size": size,
            "groups": len(groups),
            "layers": sum(len(group.layers) for group in groups),
        }
        for (kind, size), groups in alike
    ]
    return rows[: model.MAX_KV_GROUPS]


def _connector(one: ledger_model.Engine) -> model.Connector | None:
    """What is live and what is configured; an empty class says that none is live."""
    configured = one.configured
    live = one.connector
    if live is None:
        live = next((worker.connector for worker in one.workers if worker.connector), None)
    if configured is None and live is None:
        return None
    configured = configured or KvTransfer()
    works = live if live is not None and live.ok else None
    return {
        "name": configured.connector or (live.configured if live else "") or "",
        "class": works.cls if works else "",
        "module": works.module if works else "",
        "file": works.file if works else "",
        "role": configured.role or "",
    }


def _instrumentation(run: ledger_model.Run) -> model.Instrumentation:
    counts = Counter(one.status for one in run.targets)
    shown = sorted(run.targets, key=lambda one: one.status in ("found", "pending"))[: model.MAX_TARGETS]
    targets = [row(model.TargetRow, one) for one in sorted(shown, key=lambda one: one.id)]
    return {
        "targets": targets,
        "found": counts["found"],
        "missing": counts["missing"],
        "failed": counts["failed"],
    }


# ------------------------------------------------------------------------------ coverage


def _coverage(run: ledger_model.Run, notes: list[str]) -> model.Coverage:
    hooks, ops = _named(run.hooks), _named(run.ops)
    return {
        "hooks": [_covered(model.HookRow, one) for one in _shown(hooks, "hook", notes)],
        "ops": [_covered(model.OpRow, one) for one in _shown(ops, "op", notes)],
        "summary": _summary(hooks, run),
    }


def _idle(run: ledger_model.Run) -> set[str]:
    """Hooks whose body does nothing, in every worker's connector."""
    bodies = [set(worker.connector.noop) for worker in run.workers() if worker.connector]
    return set.intersection(*bodies) if bodies else set()


def _covered(shape: type[T], one: HookSteps | OpSteps) -> T:
    """A rank or layer that is none is None."""
    return row(shape, one, rank=one.rank if one.rank >= 0 else None, layer=one.layer or None)


def _summary(hooks: Sequence[HookSteps], run: ledger_model.Run) -> list[model.SummaryRow]:
    """A row per hook, over all ranks and layers."""
    idle = _idle(run)
    sums: dict[str, Counter[str]] = defaultdict(Counter)
    for one in hooks:
        sums[one.hook].update(eligible=one.eligible, fired=one.fired, with_work=one.with_work)
    return [
        row(
            model.SummaryRow, one,
            hook=hook, share=one["fired"] / one["eligible"] if one["eligible"] else None, idle=hook in idle,
        )
        for hook, one in sums.items()
    ]  # fmt: skip


def _named(table: Sequence[Covered]) -> list[Covered]:
    """The rows, with process names that are told apart where engines use the same ones."""
    uses = Counter(name for _, _, name in {(one.engine, one.pid, one.process) for one in table})
    return [
        one._replace(process=f"{one.process} (engine {one.engine}, pid {one.pid})")
        if uses[one.process] > 1
        else one
        for one in table
    ]


def _shown(table: Sequence[Covered], what: str, notes: list[str]) -> list[Covered]:
    """The rows that a report lists."""
    cap, places = model.MAX_COVERAGE_ROWS, list(range(len(table)))
    if len(table) > cap:
        notes.append(f"{cap} of {len(table)} coverage rows ({what}s) are listed, the incomplete ones first")
        complete = [one.fired >= one.eligible for one in table]
        places = sorted(sorted(places, key=complete.__getitem__)[:cap])
    return [table[at] for at in places]


# ------------------------------------------------------------------------------ the answer


def _ledgers(run: ledger_model.Run, diagnosis: cause_model.Diagnosis) -> model.Ledgers:
    found: model.Ledgers = {"saves": _ledger(diagnosis.saves), "loads": _ledger(diagnosis.loads)}
    if run.states is not None:
        found["states"] = row(
            model.StateBooks, run.states, unit="states", grade="read",
            saves=_state_book(run.states.saves), loads=_state_book(run.states.loads),
        )  # fmt: skip
    return found


def _state_book(accounts: Mapping[str, int]) -> model.StateBook:
    return {"total": sum(accounts.values()), "accounts": dict(accounts)}


def _ledger(one: ledger_model.Ledger[str]) -> model.LedgerRow:
    one.check()
    return row(
        model.LedgerRow, one, unit="token-layers", grades=_by_grade(one.grades),
        prompts=_by_grade(one.prompts), sent=_sent(one.sent),
    )  # fmt: skip


def _by_grade(amounts: Mapping[str, Mapping[Grade, int]]) -> dict[str, dict[str, int]]:
    """The best grade first, and nothing that is none."""
    return {
        name: {grade.label: of[grade] for grade in sorted(of, reverse=True) if of[grade]}
        for name, of in amounts.items()
    }


def _sent(sent: Mapping[str, int]) -> list[model.Sent]:
    """The peers that got most first; the last row is for those beyond the cap."""
    found = sorted(sent.items(), key=lambda one: (-one[1], one[0]))
    shown = found if len(found) <= model.MAX_PEERS else found[: model.MAX_PEERS - 1]
    rest = sum(amount for _, amount in found[len(shown) :])
    return [{"to": to, "amount": amount} for to, amount in [*shown, *([("others", rest)] if rest else [])]]


def _logged(run: ledger_model.Run) -> list[model.LoggedRow]:
    counts: Counter[tuple[str, str, str, str]] = Counter()
    for line in run.logs:
        counts[place(line.hook) or "the connector", line.level, line.logger, shortened(line.message)] += (
            line.count
        )
    rows = [
        model.LoggedRow(where=where, level=level, logger=logger, message=message, count=times)
        for (where, level, logger, message), times in counts.items()
    ]
    rows.sort(key=lambda one: (one["level"] == "WARNING", -one["count"]))
    return rows[: model.MAX_LOGGED]


def _layers(run: ledger_model.Run) -> list[model.LayerKept]:
    """Those that kept less than others of their engine, whatever is not seen of them; the least first."""
    most = {
        tag: max(one.tokens for one in run.kept if one.engine == tag) for tag in {o.engine for o in run.kept}
    }
    less = [one for one in run.kept if one.tokens + one.unseen < most[one.engine]]
    less.sort(key=lambda one: one.tokens)
    return [row(model.LayerKept, one, most=most[one.engine]) for one in less[: model.MAX_LAYER_ROWS]]


def _finding(one: cause_model.Finding) -> model.FindingRow:
    events = [
        row(model.EventRow, event, step=int(event.step) & STEP_MASK, layer=event.layer or None)
        for event in one.events[: model.MAX_EVENTS]
    ]
    docs = f"docs/causes/{one.id}.md"
    grade = one.grade.label if one.grade is not None else None
    return row(model.FindingRow, one, events=events, docs=docs, grade=grade)


def _connectors(
    run: ledger_model.Run, diagnosis: cause_model.Diagnosis, notes: list[str]
) -> list[model.ConnectorBooks]:
    """Connectors inside another one, each with its own books."""
    parts = list(zip(run.parts, diagnosis.parts, strict=True))
    if len(parts) > model.MAX_CONNECTORS:
        notes.append(f"the ledgers of {model.MAX_CONNECTORS} of {len(parts)} connectors are listed")
    return [
        {
            "name": part.name,
            "engines": [engine.tag for engine in part.run.engines],
            "verdict": own.verdict,
            "ledger": _ledgers(part.run, own),
            "coverage": _summary(part.run.hooks, part.run),
            "findings": list(dict.fromkeys(one.id for one in own.findings)),
            "ruled_out": [row(model.RuledOutRow, one) for one in own.ruled_out],
            "not_observed": [row(model.NotObservedRow, one) for one in own.not_observed],
        }
        for part, (_, own) in parts[: model.MAX_CONNECTORS]
    ]


def request_rows(judged: Iterable[cause_model.JudgedRequest]) -> list[model.RequestRow]:
    """``Diagnosis.requests`` as a report writes them."""
    return [
        row(
            model.RequestRow, one.request,
            client=one.request.client or None,
            saved=one.tokens.saved, sent=one.tokens.sent, not_saved=one.tokens.lost,
            not_observed=one.tokens.unseen, verdict=one.verdict, grade=one.grade or None,
            first_step=one.request.first_step & STEP_MASK, last_step=one.request.last_step & STEP_MASK,
        )
        for one in judged
    ]  # fmt: skip


def _requests(judged: Sequence[cause_model.JudgedRequest]) -> model.RequestRows:
    rows = request_rows(judged[: model.MAX_REQUEST_ROWS])
    found: model.RequestRows = {"total": len(judged), "shown": len(rows), "rows": rows}
    if unended := sum(not one.request.t_end for one in judged):
        found["unended"] = unended
    return found


def _graphs(run: ledger_model.Run, notes: list[str]) -> list[model.GraphRow]:
    rows = graph_rows(run)
    if len(rows) > model.MAX_GRAPH_ROWS:
        notes.append(f"the CUDA graphs of {model.MAX_GRAPH_ROWS} of {len(rows)} workers are listed")
    return rows[: model.MAX_GRAPH_ROWS]


def _device(times: DeviceTotals) -> model.DeviceTimes:
    def of(one: DeviceTiming) -> model.DeviceRow:
        figures = {
            f"{clock}_{figure}_ns": value
            for clock, values in (("host", one.host), ("device", one.device))
            for figure, value in zip(("p50", "p99", "total"), values, strict=True)
        }
        return row(model.DeviceRow, one, **figures)

    return row(model.DeviceTimes, times, rows=[of(one) for one in times.rows])


def _iso(wall_ns: int | None) -> str | None:
    if wall_ns is None:
        return None
    try:
        return datetime.fromtimestamp(wall_ns / 1e9, tz=timezone.utc).isoformat(timespec="seconds")
    except (OverflowError, OSError, ValueError):
        return None
