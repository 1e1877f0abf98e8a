"""role-does-not-save: kv_consumer, and no store in any metadata."""

from __future__ import annotations

from kvtrace.causes.rule import LIMIT, SAVES, Case, Cause, Interval, Piece, Results, Stage, Turn
from kvtrace.ledger.model import Engine
from kvtrace.words import count, listed

CAUSE = Cause(
    id="role-does-not-save",
    stage=Stage.WIRING,
    severity=LIMIT,
    ledger=SAVES,
    meaning="Under this role the connector only reads: kv_consumer, or a rank that it leaves out.",
    seen_as="kv_role, and no store entry in any metadata of the run.",
    remedy='If this engine should save, set "kv_role" to "kv_both" or "kv_producer".',
    about_calls=False,
)


def only_reads(engine: Engine) -> bool:
    return engine.role == "kv_consumer" and engine.store_entries == 0 and engine.unknown_steps == 0


def claim(case: Case, piece: Piece, left: list[Interval]) -> list[Interval]:
    return left if only_reads(case.engines[piece.engine]) else []


CLAIMS = {Turn.ENGINE: claim}


def rule(case: Case) -> Results:
    reading = [engine for engine in case.run.engines if only_reads(engine) and engine.requests]
    if reading and case.tokens(CAUSE) > 0:
        steps = sum(engine.steps for engine in reading)
        yield case.finding(
            CAUSE,
            "kv_role is kv_consumer, and under this role the connector stores nothing.",
            evidence=[
                f"kv_role is kv_consumer; 0 store entries in the metadata of {count(steps)} steps, for "
                f"{count(sum(e.requests for e in reading))} requests"
            ],
            events=case.events(CAUSE),
            headline="this engine runs as kv_consumer, and its connector stores nothing under that role",
        )
        return
    configured = [engine for engine in case.run.engines if engine.configured]
    roles = [str(engine.role) for engine in configured]
    if any(engine.store_entries for engine in configured):
        yield CAUSE.ruled_out(f"kv_role is {listed(roles)}, and the metadata holds store entries")
    elif configured and "kv_consumer" not in roles:
        yield CAUSE.ruled_out(f"kv_role is {listed(roles)}")
