"""metadata-has-no-store: what the scheduler side did not offer, by a rule that kvtrace does not know."""

from __future__ import annotations

from kvtrace.causes.case import Request, stored_before
from kvtrace.causes.rule import LIMIT, SAVES, Case, Cause, Interval, LostSpan, Results, Stage, Turn
from kvtrace.ledger.model import Engine
from kvtrace.words import count, listed, of_all, plural

CAUSE = Cause(
    id="metadata-has-no-store",
    stage=Stage.SCHEDULE,
    severity=LIMIT,
    ledger=SAVES,
    meaning=(
        "The connector's scheduler side did not put these tokens into any step's metadata, by a rule that "
        "kvtrace does not know: admission, a quota, a minimum, a state of its own. It may be meant."
    ),
    seen_as=(
        "No metadata names slots of these positions; and they were seen not to be read, or the metadata of "
        "all steps of their requests is readable, and neither a save in the background nor a lookup that "
        "finds them speaks of a store that was not seen. Otherwise they are not observed."
    ),
    remedy=(
        "Look at build_connector_meta of this connector: what must be true of a request before it gets a "
        "store entry?"
    ),
)


def claim(case: Case, span: LostSpan, unclaimed: list[Interval]) -> list[Interval]:
    return unclaimed


CLAIMS = {Turn.LAST: claim}


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
    lengths = sorted({r.prompt for r in rows})
    spread = " to ".join(count(n) for n in (lengths[0], lengths[-1])[: len(lengths)])
    evidence = [
        f"{count(len(without))} of these have no entry in any step, {count(len(rows) - len(without))} one "
        f"that leaves tokens out; {plural(len(stored), 'other prompt' if without else 'prompt')} got a "
        "store",
        f"their prompts have {spread} tokens; no unit with a name "
        "(block, max_num_batched_tokens, a number of the connector) gives these stores"
        if case.units.get(engine.tag) is None
        else f"their prompts have {spread} tokens, which the unit allows",
        *_not_explained(case, rows),
        *_chunked(without, stored),
    ]
    off = _switched_off(engine) if not stored else []
    if off:
        evidence.append(f"switched off in kv_connector_extra_config: {listed(off)}; this may be the reason")
    yield case.finding(
        CAUSE,
        f"{name} offered no store for {affected}, or for a part of them, and no rule that kvtrace knows "
        "fits. Is that meant?",
        evidence=evidence,
        events=case.events(CAUSE),
        headline=f"the connector offered no store for {affected}, or for a part of them",
    )


def _not_explained(case: Case, rows: list[Request]) -> list[str]:
    """What of these requests could have explained it, and does not."""
    hits = [r for r in rows if r.offered > 0]
    asked = [r for r in rows if r.offered >= 0]
    before = [r for r in rows if stored_before(case, r)]
    found = []
    if hits:
        found.append(f"{of_all(len(hits), len(rows), 'lookup')} found some: these tokens lie beyond it")
    elif asked:
        found.append(f"no lookup of these found anything ({of_all(len(asked), len(rows), 'request')} asked)")
    if before:
        part = of_all(len(before), len(rows), "prompt")
        found.append(f"an earlier store holds the beginning of {part}: these tokens lie beyond it")
    else:
        found.append("no store of the same tokens is earlier in this run")
    return ["; ".join(found)]


def _chunked(without: list[Request], stored: list[Request]) -> list[str]:
    """That these alone were computed in several chunks, if they were: a connector that decides in a request's
    first step, and looks at whole prompts alone, never comes to them."""
    if not (without and stored) or any(r.chunks < 2 for r in without) or any(r.chunks > 1 for r in stored):
        return []
    were = "was" if len(without) == 1 else "were"
    return [
        f"{plural(len(without), 'prompt')} without an entry {were} computed in several chunks, and no prompt "
        "that got a store was"
    ]


def _switched_off(engine: Engine) -> list[str]:
    """Options of the connector that are off."""
    off = ("false", "off", "none", "never", "disabled")
    return [
        f"{key} = {str(value).lower()}" for key, value in engine.extra.items() if str(value).lower() in off
    ]
