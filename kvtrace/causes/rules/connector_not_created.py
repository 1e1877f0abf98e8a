"""connector-not-created: configured, and not live in the scheduler or in a worker."""

from __future__ import annotations

from kvtrace.causes.evidence.paths import short_path
from kvtrace.causes.rule import FAULT, SAVES, Case, Cause, Interval, LostSpan, Results, SaveEnd, Stage, Turn
from kvtrace.ledger.run import Engine
from kvtrace.words import listed

CAUSE = Cause(
    id="connector-not-created",
    stage=Stage.WIRING,
    severity=FAULT,
    ledger=SAVES,
    meaning="A connector is configured, but it was not created in the scheduler or in one of the workers.",
    seen_as="The connectors that are live in each process, against the configuration.",
    remedy=(
        "Look at the worker class and the start-up log of the process named here: an out-of-tree worker "
        "must call ensure_kv_transfer_initialized() before its KV cache is created."
    ),
    save_ends=(SaveEnd.NO_CONNECTOR,),
)


def scheduler_without(engine: Engine) -> bool:
    return bool(engine.configured) and engine.facts.connector_created is False


def claim(case: Case, span: LostSpan, unclaimed: list[Interval]) -> list[Interval]:
    engine = case.engines[span.engine]
    if not engine.configured:
        return []
    return unclaimed if scheduler_without(engine) or not span.live else []


CLAIMS = {Turn.ENGINE: claim}


def rule(case: Case) -> Results:
    engines = [engine for engine in case.run.engines if engine.configured]
    if not engines:
        return
    bare = [engine.process or "engine core" for engine in engines if scheduler_without(engine)]
    workers = [worker for engine in engines for worker in engine.workers]
    dead = [worker for worker in workers if worker.connector_live is False]
    live = [worker for worker in workers if worker.connector_live]
    if bare or dead:
        names = [*(f"the scheduler ({name})" for name in bare), *(w.process for w in dead)]
        classes = [w.facts.worker_class for w in dead if w.facts.worker_class]
        configured = listed(str(e.configured.connector) for e in engines if e.configured)
        evidence = [
            f"created in {len(engines) - len(bare)}/{len(engines)} schedulers and live in "
            f"{len(live)}/{len(workers)} workers; not in: {listed(names)}"
        ]
        if classes:
            evidence.append(f"worker class there: {listed(classes)}")
        yield case.finding(
            CAUSE,
            f"{configured} is configured, but was not created in {listed(names)}.",
            evidence=evidence,
            headline=f"the connector was not created in {listed(names)}",
        )
        return
    if not workers or len(live) < len(workers):
        yield CAUSE.not_observed(f"{len(live)} of {len(workers)} workers say that a connector is live")
        return
    files = [engine.connector.file for engine in engines if engine.connector and engine.connector.file]
    made = "the scheduler" if len(engines) == 1 else f"{len(engines)} schedulers"
    source = f", from {listed(short_path(file) for file in files)}" if files else ""
    yield CAUSE.ruled_out(f"created in {made} and in {len(live)}/{len(workers)} workers{source}")
