"""Who took part in the run: connectors, engines, their workers, processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvtrace.ledger.model import Connector, Engine, Process, Worker
from kvtrace.ledger.run_file import ListedProcess, RunFile
from kvtrace.ledger.scan import SpoolScan
from kvtrace.trace import facts


def connectors(scans: Sequence[SpoolScan]) -> list[Connector]:
    """Every connector object, those that could not be made last."""
    found: dict[tuple[str, int], tuple[SpoolScan, facts.Connector]] = {}
    failed: list[tuple[SpoolScan, facts.Connector]] = []
    for scan in scans:
        for fact in scan.facts(facts.Connector):
            if fact.ordinal is None:
                failed.append((scan, fact))
                continue
            key = (scan.path.name, fact.ordinal)
            found[key] = (scan, found[key][1].updated(fact) if key in found else fact)
    return [_connector(scan, fact) for scan, fact in (*found.values(), *failed)]


def _connector(scan: SpoolScan, fact: facts.Connector) -> Connector:
    values: dict[str, Any] = {
        **vars(fact),
        "ordinal": -1 if fact.ordinal is None else fact.ordinal,
        "ok": fact.ok is not False,
    }
    return Connector(**values, pid=scan.pid, spool=scan.path.name)


def _find(
    known: list[Connector], scan: SpoolScan, ordinal: int | None, role: str, tag: int
) -> Connector | None:
    here = [c for c in known if c.spool == scan.path.name and c.ok]
    for connector in here:
        if ordinal is not None and connector.ordinal == ordinal:
            return connector
    fitting = [c for c in here if c.role == role and c.parent is None and c.engine_tag in (None, 0, tag)]
    return fitting[-1] if len(fitting) == 1 else None


def engines(scans: Sequence[SpoolScan], known: list[Connector]) -> list[Engine]:
    """One per tag that a scheduler announced or that any step carries."""
    told: dict[int, tuple[SpoolScan, facts.Engine]] = {}
    for scan in scans:
        for fact in scan.facts(facts.Engine):
            if fact.tag:
                told[fact.tag] = (scan, told[fact.tag][1].updated(fact) if fact.tag in told else fact)
        for tag in scan.scheduled:
            told.setdefault(tag, (scan, facts.Engine()))
    for scan in scans:
        for tag in scan.executed:
            told.setdefault(tag, (scan, facts.Engine()))
    found = []
    for tag, (scan, fact) in told.items():
        tally = scan.scheduled.get(tag)
        found.append(
            Engine(
                tag=tag,
                pid=scan.pid,
                process="",
                facts=fact,
                connector=_find(known, scan, fact.connector, "scheduler", tag),
                steps=tally.steps if tally else 0,
                real_steps=tally.real if tally else 0,
                t_first=tally.first_t if tally else 0,
                t_last=tally.last_t if tally else 0,
                args=_engine_args(scans, scan),
            )
        )
    found.sort(key=lambda engine: (engine.facts.dp_rank, engine.t_first, engine.tag))
    return found


def _engine_args(scans: Sequence[SpoolScan], own: SpoolScan) -> dict[str, Any]:
    """Engine arguments are parsed in the front process as often as in the engine's."""
    given: dict[str, Any] = {}
    for scan in sorted(scans, key=lambda s: (s is own, s.pid == own.header.ppid, s.path.name)):
        for fact in scan.facts(facts.EngineArgs):
            given.update(fact.given)
    return given


def workers(
    scans: Sequence[SpoolScan], found: list[Engine], known: list[Connector]
) -> list[tuple[SpoolScan, Worker]]:
    """Workers, joined to the engines whose steps they executed; the engines' lists are filled."""
    by_tag = {engine.tag: engine for engine in found}
    joined: list[tuple[SpoolScan, Worker]] = []
    for scan in scans:
        latest: dict[int, facts.Worker] = {}
        seen: dict[int, int] = {}
        for t, fact in scan.timed_facts(facts.Worker):
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
            fact = latest[chosen] if chosen is not None else facts.Worker()
            joined.append((scan, _worker(scan, fact, tag, known)))
        if not scan.executed:
            for ordinal in free:
                owner = _owner(scan, latest[ordinal], found)
                if owner is not None:
                    joined.append((scan, _worker(scan, latest[ordinal], owner.tag, known)))
    for scan, worker in joined:
        engine = by_tag[worker.engine]
        ran_here = scan.executed.get(worker.engine)
        worker.stop_reason = scan.info.stop
        worker.process = f"worker {worker.rank}"
        if (engine.facts.dp or 0) > 1:
            worker.process = f"engine {engine.facts.dp_rank} {worker.process}"
        if ran_here is not None:
            worker.steps = len(ran_here.steps)
            worker.no_forward_steps = len(ran_here.idle)
            worker.modes = ran_here.modes
            worker.exec_ns = ran_here.nanoseconds
            worker.last_step = ran_here.last
            worker.batches = ran_here.batches
            worker.capturing_steps = ran_here.capturing
        graphs = [fact for fact in scan.facts(facts.Graphs) if fact.tag == worker.engine]
        worker.graphs = graphs[-1] if graphs else facts.Graphs()
        timing = scan.facts(facts.DeviceTiming)
        worker.device_off = timing[-1].why if timing and not timing[-1].on else ""
        engine.workers.append(worker)
    for engine in found:
        engine.workers.sort(key=lambda worker: (worker.rank, worker.pid))
    return joined


def _owner(scan: SpoolScan, worker: facts.Worker, found: list[Engine]) -> Engine | None:
    """The engine of a worker that never ran a step: same process, else parent, else the only one."""
    for pid in (scan.pid, scan.header.ppid):
        fitting = [engine for engine in found if engine.pid == pid]
        if len(fitting) == 1:
            return fitting[0]
    fitting = [engine for engine in found if engine.facts.dp_rank == worker.dp_rank]
    return fitting[0] if len(fitting) == 1 else None


def _worker(scan: SpoolScan, fact: facts.Worker, tag: int, known: list[Connector]) -> Worker:
    return Worker(
        engine=tag,
        pid=scan.pid,
        spool=scan.path.name,
        process="",
        connector=_find(known, scan, fact.connector, "worker", tag),
        facts=replace(fact, kv_layers=tuple(dict.fromkeys(fact.kv_layers))),
    )


def processes(scans: Sequence[SpoolScan], run: RunFile, found: list[Engine]) -> list[Process]:
    """The processes that wrote a spool, and vLLM's that did not."""
    listed = {row.pid: row for row in run.processes}
    result = []
    for scan in scans:
        name, role, rank = _name(scan, listed.get(scan.pid, ListedProcess()), found)
        result.append(
            Process(
                pid=scan.pid,
                ppid=scan.header.ppid,
                name=name,
                role=role if role in ("front", "scheduler", "worker") else "other",
                rank=rank,
                spool=scan.path.name,
                records=scan.info.records,
                end=scan.info.end,
                vllm=True,
                header=scan.header,
            )
        )
    traced = {process.pid for process in result}
    for pid, row in listed.items():
        if pid in traced or not row.vllm:
            continue
        name = row.name or "process"
        result.append(Process(pid, row.ppid, name, _role_of(name), None, None, 0, "", True))
    order = {"front": 0, "scheduler": 1, "worker": 2, "other": 3}
    result.sort(key=lambda p: (order[p.role], p.rank if p.rank is not None else -1, p.pid, p.spool or ""))
    return result


def _name(scan: SpoolScan, row: ListedProcess, found: list[Engine]) -> tuple[str, str, int | None]:
    """(name for people, role, rank) of a process that wrote a spool."""
    here = [engine for engine in found if engine.pid == scan.pid]
    at_work = [worker for engine in found for worker in engine.workers if worker.pid == scan.pid]
    if here and not (at_work and not any(engine.facts.known or engine.steps for engine in here)):
        name = "engine core"
        if len(found) > 1 and (here[0].facts.dp or 0) > 1:
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
