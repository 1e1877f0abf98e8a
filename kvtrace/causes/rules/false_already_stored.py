"""false-already-stored: prompts left out because another prompt's empty key was taken for theirs."""

from __future__ import annotations

from kvtrace.causes.case import Request, after_empty, kept_of_alike, shared_before, stored_before
from kvtrace.causes.evidence.accounted import all_left
from kvtrace.causes.evidence.unit import Unit
from kvtrace.causes.model import Finding
from kvtrace.causes.rule import FAULT, LIMIT, SAVES, Case, Cause, Event, Interval, Piece, Results, Stage, Turn
from kvtrace.ledger.intervals import intersect
from kvtrace.ledger.model import Engine
from kvtrace.terms import Grade
from kvtrace.trace.format import STEP_MASK
from kvtrace.words import count, listed, of_all, plural

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
        "a store of it would not be: a fault. Or, as a choice to confirm: "
        "every prompt that begins like an earlier, stored one and goes on "
        "otherwise is left out and not read at all, or every one that comes to as many whole units, while "
        "others are stored. Or: whatever has the same tokens as a stored part of an "
        "earlier prompt, behind another beginning, is left out, and nothing else before it."
    ),
    remedy=(
        "Do not look up or store a prompt whose rounded length is 0, and use one rounding for both. Make "
        "the unit smaller as well: under a unique key, such a prompt would still store no tokens."
    ),
)


def taken_for_stored(case: Case, request: Request) -> bool:
    """In no metadata at all, rounded to nothing by its lookup, after a different prompt had been offered with
    0 slots: both have the key of the empty prefix. Lookups round further down than stores in some connectors:
    one token more than a unit counts. What the store rounds to nothing too is below the unit: of that this is
    a symptom, and no cause."""
    unit = case.units.get(request.engine)
    if request.grown_step or (unit and not unit.aligned(request.prompt)):
        return False
    size = unit.value if unit else case.engines[request.engine].block_size
    kept = max(1, unit.kept_back if unit else 1)
    return (
        after_empty(case, request) and 0 < request.prompt <= size + kept and not stored_before(case, request)
    )


def claim(case: Case, piece: Piece, left: list[Interval]) -> list[Interval]:
    if piece.phase == "decode":
        return []
    return left if taken_for_stored(case, case.requests[piece.request]) else []


def by_its_head(case: Case, request: Request) -> bool:
    """In no metadata and not read at all, or not as far as anything was kept of earlier prompts, like every
    prompt of the engine that begins like an earlier one of which something was saved, and is another one
    after that."""
    if not _left_out(case, request):
        return False
    tag = request.engine
    return case.once(("all left out by their head", tag), lambda: _all_accounted_out(case, tag))


def _all_accounted_out(case: Case, tag: int) -> bool:
    alike = [r for r in case.of_engine(tag) if r.shared and r.shared < r.prompt]
    return all(_left_out(case, r) for r in alike) or _out_by_length(case, tag)


def _out_by_length(case: Case, tag: int) -> bool:
    """Whether of the prompts that begin like an earlier one those are left out that come to as many whole
    units as one that was stored before, and no others; and one that comes to another number was stored after
    one of them, so that the store goes on."""
    unit = case.units.get(tag)
    lengths: set[int] = set()
    left_out = goes_on = False
    for request in sorted(case.of_engine(tag), key=lambda r: (r.chunk_step, r.row)) if unit else ():
        length = unit.aligned(request.prompt) if unit else 0
        out, alike = _left_out(case, request), 0 < request.shared < request.prompt
        if alike and out != (length in lengths):
            return False
        left_out |= out
        if request.saved and not out:
            goes_on |= left_out and alike
            lengths.add(length)
    return goes_on


def _left_out(case: Case, request: Request) -> bool:
    unit = case.units.get(request.engine)
    # What is behind the common part must fill a unit, or a block.
    whole = unit.surely_aligned(request.prompt) if unit else request.prompt - max(request.block, 1)
    # Behind a hit it may be the rest of a prompt that is not offered: no key says so.
    other = 0 < request.shared < whole and request.offered <= 0 and not request.grown_step
    none = not request.saved or _behind_all(case, request)
    known = request.unseen or stored_before(case, request)
    return other and none and not known and shared_before(case, request) > 0


def _behind_all(case: Case, request: Request) -> bool:
    """Whether of its prompt that alone was kept which stands behind all that was kept of earlier ones."""
    if request.middle is None:
        return False
    most = max((kept for _, kept in kept_of_alike(case, request)), default=0)
    return request.shared < request.middle[0] == most


def claim_by_head(case: Case, piece: Piece, left: list[Interval]) -> list[Interval]:
    if piece.phase == "decode" or not by_its_head(case, case.requests[piece.request]):
        return []
    unit = case.units.get(piece.engine)
    request = case.requests[piece.request]
    begin, end = shared_before(case, request), unit.aligned(request.prompt) if unit else request.prompt
    return [(max(a, begin), min(b, end)) for a, b in left if max(a, begin) < min(b, end)]


def claim_by_part(case: Case, piece: Piece, left: list[Interval]) -> list[Interval]:
    if piece.phase == "decode":
        return []
    return intersect(left, list(case.twins.get(piece.request, ())))


def _claim(case: Case, piece: Piece, left: list[Interval]) -> list[Interval]:
    return claim(case, piece, left) or claim_by_part(case, piece, left) or claim_by_head(case, piece, left)


CLAIMS = {Turn.POSITION: _claim}


def rule(case: Case) -> Results:
    victims = case.affected(CAUSE)
    heads = [request for request in victims if not taken_for_stored(case, request)]
    parts = [request for request in heads if request.row in case.twins]
    if victims and len(parts) == len(victims):
        yield _of_parts(case, parts)
    elif victims and len(heads) == len(victims):
        yield _of_heads(case, heads)
    elif victims:
        yield _finding(case, victims)
    elif all_left(case) and not any(_empty_key(case, request) for request in case.requests):
        if not _twins_at_rest(case):
            return
        yield CAUSE.ruled_out(
            f"nothing of {plural(len(case.requests), 'prompt')} that fills a unit was left out"
        )


def _twins_at_rest(case: Case) -> bool:
    """Whether of all parts with the same tokens behind other beginnings both are known to be at rest, as far
    as there are such: a store that takes one for the other may have dropped it, or written it over."""
    rows = {row for row, twins in case.run.twins.items() for row in (row, *(twin.of for twin in twins))}
    return all((r.grade or 0) >= Grade.PROVED for r in case.requests if r.row in rows)


def _empty_key(case: Case, request: Request) -> bool:
    """Whether it may have been taken for a prompt that was rounded to nothing before it, as it was below the
    unit itself."""
    return not request.saved and after_empty(case, request)


def _of_heads(case: Case, victims: list[Request]) -> Finding:
    engine = case.engines[victims[0].engine]
    name = engine.connector.cls if engine.connector else "The connector"
    affected = of_all(len(victims), len(case.of_engine(engine.tag)), "prompt")
    were = "was" if len(victims) == 1 else "were"
    shared = sorted({r.shared for r in victims})
    spread = " to ".join(count(n) for n in (shared[0], shared[-1])[: len(shared)])
    stored = sum(bool(r.saved) for r in case.of_engine(engine.tag))
    same = " and comes to as many whole units" if _out_by_length(case, engine.tag) else ""
    return case.finding(
        CAUSE,
        f"{name} stored nothing of {affected} that begin like an earlier one, of which it stored something, "
        f"and are others after {spread} tokens: so does a key of the first tokens alone. Is that meant?",
        severity=LIMIT,
        evidence=[
            f"every prompt of this run that begins like an earlier one{same} "
            f"({plural(len(victims), 'prompt')}, {spread} tokens in common) has no store entry "
            f"and was not read at all; of {plural(stored, 'other prompt')} something was saved",
            f"what was left out begins behind the common part: {count(case.tokens(CAUSE))} tokens",
        ],
        remedy=[
            "build the key from all tokens up to the end of what is stored, not from the first ones alone"
        ],
        events=[
            Event(
                r.id,
                r.chunk_step,
                f"{count(r.shared)} of {count(r.prompt)} prompt tokens as before, no store",
            )
            for r in victims[:3]
        ],
        headline=f"{affected} {were} left out, as if {'its' if len(victims) == 1 else 'their'} first tokens "
        "alone were the key",
    )


def _of_parts(case: Case, victims: list[Request]) -> Finding:
    engine = case.engines[victims[0].engine]
    name = engine.connector.cls if engine.connector else "The connector"
    affected = of_all(len(victims), len(case.of_engine(engine.tag)), "prompt")
    lost = count(case.tokens(CAUSE))
    return case.finding(
        CAUSE,
        f"{name} left out parts of {affected}, and stored the same tokens of an earlier prompt behind "
        "another beginning: so does a key of these tokens alone. Is that meant?",
        severity=LIMIT,
        evidence=[
            f"{lost} tokens of {plural(len(victims), 'prompt')} stand in an earlier prompt too, behind other "
            "tokens, and something was stored of them there; each of these parts has no store entry and was "
            "not read, and before the last of them nothing else is missing",
            "the KV of a token depends on all tokens before it: what is stored for the earlier prompt is not "
            "the KV of these",
        ],
        remedy=["build the key of a part from all tokens before it too, or from its parent's key"],
        events=[
            Event(
                r.id,
                r.chunk_step,
                f"positions {_spread(case, r)} have the tokens of an earlier prompt, no store",
            )
            for r in victims[:3]
        ],
        headline=f"parts of {affected} were left out, as if their own tokens alone were the key",
    )


def _spread(case: Case, request: Request) -> str:
    return listed([f"{count(a)} to {count(b)}" for a, b in case.twins[request.row]][:3])


def _finding(case: Case, victims: list[Request]) -> Finding:
    engine = case.engines[victims[0].engine]
    unit = case.units.get(engine.tag)
    size = unit.value if unit else engine.block_size
    kept = unit.kept_back if unit else 1
    # A store of these would not be empty: it is their lookup that rounds further down.
    edge = [r for r in victims if r.prompt - kept >= size]
    affected = of_all(len(victims), len(case.of_engine(engine.tag)), "prompt")
    name = engine.connector.cls if engine.connector else "The connector"
    were = "was" if len(victims) == 1 else "were"
    reason = "rounded down to 0 tokens, they share the key of the empty prefix"
    remedy = [CAUSE.remedy]
    if edge:
        gain = count(sum(max(0, r.prompt - kept) // size * size for r in edge))
        remedy.insert(
            0,
            f"round the lookup as the store does: {gain} tokens of {plural(len(edge), 'prompt')} would "
            "have been stored",
        )
        reason = "rounded down to 0 tokens, some by the lookup alone, they share the key of the empty prefix"
    if len(edge) == len(victims):
        reason = "the lookup rounds them down to 0 tokens, the key of the empty prefix; a store would not"
    return case.finding(
        CAUSE,
        f"{name} treats {affected} as stored that never {were}: {reason}.",
        evidence=[*_keys(case, engine, victims), *_rounding(victims, edge, size, kept, unit)],
        remedy=remedy,
        events=[
            Event(r.id, r.chunk_step, f"{count(r.prompt)} prompt tokens, no store entry in any step")
            for r in sorted(victims, key=lambda r: -r.prompt)[:3]
        ],
        headline=f"{affected} {were} treated as stored, under the key of the empty prefix",
    )


def _keys(case: Case, engine: Engine, victims: list[Request]) -> list[str]:
    """Whose empty store came first, and that the prompts left out after it are not the same one."""
    step, _, length = case.empty_before[engine.tag]
    same = (r for r in case.of_engine(engine.tag) if r.empty_entry and r.entries[0].step == step)
    holder = next(same, None)
    digests = {r.digest for r in victims if r.digest}
    lengths = sorted({r.prompt for r in victims})
    sizes = f"{count(lengths[0])} to {count(lengths[-1])}" if len(lengths) > 1 else count(lengths[0])
    if len(digests) > 1:
        differ = f"their digests differ ({plural(len(digests), 'different prompt')}): they share"
    elif len(victims) == 1:
        differ = "its tokens are different: it shares"
    else:
        differ = "their tokens are not that prompt's: they share"
    return [
        f"step {step & STEP_MASK}: a prompt of {count(length)} tokens, with a store of 0 slots"
        + (f" (request {holder.id})" if holder else ""),
        f"after it {plural(len(victims), 'prompt')} of {sizes} tokens got no entry; {differ} the key, not "
        "the tokens",
    ]


def _rounding(
    victims: list[Request], edge: list[Request], size: int, kept: int, unit: Unit | None
) -> list[str]:
    """How the prompts come to 0 tokens; `edge` are those of which only a lookup makes 0."""
    evidence = []
    short = len(victims) - len(edge)
    where = unit.where if unit else "a block"
    if short:
        some = f"{count(short)} of them {'is' if short == 1 else 'are'}" if edge else "all of them are"
        which = "it is" if len(victims) == 1 else some
        evidence.append(f"{which} rounded down to nothing: the unit is {size} tokens ({where})")
    if edge:
        n, stored = edge[0].prompt, max(0, edge[0].prompt - kept) // size * size
        evidence.append(
            f"{plural(len(edge), 'prompt')} of {count(n)} tokens: a store would round that to {stored} and "
            f"have a unique key (unit {size}, {where}); the lookup rounds further down, to 0 as floor(({n} "
            f"- {kept + 1}) / {size}) x {size} does, and asks for the empty key"
        )
    return evidence
