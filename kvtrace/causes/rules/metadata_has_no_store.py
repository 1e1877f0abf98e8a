"""metadata-has-no-store: what the scheduler side left out, and nothing explains."""

from __future__ import annotations

from kvtrace.causes.rule import FAULT, SAVES, Case, Cause, Interval, Piece, Results, Stage, Turn
from kvtrace.ledger.model import Engine
from kvtrace.words import count, listed, of_all, plural

CAUSE = Cause(
    id="metadata-has-no-store",
    stage=Stage.SCHEDULE,
    severity=FAULT,
    ledger=SAVES,
    meaning=(
        "The connector's scheduler side did not put these tokens into any step's metadata, and nothing "
        "that kvtrace knows explains it."
    ),
    seen_as="Metadata that is readable, and names no slots of these positions.",
    remedy=(
        "Look at build_connector_meta of this connector: what must be true of a request before it gets a "
        "store entry?"
    ),
)


def claim(case: Case, piece: Piece, left: list[Interval]) -> list[Interval]:
    return left


CLAIMS = {Turn.REST: claim}


def rule(case: Case) -> Results:
    rows = case.affected(CAUSE)
    if not rows:
        return
    engine = case.engines[rows[0].engine]
    name = engine.connector.cls if engine.connector else "The connector"
    of_engine = case.of_engine(engine.tag)
    without = [r for r in rows if not r.entries]
    stored = [r for r in of_engine if r.stored_end]
    affected = of_all(len(rows), len(of_engine), "prompt")
    lengths = sorted(r.prompt for r in rows)
    evidence = [
        f"{count(len(without))} of these have no entry in any step, {count(len(rows) - len(without))} one "
        f"that leaves tokens out; {plural(len(stored), 'other prompt' if without else 'prompt')} got a "
        "store",
        f"their prompts have {count(lengths[0])} to {count(lengths[-1])} tokens; no unit with a name "
        "(block, max_num_batched_tokens, a number of the connector) gives these stores"
        if case.units.get(engine.tag) is None
        else f"their prompts have {count(lengths[0])} to {count(lengths[-1])} tokens, which the unit allows",
        "no lookup hit, no earlier store of the same tokens and no chunk limit explains them",
    ]
    off = _switched_off(engine) if not stored else []
    if off:
        evidence.append(f"switched off in kv_connector_extra_config: {listed(off)}; this may be the reason")
    yield case.finding(
        CAUSE,
        f"{name} put {affected} (or a part of them) into no step's metadata, and kvtrace does not know why.",
        evidence=evidence,
        events=case.events(CAUSE),
        headline=f"the connector put {affected} (or a part of them) into no step's metadata",
    )


def _switched_off(engine: Engine) -> list[str]:
    """Options of the connector that are off."""
    off = ("false", "off", "none", "never", "disabled")
    return [
        f"{key} = {str(value).lower()}" for key, value in engine.extra.items() if str(value).lower() in off
    ]
