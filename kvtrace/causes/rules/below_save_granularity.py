"""below-save-granularity: less than the connector's unit is rounded away."""

from __future__ import annotations

import statistics
from collections import Counter

from kvtrace.causes.case import Case, Piece, Request
from kvtrace.causes.cause import SAVES, Cause
from kvtrace.causes.claims import Claim, Turn
from kvtrace.causes.evidence.unit import Unit
from kvtrace.causes.model import Event, Finding, Results
from kvtrace.ledger.intervals import Interval
from kvtrace.ledger.model import Engine
from kvtrace.terms import FAULT, LIMIT, Stage
from kvtrace.words import count, listed, of_all, percent, plural

CAUSE = Cause(
    id="below-save-granularity",
    stage=Stage.SCHEDULE,
    severity=FAULT,
    ledger=SAVES,
    meaning=(
        "The tokens do not fill the connector's unit (a block, a chunk, max_num_batched_tokens): they are "
        "rounded down to nothing (a fault where whole prompts go), or a prompt's tail is cut off (a limit)."
    ),
    seen_as="Tokens stored = floor(prompt / unit) x unit over all requests, with a unit that has a name.",
    remedy="Make the unit smaller than the prompts, or change the connector's rounding.",
)


def claim(case: Case, piece: Piece, left: list[Interval]) -> list[Interval]:
    unit = case.units.get(piece.engine)
    if unit is None:
        return []
    request = case.requests[piece.request]
    engine = case.engines[piece.engine]
    if piece.phase == "decode":
        if not engine.decode_entries:
            return []
        aligned = request.computed // unit.value * unit.value
    else:
        aligned = unit.aligned(request.prompt)
        if engine.decode_entries and request.stored_end >= request.prompt:
            return []
    return [(max(start, aligned), end) for start, end in left if end > aligned]


CLAIMS: dict[Turn, Claim] = {Turn.POSITION: claim}


def rule(case: Case) -> Results:
    assigned = case.assigned.get(CAUSE.id)
    for tag, unit in case.units.items():
        if assigned and assigned.amounts.get(tag) and unit:
            yield _finding(case, tag, unit)
            return
    known = [(tag, unit) for tag, unit in case.units.items() if unit]
    if known:
        tag, unit = known[0]
        stored = sum(bool(request.stored_end) for request in case.of_engine(tag))
        also = f", and of {listed(map(str, unit.also))} (the block size) just as well" if unit.also else ""
        verb = "fills" if stored == 1 else "fill"
        yield CAUSE.ruled_out(
            f"units of {unit.value} tokens ({unit.where}){also}; {plural(stored, 'prompt')} {verb} them",
        )


def _finding(case: Case, tag: int, unit: Unit) -> Finding:
    """One finding for the run, told from its first engine that lost tokens so."""
    engine = case.engines[tag]
    lost = case.assigned[CAUSE.id].requests
    # What was reused or loaded whole asks nothing of the unit.
    prompts = [r for r in case.of_engine(tag) if r.row in lost or r.stored_end]
    whole = [r for r in prompts if r.row in lost and unit.aligned(r.prompt) == 0]
    tails = [r for r in prompts if r.row in lost and unit.aligned(r.prompt) > 0]
    lengths = [r.prompt for r in prompts]
    connector = engine.connector.cls if engine.connector else "This connector"
    alone = len(prompts) == 1 and len(case.of_engine(tag)) > 1  # what else there was has other causes
    shorter = (
        f"1 of {count(len(case.of_engine(tag)))} prompts"
        if alone and whole
        else of_all(len(whole), len(prompts), "prompt")
    )
    if whole:
        verb = "is" if len(whole) == 1 else "are"
        title = f"{connector} stores whole units of {unit.value} tokens only: {shorter} {verb} shorter."
    else:
        title = (
            f"{connector} stores whole units of {unit.value} tokens: a prompt's tail below that is cut off."
        )
    evidence = [
        _lengths(lengths, len(whole), len(tails)),
        f"{_stores(prompts)}; {unit.value} = {unit.where}",
        f"every store is {unit.rounding} tokens, cut to what its chunk held",
    ]
    return case.finding(
        CAUSE,
        title,
        severity=FAULT if whole else LIMIT,
        evidence=evidence,
        events=_events(case, whole or tails, unit),
        remedy=_remedy(engine, unit, prompts),
        headline=(
            f"{shorter} {'is' if len(whole) == 1 else 'are'} shorter than this connector's unit of "
            f"{unit.value} tokens"
            if whole
            else f"only the tails of prompts below the unit of {unit.value} tokens are left out"
        ),
    )


def _lengths(lengths: list[int], whole: int, tails: int) -> str:
    """How long the prompts are, and how many fall below the unit."""
    if len(lengths) == 1:
        fate = "below the unit" if whole else "more than a unit, and its tail is below one"
        return f"the prompt has {plural(lengths[0], 'token')}: {fate}"
    low, high = min(lengths), max(lengths)
    spread = (
        f"all {count(len(lengths))} prompts here have {plural(low, 'token')}"
        if low == high
        else f"prompts here have {count(low)} to {count(high)} tokens, "
        f"median {count(statistics.median(lengths))}"
    )
    verb = "falls" if whole == 1 else "fall"
    return (
        f"{spread}; {count(whole)} of {count(len(lengths))} {verb} below the unit whole, {count(tails)} by "
        "their tail"
    )


def _stores(prompts: list[Request]) -> str:
    """Store sizes in the metadata, with how many requests each."""
    sizes = Counter(sum(max(0, e.slots) for e in r.entries) for r in prompts if r.entries)
    silent = sum(not r.entries for r in prompts)
    shown = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:5]
    parts = [f"{count(size)} ({plural(n, 'request')})" for size, n in sorted(shown)]
    if len(sizes) > len(shown):
        parts.append(f"and {plural(len(sizes) - len(shown), 'other size')}")
    if silent:
        parts.append(f"no entry at all ({plural(silent, 'request')})")
    return "store sizes in the metadata: " + ", ".join(parts)


def _events(case: Case, requests: list[Request], unit: Unit) -> list[Event]:
    events = []
    for r in sorted(requests, key=lambda r: -r.prompt)[:3]:
        step = r.entries[0].step if r.entries else r.chunk_step
        slots = sum(max(0, e.slots) for e in r.entries)
        entry = (
            f"a store of {count(slots)} slots in the metadata" if r.entries else "no entry in the metadata"
        )
        events.append(Event(r.id, step, f"{count(r.prompt)} prompt tokens, {entry}"))
    return events


def _remedy(engine: Engine, unit: Unit, prompts: list[Request]) -> list[str]:
    """The flag or key to change, with what the first three of its halves that fit any prompt would have
    saved."""
    total = sum(r.prompt for r in prompts)
    if unit.kind == "block_size":
        floor = 32 if engine.facts.platform == "cpu" else 16
    else:
        floor = max(1, engine.block_size)
    effects: list[str] = []
    smaller = unit.value
    while smaller % 2 == 0 and smaller // 2 >= floor and len(effects) < 3:
        smaller //= 2
        saved = sum(max(0, r.prompt - unit.kept_back) // smaller * smaller for r in prompts)
        if not saved:
            continue
        share = percent(saved, total)
        effects.append(
            f"{smaller} would have saved {share} of these prompt tokens"
            if not effects
            else f"{smaller} {share}"
        )
    change = {
        "max_num_batched_tokens": "lower --max-num-batched-tokens",
        "block_size": "lower --block-size",
        "extra": f'lower "{unit.name}" in kv_connector_extra_config',
        "attribute": f"lower {unit.name} of the connector",
    }[unit.kind]
    lines = []
    if effects:
        lines.append(f"{change}: {', '.join(effects)}")
    elif unit.kind == "block_size":
        lines.append(
            "the unit is a block of the KV cache already at its smallest: only longer prompts are stored"
        )
    elif smaller < unit.value:
        lines.append(f"{change} (but no prompt of this run would fill {smaller} either)")
    elif unit.value <= floor:
        lines.append(f"{change} (here it is no more than a block already)")
    else:
        lines.append(change)
    file = engine.connector.file if engine.connector else ""
    if unit.kind != "block_size" and file:
        short = "/".join(file.replace("\\", "/").split("/")[-2:])
        lines.append(f"or change the rounding in {short}")
    return lines
