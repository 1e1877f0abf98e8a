"""role-does-not-save: kv_consumer, and no store in any metadata."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes.case import Case, Piece
from kvtrace.causes.model import Finding, RuledOut
from kvtrace.ledger.intervals import Interval
from kvtrace.ledger.model import Engine
from kvtrace.words import count, listed

ID = "role-does-not-save"


def only_reads(engine: Engine) -> bool:
    return engine.role == "kv_consumer" and engine.store_entries == 0 and engine.unknown_steps == 0


def claim(case: Case, piece: Piece, left: list[Interval]) -> list[Interval]:
    return left if only_reads(case.engines[piece.engine]) else []


def rule(case: Case) -> Iterator[Finding | RuledOut]:
    reading = [engine for engine in case.run.engines if only_reads(engine) and engine.requests]
    if reading and case.tokens(ID) > 0:
        steps = sum(engine.steps for engine in reading)
        yield case.finding(
            ID,
            "kv_role is kv_consumer, and under this role the connector stores nothing.",
            evidence=[
                f"kv_role is kv_consumer; 0 store entries in the metadata of {count(steps)} steps, "
                f"for {count(sum(e.requests for e in reading))} requests"
            ],
            events=case.events(ID),
            headline="this engine runs as kv_consumer, and its connector stores nothing under that role",
        )
        return
    configured = [engine for engine in case.run.engines if engine.configured]
    roles = [str(engine.role) for engine in configured]
    if any(engine.store_entries for engine in configured):
        yield RuledOut(ID, f"kv_role is {listed(roles)}, and store entries were made")
    elif configured and "kv_consumer" not in roles:
        yield RuledOut(ID, f"kv_role is {listed(roles)}")
