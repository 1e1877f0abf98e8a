"""false-already-stored: prompts left out because another prompt's empty key was taken for theirs."""

from __future__ import annotations

from kvtrace.causes.case import CaseRequest, after_empty, kept_before
from kvtrace.causes.diagnosis import Finding
from kvtrace.causes.evidence.accounted import all_written
from kvtrace.causes.rule import FAULT, SAVES, Case, Cause, Interval, LostSpan, Results, Stage, Turn
from kvtrace.ledger.run import Engine
from kvtrace.trace.format import STEP_MASK
from kvtrace.words import count, of_all, plural

CAUSE = Cause(
    id="false-already-stored",
    stage=Stage.SCHEDULE,
    severity=FAULT,
    ledger=SAVES,
    meaning=(
        "The connector treats prompts as stored that never were: different prompts share one key (all "
        "short prompts hash the same empty prefix)."
    ),
    seen_as=(
        "A prompt left out of the metadata after another, different one was rounded down to nothing, though "
        "a store of it would not be."
    ),
    remedy=(
        "Do not look up or store a prompt whose rounded length is 0, and use one rounding for both. Make "
        "the unit smaller as well: under a unique key, such a prompt would still store no tokens."
    ),
)


def taken_for_stored(case: Case, request: CaseRequest) -> bool:
    """In no metadata at all, rounded to nothing by its lookup, after a different prompt had been offered with
    0 slots: both have the key of the empty prefix. Lookups round further down than stores in some connectors:
    one token more than a unit counts. What the store rounds to nothing too is below the unit: of that this is
    a symptom, and no cause."""
    unit = case.units.get(request.engine)
    if request.grown_step or (unit and not unit.aligned(request.prompt)):
        return False
    size = unit.value if unit else case.engines[request.engine].block_size
    kept = max(1, unit.kept_back if unit else 1)
    return after_empty(case, request) and 0 < request.prompt <= size + kept and not kept_before(case, request)


def claim(case: Case, span: LostSpan, unclaimed: list[Interval]) -> list[Interval]:
    if span.phase == "decode":
        return []
    return unclaimed if taken_for_stored(case, case.requests[span.request]) else []


CLAIMS = {Turn.POSITION: claim}


def rule(case: Case) -> Results:
    victims = case.affected(CAUSE)
    if victims:
        yield _finding(case, victims)
    elif all_written(case) and not any(_empty_key(case, request) for request in case.requests):
        yield CAUSE.ruled_out(
            f"nothing of {plural(len(case.requests), 'prompt')} that fills a unit was left out"
        )


def _empty_key(case: Case, request: CaseRequest) -> bool:
    """Whether it may have been taken for a prompt that was rounded to nothing before it, as it was below the
    unit itself."""
    return not request.saved and after_empty(case, request)


def _finding(case: Case, victims: list[CaseRequest]) -> Finding:
    engine = case.engines[victims[0].engine]
    unit = case.units.get(engine.tag)
    size, kept = (unit.value, unit.kept_back) if unit else (engine.block_size, 1)
    affected = of_all(len(victims), len(case.of_engine(engine.tag)), "prompt")
    longest = max(r.prompt for r in victims)
    evidence = _keys(case, engine, victims)
    evidence.append(f"the longest of these has {plural(longest, 'token')} (unit {size})")
    stored = sum(max(0, r.prompt - kept) // size * size for r in victims)
    if stored:
        evidence.append(
            f"a store would round {count(longest)} tokens to {max(0, longest - kept) // size * size}; a "
            f"lookup that rounds further down, as floor((n - {kept + 1}) / {size}) x {size}, gets 0"
        )
    remedy = f"round the lookup as the store does: {count(stored)} tokens would have been stored"
    return case.finding(
        CAUSE,
        f"{engine.connector_name} treats {affected} as stored that never were: rounded down to 0 tokens by "
        "the lookup, they share the key of the empty prefix.",
        evidence=evidence,
        remedy=[*([remedy] if stored else []), CAUSE.remedy],
        headline=f"{affected} taken for stored, under the key of the empty prefix",
    )


def _keys(case: Case, engine: Engine, victims: list[CaseRequest]) -> list[str]:
    """Whose empty store came first, and that the prompts left out after it are not the same one."""
    step, _, length = case.empty_before[engine.tag]
    return [
        f"step {step & STEP_MASK}: a prompt of {count(length)} tokens, with a store of 0 slots; after it "
        f"{plural(len(victims), 'prompt')} got no entry, none of them that one: they share the key, not the "
        "tokens"
    ]
