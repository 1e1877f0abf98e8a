"""connector-failed-to-start: the connector's factory, constructor or registration raised."""

from __future__ import annotations

from kvtrace import mend
from kvtrace.causes.evidence.logs import shortened
from kvtrace.causes.rule import FAULT, SAVES, Case, Cause, Interval, LostSpan, Results, Stage, Turn
from kvtrace.ledger.reported import START_HOOKS
from kvtrace.ledger.run import Connector, Engine
from kvtrace.words import count, listed

CAUSE = Cause(
    id="connector-failed-to-start",
    stage=Stage.WIRING,
    severity=FAULT,
    ledger=SAVES,
    weighs=True,
    meaning=(
        "Creating the connector raised, or it refused the KV caches. vLLM itself may only report that the "
        "engine core did not start (Engine core initialization failed)."
    ),
    seen_as="An exception at the connector's factory, its constructor or register_kv_caches.",
    remedy=(
        "Fix what the exception names: a missing package, a constructor without kv_cache_config (three "
        "arguments from vLLM 0.21 on), an allocator or model that the connector does not support."
    ),
)


def failures(case: Case, engine: Engine) -> list[Connector]:
    """Failed creations in the engine's processes."""
    pids = {engine.pid, *(worker.pid for worker in engine.workers)}
    return [c for c in case.run.connectors if not c.ok and c.pid in pids]


def claim(case: Case, span: LostSpan, unclaimed: list[Interval]) -> list[Interval]:
    engine = case.engines[span.engine]
    failed = failures(case, engine)
    if not failed:
        return []
    dead = engine.connector is None and any(c.role == "scheduler" for c in failed)
    return unclaimed if dead or (not span.live and any(c.role == "worker" for c in failed)) else []


CLAIMS = {Turn.ENGINE: claim}


def rule(case: Case) -> Results:
    failed = [c for c in case.run.connectors if not c.ok]
    refused = [e for e in case.run.exceptions if e.hook in START_HOOKS]
    if failed or refused:
        where = {process.pid: process.name for process in case.run.processes}
        evidence = [
            f"{c.configured or c.cls or 'the connector'} in the {where.get(c.pid, c.role)}: "
            f"{c.error_type or 'error'}: {c.error or 'no message'}{f' (at {c.where})' if c.where else ''}"
            for c in failed[:3]
        ]
        evidence += [
            f"{e.hook} in the {where.get(e.pid, 'worker')}: {e.type}: {e.message} (at {e.where})"
            for e in refused[:3]
        ]
        name = next((c.configured or c.cls for c in failed if c.configured or c.cls), "The connector")
        kind = failed[0].error_type if failed else refused[0].type
        message = shortened(mend.in_short((failed[0].error if failed else refused[0].message) or ""))
        message = message.rstrip(" .…")
        kind = f"{kind}: {message}" if message else kind
        places = len({*(c.pid for c in failed), *(e.pid for e in refused)})
        yield case.finding(
            CAUSE,
            f"{name} did not start in {places} process{'es' if places > 1 else ''}: {kind}.",
            evidence=evidence,
            remedy=list(filter(None, [next(filter(None, map(mend.remedy, evidence)), ""), CAUSE.remedy])),
            headline=f"{name} did not start: {kind}",
        )
        return
    created = [c for c in case.run.connectors if c.parent is None]
    if created:
        yield CAUSE.ruled_out(
            f"{listed(c.cls for c in created)} was created {count(len(created))} times without an error"
        )
