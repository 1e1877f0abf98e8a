"""role-does-not-save: kv_consumer, or no hook that saves, and nothing saved."""

from __future__ import annotations

from kvtrace.causes.diagnosis import Finding
from kvtrace.causes.rule import LIMIT, SAVES, Case, Cause, Interval, LostSpan, Results, Stage, Turn
from kvtrace.ledger.run import Engine
from kvtrace.trace.format import STEP_SHIFT
from kvtrace.words import count, listed, plural

CAUSE = Cause(
    id="role-does-not-save",
    stage=Stage.WIRING,
    severity=LIMIT,
    ledger=SAVES,
    meaning=(
        "As kv_consumer, or on a rank that it leaves out, the connector stored nothing in this run. Or it is "
        "made to load alone."
    ),
    seen_as=(
        "kv_role kv_consumer, and no store entry in any metadata of the run, or none whose slots were read "
        "(a consumer promises none). Or no store entry of a connector that loads: its save_kv_layer and "
        "wait_for_save are empty, and it has no get_finished."
    ),
    remedy='If this engine should save, set "kv_role" to "kv_both" or "kv_producer".',
    about_calls=False,
)


def only_reads(case: Case, engine: Engine) -> bool:
    if engine.role == "kv_consumer" and not (engine.store_entries and _reads(case, engine)):
        return True  # what its metadata names for storing, its workers may leave
    if engine.store_entries:
        return False
    if _without_kv(engine):
        return True
    return not engine.unknown_steps and engine.tag in case.once("loads alone", lambda: _loads_alone(case))


def _reads(case: Case, engine: Engine) -> bool:
    """Whether anything is known, or said, to be saved of it, or was read for a save."""
    told = case.seen_saves | case.declared_saves
    return engine.tag in told or any(step >> STEP_SHIFT == engine.tag for step in case.read_steps)


def _without_kv(engine: Engine) -> bool:
    """Whether none of its workers' connectors ever gets hold of the KV caches."""
    makers = [worker.connector for worker in engine.workers]
    return bool(makers) and all(one is not None and one.without_kv for one in makers)


def _loads_alone(case: Case) -> frozenset[int]:
    """Tags of engines whose connector loads, or stands beside others inside one, and has no hook on its
    workers that could save."""
    loaded = {row.engine for row in case.run.load_rows if row.accepted}
    return frozenset(
        engine.tag
        for engine in case.run.engines
        if (engine.tag in loaded or (engine.connector is not None and engine.connector.parent is not None))
        and engine.workers
        and all(one.connector is not None and one.connector.saves_nowhere for one in engine.workers)
    )


def claim(case: Case, span: LostSpan, unclaimed: list[Interval]) -> list[Interval]:
    return unclaimed if only_reads(case, case.engines[span.engine]) else []


CLAIMS = {Turn.ENGINE: claim}


def rule(case: Case) -> Results:
    reading = [engine for engine in case.run.engines if only_reads(case, engine) and engine.requests]
    if reading and case.affected(CAUSE):
        steps = sum(engine.steps - engine.unknown_steps for engine in reading)
        if any(engine.role != "kv_consumer" for engine in reading):
            yield _made_to_load(case, reading, steps)
            return
        entries = sum(engine.store_entries for engine in reading)
        asked = plural(sum(engine.requests for engine in reading), "request")
        which = "this engine" if len(reading) == len(case.run.engines) else "one of the engines"
        yield case.finding(
            CAUSE,
            "kv_role is kv_consumer, and no save was seen.",
            evidence=[
                f"kv_role is kv_consumer; the metadata of {count(steps)} steps names "
                f"{plural(entries, 'store')}, for {asked}"
            ],
            headline=f"{which} runs as kv_consumer, and no save of its connector was seen",
        )
        return
    configured = [engine for engine in case.run.engines if engine.configured]
    roles = [str(engine.role) for engine in configured]
    if configured and all(engine.store_entries for engine in configured):
        yield CAUSE.ruled_out(f"kv_role is {listed(roles)}, and stores were seen")
    elif configured and "kv_consumer" not in roles:
        yield CAUSE.ruled_out(f"kv_role is {listed(roles)}")


def _made_to_load(case: Case, reading: list[Engine], steps: int) -> Finding:
    names = listed(engine.connector.cls for engine in reading if engine.connector)
    never = all(map(_without_kv, reading))
    what = "never gets hold of the KV caches" if never else "loads, and has nothing that saves"
    return case.finding(
        CAUSE,
        f"{names} {what}.",
        evidence=[
            "it has no register_kv_caches, and its hooks that load and save are empty"
            if never
            else "its save_kv_layer and wait_for_save are empty, and it has no get_finished",
            f"the metadata of {count(steps)} steps names no store",
        ],
        headline=f"{names} {what}" if never else f"{names} is made to load alone",
        remedy=["If this engine should save, give it a connector that does (MultiConnector holds both)."],
    )
