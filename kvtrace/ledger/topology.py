"""Who took part in the run: connectors, engines, their workers, processes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvtrace.ledger.run import Connector, Engine, Process, Worker
from kvtrace.ledger.scan import Scheduled, SpoolScan
from kvtrace.ledger.steps import NEVER_RAN
from kvtrace.trace import facts
from kvtrace.trace.format import Stop
from kvtrace.trace.run_file import ListedProcess, RunFile


def _connectors(scans: Sequence[SpoolScan]) -> list[Connector]:
    """Every connector object, those that could not be made last."""
    found: dict[tuple[str, int], tuple[SpoolScan, facts.ConnectorFact]] = {}
    failed: list[tuple[SpoolScan, facts.ConnectorFact]] = []
    for scan in scans:
        for fact in scan.facts_of(facts.ConnectorFact):
            if fact.ordinal is None:
                failed.append((scan, fact))
                continue
            key = (scan.name, fact.ordinal)
            found[key] = (scan, found[key][1].updated(fact) if key in found else fact)
    return [_connector(scan, fact) for scan, fact in (*found.values(), *failed)]


def _connector(scan: SpoolScan, fact: facts.ConnectorFact) -> Connector:
    values: dict[str, Any] = {
        **vars(fact),
        "ordinal": -1 if fact.ordinal is None else fact.ordinal,
        "ok": fact.ok is not False,
    }
    return Connector(**values, pid=scan.pid, spool=scan.name)


def _find(known: Sequence[Connector], scan: SpoolScan, ordinal: int | None, role: str) -> Connector | None:
    here = [c for c in known if c.spool == scan.name and c.ok]
    for connector in here:
        if ordinal is not None and connector.ordinal == ordinal:
            return connector
    fitting = [c for c in here if c.role == role and c.parent is None]
    return fitting[-1] if len(fitting) == 1 else None


@dataclass(frozen=True)
class Topology:
    """Who took part. ``workers``: those of all engines, spool by spool in the order in which they ran."""

    connectors: tuple[Connector, ...]
    engines: tuple[Engine, ...]
    workers: tuple[Worker, ...]
    processes: tuple[Process, ...]
    tags: frozenset[int] = frozenset()
    """Of all engines of the run, whichever are looked at."""


def topology(scans: Sequence[SpoolScan], run: RunFile) -> Topology:
    """Engines with their workers, joined over all spools."""
    connectors = _connectors(scans)
    engines = _engines(scans, connectors)
    workers = _workers(scans, {engine.tag: engine for engine in engines}, connectors)
    joined = [
        replace(
            engine,
            workers=tuple(
                sorted((w for w in workers if w.engine == engine.tag), key=lambda w: (w.rank, w.pid))
            ),
        )
        for engine in engines
    ]
    processes = _processes(scans, run, joined)
    names = {process.pid: process.name for process in processes}
    named = tuple(replace(engine, process=names.get(engine.pid, "engine core")) for engine in joined)
    tags = frozenset(engine.tag for engine in named)
    return Topology(tuple(connectors), named, tuple(workers), tuple(processes), tags)


def _engines(scans: Sequence[SpoolScan], known: Sequence[Connector]) -> list[Engine]:
    """One per tag that a scheduler announced or that any step carries."""
    facts_of: dict[int, tuple[SpoolScan, facts.EngineFact]] = {}
    for scan in scans:
        for fact in scan.facts_of(facts.EngineFact):
            if fact.tag:
                before = facts_of.get(fact.tag)
                facts_of[fact.tag] = (scan, before[1].updated(fact) if before else fact)
        for tag in scan.scheduled:
            facts_of.setdefault(tag, (scan, facts.EngineFact()))
    for scan in scans:
        for tag in scan.executed:
            facts_of.setdefault(tag, (scan, facts.EngineFact()))
    found = []
    for tag, (scan, fact) in facts_of.items():
        scheduled = scan.scheduled.get(tag, Scheduled())
        found.append(
            Engine(
                tag=tag,
                pid=scan.pid,
                process="",
                facts=fact,
                connector=_find(known, scan, fact.connector, "scheduler"),
                steps=scheduled.steps,
                real_steps=scheduled.real,
                t_first=scheduled.first_t,
                t_last=scheduled.last_t,
                args=_engine_args(scans, scan),
                no_order=_names_no_order(scan),
            )
        )
    return sorted(found, key=lambda engine: (engine.facts.dp_rank, engine.t_first, engine.tag))


def _names_no_order(scan: SpoolScan) -> bool:
    """Whether something in the metadata named KV of no request, or neither stores nor loads, in some step:
    where it names a request's blocks in another, that is no order either."""
    shapes = (one.shape for one in scan.facts_of(facts.UnreadableMetadataFact) if not one.load)
    return any(shape.endswith((facts.NO_DIRECTION, facts.NOBODYS)) for shape in shapes)


def _engine_args(scans: Sequence[SpoolScan], scheduler: SpoolScan) -> dict[str, Any]:
    """Engine arguments are parsed in the front process as often as in the engine's."""
    given: dict[str, Any] = {}
    parent = scheduler.header.ppid
    for scan in sorted(scans, key=lambda s: (s is scheduler, s.pid == parent, s.name)):
        for fact in scan.facts_of(facts.EngineArgsFact):
            given.update(fact.given)
    return given


def _workers(
    scans: Sequence[SpoolScan], engines: Mapping[int, Engine], known: Sequence[Connector]
) -> list[Worker]:
    """Workers, joined to the engines whose steps they executed."""
    found: list[Worker] = []
    for scan in scans:
        latest: dict[int, facts.WorkerFact] = {}
        seen: dict[int, int] = {}
        for t, fact in scan.timed_facts(facts.WorkerFact):
            latest[fact.ordinal] = latest[fact.ordinal].updated(fact) if fact.ordinal in latest else fact
            seen.setdefault(fact.ordinal, t)
        free = sorted(latest, key=lambda ordinal: seen[ordinal])
        # Several engines one after the other in one process: each tag's worker is the
        # latest one that was there when its first step ran.
        for tag, ran in sorted(scan.executed.items(), key=lambda item: item[1].first_t):
            before = [ordinal for ordinal in free if seen[ordinal] <= ran.first_t]
            chosen = before[-1] if before else (free[0] if free else None)
            if chosen is not None:
                free.remove(chosen)
            fact = latest[chosen] if chosen is not None else facts.WorkerFact()
            found.append(_worker(scan, fact, engines[tag], known))
        for ordinal in free if not scan.executed else ():
            owner = _owner(scan, latest[ordinal], engines.values())
            if owner is not None:
                found.append(_worker(scan, latest[ordinal], owner, known))
    return found


def _owner(scan: SpoolScan, worker: facts.WorkerFact, engines: Collection[Engine]) -> Engine | None:
    """The engine of a worker that never ran a step: same process, else parent, else the only one."""
    for pid in (scan.pid, scan.header.ppid):
        fitting = [engine for engine in engines if engine.pid == pid]
        if len(fitting) == 1:
            return fitting[0]
    fitting = [engine for engine in engines if engine.facts.dp_rank == worker.dp_rank]
    return fitting[0] if len(fitting) == 1 else None


def _worker(scan: SpoolScan, fact: facts.WorkerFact, engine: Engine, known: Sequence[Connector]) -> Worker:
    ran = scan.executed.get(engine.tag, NEVER_RAN)
    graphs = [one for one in scan.facts_of(facts.GraphsFact) if one.tag == engine.tag]
    timing = scan.facts_of(facts.DeviceTimingFact)
    prefix = f"engine {engine.facts.dp_rank} " if (engine.facts.dp or 0) > 1 else ""
    return Worker(
        engine=engine.tag,
        pid=scan.pid,
        spool=scan.name,
        process=f"{prefix}worker {fact.rank}",
        connector=_find(known, scan, fact.connector, "worker"),
        facts=fact,
        graphs=graphs[-1] if graphs else facts.GraphsFact(),
        steps=len(ran.steps),
        no_forward_steps=len(ran.idle),
        modes=ran.modes,
        batches=ran.batches,
        capturing_steps=ran.capturing,
        device_off=timing[-1].why if timing and not timing[-1].on else "",
        exec_ns=ran.nanoseconds,
        last_step=ran.last,
        stop_reason=scan.info.stop if scan.info.end not in ("cut", "damaged") else Stop.WRITE_FAILED,
        ops_late=any(one.status == "late" for one in scan.facts_of(facts.TargetFact)),
    )


def _processes(scans: Sequence[SpoolScan], run: RunFile, engines: Sequence[Engine]) -> list[Process]:
    """The processes that wrote a spool, and vLLM's that did not."""
    listed = {row.pid: row for row in run.processes}
    found = []
    for scan in scans:
        name, role, rank = _name(scan, listed.get(scan.pid, ListedProcess()), engines)
        found.append(
            Process(
                pid=scan.pid,
                name=name,
                role=role if role in ("front", "scheduler", "worker") else "other",
                rank=rank,
                spool=scan.name,
                records=scan.info.records,
                end=scan.info.end,
                header=scan.header,
            )
        )
    traced = {process.pid for process in found}
    for pid, row in listed.items():
        if pid not in traced and row.vllm:
            name = row.name or "process"
            # A process that a traced one forked has its name until it gives itself another.
            helper = row.ppid in traced and listed.get(row.ppid, ListedProcess()).name == row.name
            role = "other" if helper else _role_of(name)
            found.append(Process(pid, name, role, None, None, 0, ""))
    order = {"front": 0, "scheduler": 1, "worker": 2, "other": 3}
    found.sort(key=lambda p: (order[p.role], p.rank if p.rank is not None else -1, p.pid, p.spool or ""))
    return found


def _name(scan: SpoolScan, row: ListedProcess, engines: Sequence[Engine]) -> tuple[str, str, int | None]:
    """(name for people, role, rank) of a process that wrote a spool."""
    here = [engine for engine in engines if engine.pid == scan.pid]
    at_work = [worker for engine in engines for worker in engine.workers if worker.pid == scan.pid]
    if here and not (at_work and not any(engine.facts.known or engine.steps for engine in here)):
        name = "engine core"
        if len(engines) > 1 and (here[0].facts.dp or 0) > 1:
            name = f"engine core {here[0].facts.dp_rank}"
        return name + (" and worker" if at_work else ""), "scheduler", None
    if at_work:
        return at_work[0].process, "worker", at_work[0].rank
    role = scan.header.role
    if role == "front":
        argv = " ".join(scan.header.argv) + " " + row.command
        serves = " serve" in argv or "api_server" in argv or "APIServer" in row.name
        return "API server" if serves else "front", role, None
    return {"scheduler": "engine core", "worker": "worker"}.get(role, "process"), role, None


def _role_of(name: str) -> str:
    if "Worker" in name:
        return "worker"
    if "EngineCor" in name:  # the kernel keeps 15 characters of a name
        return "scheduler"
    return "front" if "APIServer" in name else "other"
