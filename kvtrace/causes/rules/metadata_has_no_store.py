"""metadata-has-no-store: what the scheduler side left out, and nothing explains."""

from __future__ import annotations

from collections.abc import Iterator

from kvtrace.causes.case import Case, Piece
from kvtrace.causes.model import Finding
from kvtrace.ledger.intervals import Interval
from kvtrace.ledger.model import Engine
from kvtrace.words import count, listed, of_all, plural

ID = "metadata-has-no-store"


def claim(case: Case, piece: Piece, left: list[Interval]) -> list[Interval]:
    return left


def rule(case: Case) -> Iterator[Finding]:
    booked = case.booked.get(ID)
    if booked is None:
        return
    rows = [case.requests[row] for row in booked.requests]
    engine = case.engines[rows[0].engine]
    name = engine.connector.cls if engine.connector else "The connector"
    of_engine = case.of_engine(engine.tag)
    without = [r for r in rows if not r.entries]
    stored = [r for r in of_engine if r.stored_end]
    affected = of_all(len(rows), len(of_engine), "prompt")
    lengths = sorted(r.prompt for r in rows)
    evidence = [
        f"{count(len(without))} of these have no entry in any step, {count(len(rows) - len(without))} one "
        f"that leaves tokens out; {plural(len(stored), 'other prompt' if without else 'prompt')} got a store",
        f"their prompts have {count(lengths[0])} to {count(lengths[-1])} tokens; no unit with a name "
        "(block, max_num_batched_tokens, a number of the connector) gives these stores"
        if case.units.get(engine.tag) is None
        else f"their prompts have {count(lengths[0])} to {count(lengths[-1])} tokens, which the unit allows",
        "no lookup hit, no earlier store of the same tokens and no chunk limit explains them",
    ]
    off = _switched_off(engine) if not stored else []
    if off:
        evidence.append(f"given as off in kv_connector_extra_config: {listed(off)}; one may be the reason")
    yield case.finding(
        ID,
        f"{name} put {affected} (or a part of them) into no step's metadata, for a reason of its own.",
        evidence=evidence,
        events=case.events(ID),
        headline=f"the connector gave {affected} no store (or for a part only), for a reason of its own",
    )


def _switched_off(engine: Engine) -> list[str]:
    """Options of the connector's own that say no."""
    off = ("false", "off", "none", "never", "disabled")
    return [
        f"{key} = {str(value).lower()}" for key, value in engine.extra.items() if str(value).lower() in off
    ]
