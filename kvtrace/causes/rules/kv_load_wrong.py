"""kv-load-wrong: what a load put into the KV cache is not what its tokens compute to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvtrace.causes.diagnosis import Finding, RuledOut
from kvtrace.causes.evidence import loads, unlike
from kvtrace.causes.rule import FAULT, LIMIT, LOADS, Case, Cause, LoadEnd, Results
from kvtrace.causes.rules import kv_misplaced, kv_stale
from kvtrace.ledger.contents.by_layer import OF_LAYER, OF_RANK
from kvtrace.ledger.contents.compare import ALTERED, EQUAL, NOT_COMPARED, WRONG
from kvtrace.ledger.contents.distance import OTHER_TOKENS
from kvtrace.ledger.contents.judge import (
    ANOTHER_REQUEST,
    ELSEWHERE,
    HAD_IT_BEFORE,
    NOTHING_BUT_ZEROES,
    SAME_PROMPT,
    TWICE,
)
from kvtrace.ledger.loads.outcome import LoadOf
from kvtrace.terms import Grade
from kvtrace.words import count, listed, of_all, plural

CAUSE = Cause(
    id="kv-load-wrong",
    severity=FAULT,
    ledger=LOADS,
    wrong_data=True,
    meaning="What a load put into the KV cache is not what these tokens compute to.",
    seen_as=(
        "The fingerprint of a loaded block is that of other tokens or of another place, or stands twice in "
        "one load, or is none of those that the same tokens computed to in this run on that rank, though "
        "each of these is known and the store had nothing for them before; where nothing but such numbers "
        "came back, by their sketches they are too far from those, or too large or small, to be rounded. The "
        "fingerprints of single layers tell which of them differ. A choice: it is what the same tokens "
        "computed to, for requests under another cache_salt alone, or on an engine alone that computes the "
        "same tokens to other KV."
    ),
    remedy=(
        "Check the key (all tokens up to the end of what is stored, model, layer, rank), the order of the "
        "blocks, the layer that each piece is written to, and that nothing on the way changes the bytes (a "
        "cast, a cut, another type or scale than it was written with, a copy before the forward, a buffer "
        "that is filled anew before it was stored)."
    ),
    load_ends=(LoadEnd.WRONG,),
)


_BY_WORDS = (
    (
        NOTHING_BUT_ZEROES,
        "see what came into the store: zeroes come back where nothing did (a put that failed or was dropped, "
        "and nobody looked; memory that was reserved and not filled)",
    ),
    (OF_RANK, "give each rank a place of its own: the rank belongs into the key, or the file's name"),
    (OF_LAYER, "store and load each layer under its own name, not by its place in a group or in a list"),
    (
        SAME_PROMPT,
        "check, one by one, which block of the request each piece is saved from and loaded into: saves begin "
        "behind what earlier steps computed or loaded, loads behind what the GPU's prefix cache has; one "
        "that is passed over, or an offset in the store that is off by one, shifts all behind it",
    ),
    (
        ELSEWHERE,
        "see that nothing goes on naming a place of the store that was given to other KV (eviction, reuse); "
        "the same blocks behind another beginning need another key",
    ),
    (
        ANOTHER_REQUEST,
        "make the key of all tokens up to the end of what it names, with the request's cache_salt, its LoRA "
        "adapter and the hashes of its images (mm_features), and read no blocks once their request is over "
        "(keep them until the copy is done: request_finished returns True)",
    ),
    (
        OTHER_TOKENS,
        "see how what is read becomes KV: the type and the scale that it is read back with, the order of its "
        "dimensions (K and V, heads, tokens, layers); then into which blocks it goes",
    ),
    (TWICE, "see which block each piece is read from, and to which it is written: one stands for several"),
)
"""What the fingerprints say in these words has its own remedy."""
_READ_TOO_LATE = (
    "read a block before it is given to others: keep it until its copy is done (request_finished returns "
    "True, then get_finished names the save once its last byte is read; after a preemption, too); and make "
    "no name in the store of a block id"
)
_OF_OTHERS = SAME_PROMPT, ANOTHER_REQUEST, ELSEWHERE
_BEHIND = (
    "see whether start_load_kv, or the metadata, counts from the first loaded token where it should from the "
    "prompt's first one: the first num_computed_tokens of the lookup stand in the GPU's prefix cache"
)


class _Question(NamedTuple):
    """Of tokens that were loaded: who alone had computed them, and what is asked of that."""

    whose: str
    question: str
    evidence: str
    remedy: str


_ACROSS_SALTS = _Question(
    "in this run only requests under another cache_salt had computed",
    "Is that meant?",
    "they hold exactly what the same tokens computed to there, and no request under their own salt had "
    "computed them by then; a store from before this run may have had them",
    "put the request's cache_salt into the key: vLLM shares no KV between requests whose salts differ",
)
_FROM_APART = _Question(
    "an engine had computed that computes the same tokens to other KV",
    "Have these engines the same weights?",
    "both engines computed {blocks} of the same tokens, and no layer of any to the same KV: that is so with "
    "other weights, or where all differ in their last bits",
    "put what tells the weights apart (their revision, or a hash) into the key, beside the model's name",
)
_FILLS = frozenset({"DecodeBenchConnector"})
"""vLLM's own, that fills KV with made-up numbers, to measure decode steps alone."""
_MADE_UP = "nothing to do: this connector fills the KV cache with made-up numbers, to measure decode steps"
_MOST_SAID = 3
_LEAST = 0.25
"""Of the tokens that were loaded wrong: what was stored so must be as many, to be named for it."""
VERIFIED = "kv-verified"
"""What stands among the rule-outs where loads were compared, and equal."""


def rule(case: Case) -> Results:
    accepted = list(loads.accepted(case))
    wrong = loads.affected(case, CAUSE)
    blocks = case.run.compared
    equal, unequal, unknown, altered = (blocks.get(word, 0) for word in (EQUAL, WRONG, NOT_COMPARED, ALTERED))
    compared = f"{of_all(equal, equal + unequal + unknown + altered, 'loaded block')}"
    if wrong:
        lost = loads.tokens(case, wrong, CAUSE)
        what = plural(lost, "token") if lost else "Layers of tokens that another finding counts"
        of = of_all(len(wrong), len(accepted), "load")
        made_up = all(case.engines[row.engine].connector_name in _FILLS for row in wrong)
        yield loads.finding(
            case,
            CAUSE,
            f"{what} were loaded with KV that is not what they compute to ({of}).",
            evidence=[
                *loads.reasons_and_places(case, wrong, CAUSE),
                f"of {plural(equal + unequal + unknown, 'loaded block')} {count(unequal)} hold other KV, "
                f"{count(equal)} what their tokens computed to, {count(unknown)} could not be compared",
            ],
            severity=LIMIT if made_up else CAUSE.severity,
            remedy=[_MADE_UP] if made_up else _remedies(case, wrong, lost),
            headline="loaded KV is not what its tokens compute to",
        )
    elif case.run.across_salts:
        yield _question(case, case.run.across_salts, _ACROSS_SALTS)
    elif case.run.from_apart:
        yield _question(case, case.run.from_apart, _FROM_APART)
    elif equal and not unequal:
        tokens = sum(min(loads.came_whole(case, row), _proved(case, row)) for row in accepted)
        yield RuledOut(
            VERIFIED,
            f"{compared} hold exactly what the same tokens computed to in this run ({count(tokens)} of "
            f"{plural(sum(row.accepted for row in accepted), 'accepted token')} in all layers and ranks)",
        )
    elif unknown and not unequal:
        yield CAUSE.not_observed(
            f"of {plural(unknown, 'loaded block')} none could be compared with what the same tokens "
            "computed to in this run"
        )


def _proved(case: Case, row: LoadOf) -> int:
    """Tokens that came with their KV, as if all pairs had fared alike."""
    return row.proved // case.engines[row.engine].pairs


def _question(case: Case, found: Mapping[int, int], asked: _Question) -> Finding:
    """``found``: row of a request -> tokens. A choice to confirm: the store may have had them before this
    run, or the engines differ in the last bits alone."""
    tokens = plural(sum(found.values()), "token")
    return loads.finding(
        case,
        CAUSE,
        f"{tokens} of {plural(len(found), 'request')} were loaded that {asked.whose}. {asked.question}",
        [row for row in case.run.load_rows if row.request in found],
        severity=LIMIT,
        tokens=float(sum(found.values())),
        grade=Grade.PROVED,
        evidence=[asked.evidence.format(blocks=plural(case.run.apart, "block"))],
        headline=f"{tokens} loaded that {asked.whose}",
        remedy=[asked.remedy],
    )


def _remedies(case: Case, wrong: Sequence[LoadOf], lost: int) -> list[str]:
    """``lost``: tokens that the loads brought wrong."""
    first, reasons = stored_so(case, lost), loads.reasons(wrong, CAUSE)
    said = " ".join(reasons)
    where = [_BEHIND] if (unlike.BEHIND_HIT, True) in loads.what_fails(case, [*wrong]) else []
    common = case.run.in_common
    preempted = {at for one in case.requests if one.preemptions for at in common.get(one.row, ())}
    own = SAME_PROMPT in said or TWICE in said
    if own and any(not preempted.isdisjoint(common.get(row.request, ())) for row in wrong):
        where.append(kv_misplaced.PREEMPTED)
    told = [remedy for words, remedy in _BY_WORDS if words in said]
    of_others = [line for line in reasons if any(words in line for words in _OF_OTHERS)]
    if of_others and all(HAD_IT_BEFORE in line for line in of_others):
        told.insert(0, _READ_TOO_LATE)
    return [*first, CAUSE.remedy] if first else where + told + loads.where_unseen(wrong, [CAUSE.remedy])


def stored_so(case: Case, lost: int) -> list[str]:
    """What to mend first where the save side read other slots, or too early: what came back was stored so,
    and the key may be right. ``lost``: tokens that were loaded wrong."""
    found = [
        one.CAUSE.id
        for one in (kv_misplaced, kv_stale)
        if case.affected(one.CAUSE) and case.tokens(one.CAUSE) >= _LEAST * lost
    ]
    return [f"mend {listed(found)} first: a load can give back no better KV than was stored"] if found else []
