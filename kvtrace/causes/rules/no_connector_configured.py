"""no-connector-configured: the engine has no kv_transfer_config."""

from __future__ import annotations

from kvtrace.causes.rule import FAULT, SAVES, Case, Cause, Interval, LostSpan, Results, Stage, Turn
from kvtrace.ledger.run import Engine
from kvtrace.words import listed, plural

CAUSE = Cause(
    id="no-connector-configured",
    stage=Stage.WIRING,
    severity=FAULT,
    ledger=SAVES,
    meaning="The engine has no kv_transfer_config: nothing can be saved or loaded.",
    seen_as="The engine's configuration when its scheduler was created.",
    remedy=(
        'Give the engine a connector: --kv-transfer-config \'{"kv_connector": "...", "kv_role": "kv_both"}\'.'
    ),
)


def missing(engine: Engine) -> bool:
    return engine.facts.known and engine.configured is None


def claim(case: Case, span: LostSpan, unclaimed: list[Interval]) -> list[Interval]:
    return unclaimed if missing(case.engines[span.engine]) else []


CLAIMS = {Turn.ENGINE: claim}


def rule(case: Case) -> Results:
    without = [engine for engine in case.run.engines if missing(engine)]
    configured = [engine for engine in case.run.engines if engine.configured]
    if without:
        many = len(case.run.engines) > 1
        which = f"{len(without)} of {len(case.run.engines)} engines have" if many else "This engine has"
        yield case.finding(
            CAUSE,
            f"{which} no KV connector: kv_transfer_config is not set, so nothing can be saved or loaded.",
            evidence=[
                f"kv_transfer_config is None in the {listed(e.process for e in without)}, seen when its "
                f"scheduler was created; {plural(sum(e.requests for e in without), 'request')}, no lookup"
            ],
            headline="this engine has no KV connector",
        )
    elif configured:
        names = [f"{e.configured.connector}, {e.configured.role}" for e in configured if e.configured]
        yield CAUSE.ruled_out(f"kv_transfer_config names {listed(names)}")
