"""From the facts in the spools: processes, engines, workers, connectors, targets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvtrace.ledger.model import (
    ConfigKeys,
    Connector,
    Engine,
    HookException,
    LogLine,
    Process,
    Swallowed,
    Target,
    Worker,
)
from kvtrace.ledger.scan import SpoolScan
from kvtrace.ledger.values import flag, integer, optional_integer, optional_text, table, text, texts
from kvtrace.trace.format import Fact

_MAX_PLACES = 256
_WORST = ("failed", "missing", "found", "pending")


def _facts(scan: SpoolScan, kind: Fact) -> list[tuple[int, dict[str, Any]]]:
    return [(t, value) for fact, t, value in scan.facts if fact == kind]


def _later(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
    """A fact can be sent again with more in it: what the later one knows wins."""
    return new if old is None else {**old, **{key: value for key, value in new.items() if value is not None}}


def connectors(scans: list[SpoolScan]) -> list[Connector]:
    found: dict[tuple[str, int], dict[str, Any]] = {}
    failed: list[tuple[SpoolScan, dict[str, Any]]] = []
    for scan in scans:
        for _, value in _facts(scan, Fact.CONNECTOR):
            ordinal = optional_integer(value, "ordinal")
            if ordinal is None:
                failed.append((scan, value))
                continue
            key = (scan.path.name, ordinal)
            found[key] = _later(found.get(key), value)
    by_name = {scan.path.name: scan for scan in scans}
    made = [(by_name[name], value) for (name, _), value in found.items()]
    return [_connector(scan, value) for scan, value in made + failed]


def _connector(scan: SpoolScan, value: Mapping[str, Any]) -> Connector:
    ints = {
        key: n for key, n in table(value, "ints").items() if isinstance(n, int) and not isinstance(n, bool)
    }
    return Connector(
        pid=scan.pid,
        ordinal=integer(value, "ordinal", -1),
        role=text(value, "role"),
        parent=optional_integer(value, "parent"),
        configured=optional_text(value, "configured"),
        cls=text(value, "class"),
        module=text(value, "module"),
        file=text(value, "file"),
        ok=flag(value, "ok") is not False,
        error_type=optional_text(value, "error_type"),
        error=optional_text(value, "error"),
        proxy=text(value, "proxy"),
        noop=texts(value, "noop"),
        overrides=texts(value, "overrides"),
        ints=ints,
        engine_tag=optional_integer(value, "engine_tag"),
        spool=scan.path.name,
        resolves=flag(value, "resolves"),
        requires_piecewise=flag(value, "requires_piecewise"),
    )


def _find(
    known: list[Connector], scan: SpoolScan, ordinal: int | None, role: str, tag: int
) -> Connector | None:
    mine = [c for c in known if c.spool == scan.path.name and c.ok]
    for connector in mine:
        if ordinal is not None and connector.ordinal == ordinal:
            return connector
    fitting = [c for c in mine if c.role == role and c.parent is None and c.engine_tag in (None, 0, tag)]
    return fitting[-1] if len(fitting) == 1 else None


def engines(scans: list[SpoolScan], known: list[Connector]) -> list[Engine]:
    """One per tag that a scheduler announced or that any step carries."""
    facts: dict[int, tuple[SpoolScan, dict[str, Any]]] = {}
    for scan in scans:
        for _, value in _facts(scan, Fact.ENGINE):
            tag = integer(value, "tag")
            if tag:
                facts[tag] = (scan, _later(facts[tag][1] if tag in facts else None, value))
        for tag in scan.scheduled:
            facts.setdefault(tag, (scan, {}))
    for scan in scans:
        for tag in scan.executed:
            facts.setdefault(tag, (scan, {}))
    found = []
    for tag, (scan, value) in facts.items():
        tally = scan.scheduled.get(tag)
        found.append(
            Engine(
                tag=tag,
                pid=scan.pid,
                process="",
                facts=value,
                connector=_find(known, scan, optional_integer(value, "connector"), "scheduler", tag),
                steps=tally.steps if tally else 0,
                real_steps=tally.real if tally else 0,
                t_first=tally.first_t if tally else 0,
                t_last=tally.last_t if tally else 0,
                args=_engine_args(scans, scan),
            )
        )
    found.sort(key=lambda engine: (integer(engine.facts, "dp_rank"), engine.t_first, engine.tag))
    return found


def _engine_args(scans: list[SpoolScan], own: SpoolScan) -> dict[str, Any]:
    """Engine arguments are parsed in the front process as often as in the engine's."""
    parent = integer(own.header, "ppid", -1)
    given: dict[str, Any] = {}
    for scan in sorted(scans, key=lambda s: (s is own, s.pid == parent, s.path.name)):
        for _, value in _facts(scan, Fact.ENGINE_ARGS):
            given.update(table(value, "given"))
    return given


def workers(
    scans: list[SpoolScan], found: list[Engine], known: list[Connector]
) -> list[tuple[SpoolScan, Worker]]:
    """Workers, joined to the engines whose steps they executed; the engines' lists are filled."""
    by_tag = {engine.tag: engine for engine in found}
    joined: list[tuple[SpoolScan, Worker]] = []
    for scan in scans:
        facts: dict[int, dict[str, Any]] = {}
        seen: dict[int, int] = {}
        for t, value in _facts(scan, Fact.WORKER):
            ordinal = integer(value, "ordinal")
            facts[ordinal] = _later(facts.get(ordinal), value)
            seen.setdefault(ordinal, t)
        free = sorted(facts, key=lambda ordinal: seen[ordinal])
        # Several engines one after the other in one process: each tag's worker is the
        # latest one that was there when its first step ran.
        for tag, ran in sorted(scan.executed.items(), key=lambda item: item[1].first_t):
            before = [ordinal for ordinal in free if seen[ordinal] <= ran.first_t]
            chosen = before[-1] if before else (free[0] if free else None)
            value = facts[chosen] if chosen is not None else {}
            if chosen is not None:
                free.remove(chosen)
            joined.append((scan, _worker(scan, value, tag, known)))
        if not scan.executed:
            for ordinal in free:
                owner = _owner(scan, facts[ordinal], found)
                if owner is not None:
                    joined.append((scan, _worker(scan, facts[ordinal], owner.tag, known)))
    for scan, worker in joined:
        engine = by_tag[worker.engine]
        ran_here = scan.executed.get(worker.engine)
        worker.stop_reason = scan.info.stop
        worker.process = f"worker {worker.rank}"
        if integer(engine.facts, "dp") > 1:
            worker.process = f"engine {integer(engine.facts, 'dp_rank')} {worker.process}"
        if ran_here is not None:
            worker.steps = len(ran_here.steps)
            worker.no_forward_steps = len(ran_here.idle)
            worker.modes = ran_here.modes
            worker.exec_ns = ran_here.nanoseconds
            worker.last_step = ran_here.last
            worker.batches = ran_here.batches
            worker.capturing_steps = ran_here.capturing
        graphs = [value for _, value in _facts(scan, Fact.GRAPHS) if integer(value, "tag") == worker.engine]
        worker.graphs = graphs[-1] if graphs else {}
        timing = [value for _, value in _facts(scan, Fact.DEVICE)]
        worker.device_off = text(timing[-1], "why") if timing and not flag(timing[-1], "on") else ""
        engine.workers.append(worker)
    for engine in found:
        engine.workers.sort(key=lambda worker: (worker.rank, worker.pid))
    return joined


def _owner(scan: SpoolScan, value: Mapping[str, Any], found: list[Engine]) -> Engine | None:
    """The engine of a worker that never ran a step: same process, else parent, else the only one."""
    parent = integer(scan.header, "ppid", -1)
    for pid in (scan.pid, parent):
        fitting = [engine for engine in found if engine.pid == pid]
        if len(fitting) == 1:
            return fitting[0]
    rank = integer(value, "dp_rank")
    fitting = [engine for engine in found if integer(engine.facts, "dp_rank") == rank]
    return fitting[0] if len(fitting) == 1 else None


def _worker(scan: SpoolScan, value: Mapping[str, Any], tag: int, known: list[Connector]) -> Worker:
    direct = {key: item for key, item in table(value, "direct_call").items() if isinstance(item, bool)}
    return Worker(
        engine=tag,
        pid=scan.pid,
        spool=scan.path.name,
        process="",
        ordinal=integer(value, "ordinal"),
        rank=integer(value, "rank"),
        kv_layers=tuple(dict.fromkeys(texts(value, "kv_layers"))),
        connector_live=flag(value, "connector_live"),
        connector=_find(known, scan, optional_integer(value, "connector"), "worker", tag),
        direct_call=direct,
        facts=value,
    )


def processes(scans: list[SpoolScan], run: Mapping[str, Any], found: list[Engine]) -> list[Process]:
    """The processes that wrote a spool, and vLLM's that did not."""
    listed = {
        integer(row, "pid", -1): row
        for row in (run.get("processes") if isinstance(run.get("processes"), list) else []) or []
        if isinstance(row, dict)
    }
    result = []
    for scan in scans:
        mine = [engine for engine in found if engine.pid == scan.pid]
        at_work = [worker for engine in found for worker in engine.workers if worker.pid == scan.pid]
        role, rank = text(scan.header, "role", "other"), None
        if mine and not (at_work and not any(engine.facts or engine.steps for engine in mine)):
            role = "scheduler"
            name = "engine core"
            if len(found) > 1 and integer(mine[0].facts, "dp") > 1:
                name = f"engine core {integer(mine[0].facts, 'dp_rank')}"
            if at_work:
                name += " and worker"
        elif at_work:
            role, rank, name = "worker", at_work[0].rank, at_work[0].process
        elif role == "front":
            name = "front"
            row = listed.get(scan.pid, {})
            argv = " ".join(texts(scan.header, "argv")) + " " + text(row, "command")
            if " serve" in argv or "api_server" in argv or "APIServer" in text(row, "name"):
                name = "API server"
        else:
            name = {"scheduler": "engine core", "worker": "worker"}.get(role, "process")
        result.append(
            Process(
                pid=scan.pid,
                ppid=integer(scan.header, "ppid", -1),
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
        if pid in traced or row.get("vllm") is not True:
            continue
        name = text(row, "name") or "process"
        result.append(Process(pid, integer(row, "ppid", -1), name, _role_of(name), None, None, 0, "", True))
    order = {"front": 0, "scheduler": 1, "worker": 2, "other": 3}
    result.sort(key=lambda p: (order[p.role], p.rank if p.rank is not None else -1, p.pid, p.spool or ""))
    return result


def _role_of(name: str) -> str:
    if "Worker" in name:
        return "worker"
    if "EngineCor" in name:  # the kernel keeps 15 characters of a name
        return "scheduler"
    return "front" if "APIServer" in name else "other"


def targets(scans: list[SpoolScan]) -> list[Target]:
    """Each target over all processes, with the worst status that any of them reports."""
    latest: dict[str, dict[str, dict[str, Any]]] = {}
    for scan in scans:
        for _, value in _facts(scan, Fact.TARGET):
            ident = text(value, "id")
            if ident:
                latest.setdefault(ident, {})[scan.path.name] = value
    found = []
    for ident, per_process in latest.items():
        rows = list(per_process.values())
        status = next((s for s in _WORST if any(text(row, "status") == s for row in rows)), "pending")
        with_it = [row for row in rows if text(row, "status", "pending") == status] or rows
        found.append(
            Target(
                id=ident,
                module=text(with_it[0], "module"),
                attr=text(with_it[0], "attr"),
                status=status,
                processes=len(with_it),
                detail=text(with_it[0], "detail"),
            )
        )
    return sorted(found, key=lambda target: target.id)


def start_failures(scans: list[SpoolScan]) -> list[str]:
    """Why workers never came up, as the first stage that raised says it."""
    found = []
    for scan in scans:
        for _, value in _facts(scan, Fact.START_FAILED)[:1]:
            said = f"{text(value, 'type')}: {text(value, 'message')}".rstrip(": ")
            found.append(f"{text(value, 'stage')} of a worker raised {said}")
    return sorted(set(found))


def exceptions(scans: list[SpoolScan]) -> list[HookException]:
    """The exceptions that hooks raised; one row per process, hook, layer, type and place."""
    latest: dict[tuple[object, ...], HookException] = {}
    for scan in scans:
        for _, value in _facts(scan, Fact.EXCEPTION):
            step = integer(value, "step")
            row = HookException(
                pid=scan.pid,
                engine=step >> 32,
                hook=text(value, "hook"),
                layer=text(value, "layer"),
                step=step,
                type=text(value, "type"),
                message=text(value, "message"),
                where=text(value, "where"),
                count=integer(value, "count_so_far", 1),
            )
            key = (row.pid, row.hook, row.layer, row.type, row.where)
            first = latest.get(key)
            latest[key] = row if first is None else HookException(**{**first.__dict__, "count": row.count})
    return sorted(latest.values(), key=lambda row: (row.pid, row.step, row.hook, row.layer))


def swallowed(scans: list[SpoolScan]) -> list[Swallowed]:
    """Exceptions that connectors handled themselves: one row per process, hook, type and place."""
    found: dict[tuple[object, ...], Swallowed] = {}
    for scan in scans:
        for _, value in _facts(scan, Fact.SWALLOWED):
            row = Swallowed(
                pid=scan.pid,
                spool=scan.path.name,
                hook=text(value, "hook"),
                layer=text(value, "layer"),
                step=integer(value, "step"),
                type=text(value, "type"),
                message=text(value, "message"),
                where=text(value, "where"),
                count=max(1, integer(value, "count", 1)),
                observed_calls=max(0, integer(value, "observed_calls")),
                logged=flag(value, "logged"),
            )
            key = (row.spool, row.hook, row.type, row.where, integer(value, "connector"), row.step >> 32)
            first = found.get(key, row)
            found[key] = replace(
                first,
                count=max(first.count, row.count),
                observed_calls=max(first.observed_calls, row.observed_calls),
                logged=first.logged or row.logged,
                places=(*first.places, (row.step, row.layer))[:_MAX_PLACES],
            )
    return sorted(found.values(), key=lambda row: (row.pid, row.step, row.hook, row.layer, row.type))


def logs(scans: list[SpoolScan]) -> list[LogLine]:
    """What connectors logged inside hooks: one row per process, hook and message."""
    latest: dict[tuple[object, ...], LogLine] = {}
    for scan in scans:
        for _, value in _facts(scan, Fact.LOG):
            row = LogLine(
                pid=scan.pid,
                spool=scan.path.name,
                hook=text(value, "hook"),
                layer=text(value, "layer"),
                step=integer(value, "step"),
                logger=text(value, "logger"),
                level=text(value, "level"),
                message=text(value, "message"),
                shown=flag(value, "shown"),
                count=max(1, integer(value, "count", 1)),
            )
            key = (row.spool, row.hook, row.logger, row.level, row.message)
            first = latest.get(key)
            latest[key] = row if first is None else replace(row, step=first.step, layer=first.layer)
    return sorted(latest.values(), key=lambda row: (row.pid, row.step, row.hook, row.message))


def config_keys(scans: list[SpoolScan]) -> list[ConfigKeys]:
    """Given and read keys of each connector; the latest fact knows most."""
    latest: dict[tuple[str, int], ConfigKeys] = {}
    for scan in scans:
        for _, value in _facts(scan, Fact.CONFIG_KEYS):
            ordinal = integer(value, "connector", -1)
            latest[(scan.path.name, ordinal)] = ConfigKeys(
                scan.pid, scan.path.name, ordinal, texts(value, "given"), texts(value, "read"),
                texts(value, "asked"),
            )  # fmt: skip
    return [latest[key] for key in sorted(latest)]


def agent_errors(scans: list[SpoolScan]) -> list[tuple[int, str, str]]:
    return [
        (scan.pid, text(value, "where"), text(value, "error"))
        for scan in scans
        for _, value in _facts(scan, Fact.AGENT_ERROR)
    ]


def clients(scans: list[SpoolScan]) -> dict[str, str]:
    """Engine's request id -> client's."""
    return {
        text(value, "engine"): text(value, "client")
        for scan in scans
        for _, value in _facts(scan, Fact.CLIENT_ID)
        if text(value, "engine")
    }
