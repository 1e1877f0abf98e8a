"""below-save-granularity: less than the connector's unit is rounded away."""

from __future__ import annotations

import statistics
from collections import Counter
from itertools import accumulate

from kvtrace.causes.case import CaseRequest, after_empty
from kvtrace.causes.diagnosis import Finding
from kvtrace.causes.evidence.accounted import all_accounted
from kvtrace.causes.evidence.paths import short_path
from kvtrace.causes.evidence.unit import Unit
from kvtrace.causes.rule import LIMIT, SAVES, Case, Cause, Interval, LostSpan, Results, Stage, Turn
from kvtrace.ledger.run import Engine
from kvtrace.terms import Grade
from kvtrace.trace.format import STEP_MASK
from kvtrace.words import count, of_all, plural

CAUSE = Cause(
    id="below-save-granularity",
    stage=Stage.SCHEDULE,
    severity=LIMIT,
    ledger=SAVES,
    meaning=(
        "The tokens do not fill the connector's unit (a block, a chunk, max_num_batched_tokens). A prompt "
        "shorter than one unit is not stored at all; a longer one loses its partial last unit."
    ),
    seen_as=(
        "Tokens stored = floor(prompt / unit) x unit over all requests, with a unit that has a name, or of "
        "so many blocks."
    ),
    remedy=(
        "Change the connector's rounding, or make its unit smaller than the prompts. If the unit is a "
        "setting of the engine (--max-num-batched-tokens, --block-size), a smaller one concerns the whole "
        "engine."
    ),
)


_OF_WHOLE = "of {} of whole units the last unit is left out: one token is always kept back"
_WITH_THE_LAST = (
    "where a longer prompt may begin with these tokens, store floor(prompt / {0}) x {0}: (prompt - 1) leaves "
    "a full last unit out"
)
_SIZES = 5
"""Sizes that the evidence lists."""


def claim(case: Case, span: LostSpan, unclaimed: list[Interval]) -> list[Interval]:
    unit = case.units.get(span.engine)
    if unit is None:
        return []
    request = case.requests[span.request]
    engine = case.engines[span.engine]
    if span.phase == "decode":
        if not case.offers_decode(span.engine):
            return []
        aligned = request.computed // unit.value * unit.value
    else:
        aligned = unit.aligned(request.prompt)
        reached = engine.decode_entries and request.stored_end >= request.prompt
        if reached and request.taken != aligned:
            return []
    return [(max(start, aligned), end) for start, end in unclaimed if end > aligned]


def claim_unread(case: Case, span: LostSpan, unclaimed: list[Interval]) -> list[Interval]:
    """Of what the metadata seems to name and was seen not to be read: what does not fill a unit, where the
    unit follows from what was read."""
    request, unit = case.requests[span.request], case.units.get(span.engine)
    if unit is None or span.grade < Grade.READ or request.taken != unit.aligned(request.prompt):
        return []
    return claim(case, span, unclaimed)


CLAIMS = {Turn.UNREAD: claim_unread, Turn.POSITION: claim}


def rule(case: Case) -> Results:
    lost = {request.engine for request in case.affected(CAUSE)}
    for tag, unit in case.units.items():
        if tag in lost and unit:
            yield _finding(case, tag, unit)
            return
    known = [(tag, unit) for tag, unit in case.units.items() if unit]
    if known:
        tag, unit = known[0]
        stored = sum(bool(request.stored_end) for request in case.of_engine(tag))
        whole = all(unit.aligned(request.prompt) == request.prompt for request in case.of_engine(tag))
        if not stored or not (whole or all_accounted(case)):
            return  # why the rest of a prompt was lost may be hidden by what lost the prompt
        yield CAUSE.ruled_out(
            f"{plural(stored, 'prompt')} stored in whole units of {unit.values} tokens ({unit.where})"
        )


def _finding(case: Case, tag: int, unit: Unit) -> Finding:
    """One finding for the run, of its first engine that lost tokens so."""
    engine, every = case.engines[tag], case.of_engine(tag)
    lost = case.assigned[CAUSE.id].requests
    # A prompt that was reused or loaded as a whole needs no unit.
    prompts = [r for r in every if r.row in lost or r.stored_end or r.saved]
    short = [r for r in prompts if unit.aligned(r.prompt) == 0]
    partial = [r for r in prompts if r.row in lost and unit.aligned(r.prompt) > 0]
    whole = sum(r.prompt % unit.value == 0 for r in partial)
    low, middle, high = (f([r.prompt for r in prompts]) for f in (min, statistics.median, max))
    evidence = [
        f"{of_all(len(prompts), len(every), 'prompt')} with something to store: {count(low)} to "
        f"{count(high)} tokens, median {count(round(middle))}; shorter than one unit: {count(len(short))}; "
        f"with a partial last unit: {count(len(partial) - whole)}",
        *([_OF_WHOLE.format(plural(whole, "prompt"))] if whole else []),
        *_stores(prompts, unit),
        f"every store is {unit.rounding} tokens, cut to what its chunk held",
        *_empty_key(case, tag, short),
    ]
    name, values = engine.connector_name, unit.values
    remedy = [*([_WITH_THE_LAST.format(unit.value)] if whole else []), *_remedy(engine, unit)]
    if another := _another_reading(case, tag, unit, partial):
        left, look = another
        title = f"{name} stores whole units of {values} tokens only, or leaves out {left}: either fits."
        headline = f"less than {values} tokens, or {left}, is not stored"
        remedy.insert(0, look)
    elif 2 * sum(lost[r.row] for r in short if r.row in lost) > sum(lost.values()):
        shorter = sum(unit.aligned(r.prompt) == 0 for r in every)
        which = of_all(shorter, len(every), "prompt") + (" is" if shorter == 1 else " are")
        title = f"{name} stores whole units of {values} tokens only: {which} shorter."
        unit_of = f"unit of {values} tokens"
        if shorter == len(every):  # a least length would look the same
            title = f"{name} stores nothing of prompts of less than {values} tokens: {which} shorter."
            unit_of = f"unit, or least length, of {values} tokens"
        headline = f"{which} shorter than this connector's {unit_of}"
    else:
        title = f"{name} stores whole units of {values} tokens only: the rest of a prompt is not stored."
        headline = f"of each prompt only whole units of {values} tokens are stored"
    return case.finding(CAUSE, title, evidence=evidence, remedy=remedy, headline=headline)


def _another_reading(case: Case, tag: int, unit: Unit, partial: list[CaseRequest]) -> tuple[str, str] | None:
    """What may be left out instead, as that gives the same stores; and what to look at for it."""
    if _a_step_late(case, tag, unit):
        return (
            "what a prompt's last step computes",
            "see whether build_connector_meta offers what a prompt's last step computes: each store is in "
            "the metadata of a later step than the one that computes its tokens",
        )
    if unit.kind == "max_num_batched_tokens" and not unit.attributes and _end_with_chunks(case, partial):
        look = "see whether the connector passes over steps of few tokens (a last chunk)"
        return "what fills no prefill chunk", look
    return None


def _a_step_late(case: Case, tag: int, unit: Unit) -> bool:
    """Whether no step's own tokens are offered in it, though the first one of each such prompt fills a unit:
    then what the last step of a prompt computes is never stored, whatever the unit is."""
    stored = [r for r in case.of_engine(tag) if r.stored_end]
    return (
        bool(stored)
        and all(
            r.first_end >= unit.value and min(e.step for e in r.entries if e.slots > 0) > r.chunk_step
            for r in stored
            if r.chunks > 1
        )
        and not any(r.chunks == 1 or (r.chunks == 2 and r.stored_end > r.first_end) for r in stored)
    )


def _end_with_chunks(case: Case, partial: list[CaseRequest]) -> bool:
    """Whether of each of these prompts as much was kept as one of its first chunks ended with."""
    return all(
        (r.taken if r.taken is not None else r.stored_end)
        in accumulate(case.run.requests[r.row].chunk_tokens, initial=r.local + r.external)
        for r in partial
    )


def _empty_key(case: Case, tag: int, short: list[CaseRequest]) -> list[str]:
    """A symptom: prompts that are rounded to nothing share the key of the empty prefix, and all but the first
    count as stored."""
    missing = [r for r in short if after_empty(case, r)]
    if not missing:
        return []
    step, _, length = case.empty_before[tag]
    return [
        f"step {step & STEP_MASK} has a store of 0 slots, for a prompt of {plural(length, 'token')}; after "
        f"it {plural(len(missing), 'such prompt')} got no entry at all: rounded to nothing they share the "
        "key of the empty prefix"
    ]


def _stores(prompts: list[CaseRequest], unit: Unit) -> list[str]:
    """Sizes of what was seen to be kept, or else of the stores in the metadata; where the unit is from."""
    seen = any(r.saved for r in prompts) and all(r.taken is not None for r in prompts)
    sizes = Counter((r.taken or 0) if seen else sum(max(0, e.slots) for e in r.entries) for r in prompts)
    shown = [f"{count(size)} ({plural(n, 'request')})" for size, n in sorted(sizes.items())[:_SIZES]]
    more = [f"and {plural(len(sizes) - _SIZES, 'other size')}"] if len(sizes) > _SIZES else []
    what = "kept of a prompt" if seen else "offered of a prompt in the metadata"
    return [f"{what}: {', '.join([*shown, *more])}; {unit.value} = {unit.where}"]


def _remedy(engine: Engine, unit: Unit) -> list[str]:
    """What to change where it is not meant: a setting where its name says that it is the unit, and no number
    of what it would save: what else loses tokens would go on losing them."""
    file = engine.connector.file if engine.connector else ""
    rounding = f"change the rounding in {short_path(file)}" if file else "change the connector's rounding"
    asked = f"if units of {unit.values} tokens are not meant,"
    if unit.also:
        return [f"{asked} {rounding}"]
    if unit.kind == "block_size" and unit.value // 2 < (32 if engine.facts.platform == "cpu" else 16):
        return ["nothing to change: the unit is a block of the KV cache, which is at its smallest already"]
    if unit.kind == "block_size":
        lower = f"lower --block-size (for the whole engine: {_COSTS['--block-size']})"
        return [f"{asked} {lower}", *([] if unit.setting else [f"or {rounding}"])]
    if not unit.setting:
        return [f"{asked} {rounding}"]
    cost = _COSTS.get(unit.setting)
    if cost is None:
        return [f'{asked} lower "{unit.setting}" in kv_connector_extra_config', f"or {rounding}"]
    return [f"{asked} {rounding}", f"or lower {unit.setting} (for the whole engine: {cost})"]


_COSTS = {
    "--max-num-batched-tokens": "long prompts take more steps",
    "--block-size": "more blocks to manage",
}
"""Settings of the engine, and what a smaller value costs."""
