"""already-stored: the connector holds these tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence, Set
from typing import NamedTuple

from kvtrace.causes.case import CaseRequest, kept_before, kept_parts
from kvtrace.causes.evidence.loads import findable, missed_elsewhere
from kvtrace.causes.evidence.logs import caught_where_it_saves
from kvtrace.causes.evidence.prompts import answered
from kvtrace.causes.rule import LIMIT, SAVES, Case, Cause, Interval, LostSpan, Results, Stage, Turn
from kvtrace.ledger.ends import NOT_ARRIVED, LoadEnd
from kvtrace.ledger.intervals import intersect, subtract, union
from kvtrace.terms import Grade
from kvtrace.words import count, of_all, plural

CAUSE = Cause(
    id="already-stored",
    stage=Stage.SCHEDULE,
    severity=LIMIT,
    ledger=SAVES,
    meaning=(
        "The connector holds these tokens already, or takes them for held, so it does not store them again. "
        "The grade says how well the earlier save was seen: read is not stored."
    ),
    seen_as="No store entry, and an earlier store of the same tokens in this trace, or a hit at the lookup.",
    remedy=(
        "Let such prompts load (kv_role kv_both, no prompt_logprobs) if they should not be computed again."
    ),
)


_Held = tuple[list[tuple[int, int]], list[list[Interval]]]


def claim(case: Case, span: LostSpan, unclaimed: list[Interval]) -> list[Interval]:
    if span.phase == "decode":
        return []
    request = case.requests[span.request]
    return intersect(unclaimed, union([(0, answered(request)), *there_before(case, request)]))


def claim_unread(case: Case, span: LostSpan, unclaimed: list[Interval]) -> list[Interval]:
    """Of what the save hook was given and did not read: what earlier requests with these tokens were given,
    and is not known to be lost of all of them. The worker may well look whether a key is there."""
    return intersect(unclaimed, there_before(case, case.requests[span.request]))


def there_before(case: Case, request: CaseRequest) -> list[Interval]:
    """Positions of a request that earlier ones with these tokens had kept as it began."""
    return case.once(("there before", request.row), lambda: _there(case, request))


def _there(case: Case, request: CaseRequest) -> list[Interval]:
    held = case.once("held by beginning", lambda: _held(case))
    found: list[Interval] = []
    for digest, _ in case.run.in_common.get(request.row, ()):
        began, there = held[request.engine, digest]
        earlier = bisect_left(began, _began(request))
        found += there[earlier - 1] if earlier else ()
    return union(found)


def _began(request: CaseRequest) -> tuple[int, int]:
    return request.chunk_step, request.row


def _held(case: Case) -> dict[tuple[int, int], _Held]:
    """By engine and digest of a beginning: when each request with it began, and what all had kept of it
    by then."""
    alike: dict[tuple[int, int], _Held] = defaultdict(lambda: ([], []))
    not_there: dict[int, list[Interval]] = defaultdict(list)
    for row in case.run.load_rows:
        ended = (part for parts in row.lost for part in parts)
        not_there[row.request] += [(start, end) for start, end, how in ended if how in NOT_ARRIVED]
    for request in sorted(case.requests, key=_began):
        kept = subtract(kept_parts(request), union(not_there[request.row]))
        for digest, tokens in case.run.in_common.get(request.row, ()):
            began, there = alike[request.engine, digest]
            before = there[-1] if there else []
            more = subtract(intersect(kept, [(0, tokens)]), before)
            began.append(_began(request))
            there.append(union([*before, *more]) if more else before)
    return alike


CLAIMS = {Turn.POSITION: claim, Turn.UNREAD: claim_unread}


def rule(case: Case) -> Results:
    rows = case.affected(CAUSE)
    if not rows:
        yield from _nothing_held(case)
        return
    here = [r for r in rows if _earlier(case, r) > answered(r)]
    unsure = [r for r in here if kept_before(case, r, Grade.WRITTEN, together=True) < _earlier(case, r)]
    failed = {row.request for row in case.run.load_rows if row.ends.get(LoadEnd.FAILED)}
    why = _reason(case, rows, bool(here), failed)
    title, headline = (_UNSURE if unsure else why)[:2]
    found = case.finding(
        CAUSE,
        f"{title} ({of_all(len(unsure), len(rows), 'request') if unsure else plural(len(rows), 'request')}).",
        evidence=[
            f"begun like an earlier request that had stored these tokens: {count(len(here))} (that its save "
            f"came to rest was not seen: {count(len(unsure))}); answered with a hit by the lookup: "
            f"{count(sum(r.offered > 0 for r in rows))}",
            *(caught_where_it_saves(case) if unsure else []),
        ],
        headline=headline,
        remedy=[_UNSURE.remedy, *([] if why is _BEHIND else [why.remedy])] if unsure else [why.remedy],
    )
    if unsure:
        weakest = min(_seen(case, r) for r in unsure)
        found.grade = min(weakest, found.grade) if found.grade is not None else weakest
    yield found


def _nothing_held(case: Case) -> Results:
    looked = [r for r in case.requests if r.offered >= 0]
    unread = any(engine.unreadable_steps for engine in case.run.engines)
    if looked and not unread and not missed_elsewhere(case):
        hits = sum(r.offered > 0 for r in looked)
        yield CAUSE.ruled_out(
            f"{plural(hits, 'hit')} in {plural(len(looked), 'lookup')}, and no prompt that an earlier "
            "store of this run covers was left out"
        )


class _Reason(NamedTuple):
    title: str
    headline: str
    remedy: str


_HELD = "The connector holds these tokens already and does not store them again"
_AGAIN = _Reason(_HELD, "prompts that the connector holds already were computed again", CAUSE.remedy)
_NOT_OFFERED = _AGAIN._replace(
    remedy="See what get_num_new_matched_tokens answers of such a prompt: what stores takes it for stored, "
    "and what looks up offers nothing of it."
)
_NOT_SAID = _Reason(
    "Tokens that an earlier request stored are not stored again",
    "tokens that an earlier request stored are not stored again",
    "If they are not meant to be left out, see by which rule they are: the connector may know them by their "
    "content, or store some positions of a prompt alone.",
)
_LESS = _Reason(
    f"{_HELD}, and the lookup offers less than that",
    "the lookup offers less than the store holds",
    "Look at what get_num_new_matched_tokens counts of such a prompt: it offers less than was stored, and "
    "what it leaves out is computed again.",
)
_BEHIND = _Reason(
    f"{_HELD}: they are what a hit leaves to compute",
    "the store holds them already: vLLM computes them behind a hit",
    "Nothing to do: of what is found a prompt's last token at least is computed, in whole units.",
)
_FAILED = _Reason(
    "The connector takes these tokens for stored: they were computed as a load failed, and not stored again",
    "tokens were computed as a load failed, and not stored again",
    "See why their load failed. If the store does not have them, let no lookup promise them, and store them "
    "anew.",
)
_UNSURE = _Reason(
    "Not stored again after a save of these tokens: it was not seen that it came to rest",
    "prompts were not stored again after an earlier save of the same tokens",
    "Ask kvtrace verify whether the earlier save is in the store: that it was offered or read was seen, "
    "whether it came to rest was not.",
)


def _reason(case: Case, rows: Sequence[CaseRequest], here: bool, failed: Set[int]) -> _Reason:
    """``here``: an earlier save is taken to hold tokens of some; ``failed``: rows whose load did."""
    whole = [r for r in rows if not r.external and not r.entries]
    hits = any(r.offered > 0 for r in rows)
    if not here and all(r.row in failed for r in rows):
        return _FAILED
    if whole:
        asked = not hits and all(case.engines[r.engine].looks_up for r in whole)
        return _NOT_OFFERED if asked else _AGAIN
    if any(r.offered > 0 and _could_be_found(case, r) for r in rows):
        return _LESS
    if any(r.row in failed for r in rows):
        return _FAILED
    return _BEHIND if hits else _NOT_SAID


def _earlier(case: Case, request: CaseRequest) -> int:
    """Leading positions of a request that an earlier save is taken to hold, however well it was seen."""
    return max(kept_before(case, request), _first_there(case, request))


def _first_there(case: Case, request: CaseRequest) -> int:
    """... as far as positions go that :func:`there_before` has."""
    start, end = next(iter(there_before(case, request)), (0, 0))
    return 0 if start else end


def _seen(case: Case, request: CaseRequest) -> Grade:
    """How well the earlier save is seen of which that is not known."""
    read = kept_before(case, request, Grade.READ, together=True)
    return Grade.READ if read >= _first_there(case, request) else Grade.DECLARED


def _could_be_found(case: Case, request: CaseRequest) -> bool:
    """Whether a lookup could have found some of these tokens that it did not: not a prompt's last one, and
    whole units alone."""
    beyond = [(request.local + request.offered, findable(case, request, request.prompt))]
    held = union((start, end) for start, end, _ in case.assigned[CAUSE.id].at[request.row])
    return bool(intersect(held, beyond))
