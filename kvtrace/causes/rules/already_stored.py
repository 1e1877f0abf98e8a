"""already-stored: the connector holds these tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from kvtrace.causes.case import CaseRequest, kept_before, stored_before
from kvtrace.causes.evidence.loads import findable, missed_elsewhere
from kvtrace.causes.evidence.logs import caught_where_it_saves
from kvtrace.causes.evidence.prompts import answered
from kvtrace.causes.rule import LIMIT, SAVES, Case, Cause, Interval, LostSpan, Results, Stage, Turn
from kvtrace.ledger.ends import NOT_ARRIVED, LoadEnd
from kvtrace.ledger.intervals import intersect, subtract, union
from kvtrace.terms import Grade
from kvtrace.words import capital, of_all, plural

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
        kept = [(max(0, entry.start), min(entry.end, entry.available)) for entry in request.entries]
        # what the GPU's own prefix cache had nobody need have stored
        kept = [(request.local, request.taken)] if request.taken is not None else kept
        kept = subtract(union(kept), union([*request.lost, *not_there[request.row]]))
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
    hits = sum(r.offered > 0 for r in rows)
    parts = []
    if unsure:
        parts.append(
            "an earlier request of this run begins with the same tokens; that its save came to rest was not "
            f"seen ({of_all(len(unsure), len(here), 'request')})"
        )
    elif here:
        parts.append(
            "an earlier request of this run that begins with the same tokens stored them "
            f"({plural(len(here), 'request')})"
        )
    if hits:
        parts.append(f"the lookup answered a hit ({plural(hits, 'request')})")
    whole = [r for r in rows if not r.external and not r.entries]
    less = [r for r in rows if r.offered > 0 and _could_be_found(case, r)]
    failed = {row.request for row in case.run.load_rows if row.ends.get(LoadEnd.FAILED)}
    failures = sum(r.row in failed for r in rows)
    promised = failures == len(rows) and not here
    title, headline = _PROMISED if promised else _words(whole, less, hits, bool(unsure), failures > 0)
    of = (
        of_all(len(unsure), len(rows), "request")
        if 0 < len(unsure) < len(rows)
        else plural(len(rows), "request")
    )
    found = case.finding(
        CAUSE,
        f"{title} ({of}).",
        evidence=["; ".join(parts)],
        events=case.events(CAUSE, "computed again, no store"),
        headline=headline,
    )
    behind = hits == len(rows) and not whole and not less
    if promised:
        found.remedy = [_REMEDY_FAILED, _REMEDY_NOT_THERE]
    elif behind:
        found.remedy = [_REMEDY_FAILED if failures else _REMEDY_BEHIND]
    elif less:
        found.remedy = [_REMEDY_LESS]
    elif not hits and not whole:  # some tokens of a prompt, and the connector never says that it has them
        found.remedy = [_REMEDY_NOT_SAID]
    elif not hits and all(case.engines[r.engine].looks_up for r in whole):
        found.remedy = [_REMEDY_NOT_OFFERED]
    if unsure:
        found.evidence += caught_where_it_saves(case)
        weakest = min(_seen(case, r) for r in unsure)
        found.grade = min(weakest, found.grade) if found.grade is not None else weakest
        found.remedy = [_REMEDY_UNSURE, *([] if behind else found.remedy)]
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


_REMEDY_BEHIND = "Nothing to do: of what is found a prompt's last token at least is computed, in whole units."
_REMEDY_FAILED = "See why their load failed: what lies behind it is computed again."
_REMEDY_NOT_THERE = "If the store does not have them, let no lookup promise them, and store them anew."
_PROMISED = (
    "The connector took these tokens for stored, and their load failed: they are not stored again",
    "tokens whose load failed were computed, and not stored again",
)
"""Title and headline where a lookup's answer alone says that they are stored."""
_REMEDY_LESS = (
    "Look at what get_num_new_matched_tokens counts of such a prompt: it offers less than was stored, and "
    "what it leaves out is computed again."
)
_REMEDY_NOT_OFFERED = (
    "See what get_num_new_matched_tokens answers of such a prompt: what stores takes it for stored, and what "
    "looks up offers nothing of it."
)
_REMEDY_NOT_SAID = (
    "If they are not meant to be left out, see by which rule they are: the connector may know them by their "
    "content, or store some positions of a prompt alone."
)
_REMEDY_UNSURE = (
    "First see whether the earlier save is in the store: that it was offered or read was seen, whether it "
    "came to rest was not (kvtrace verify looks at that)."
)


def _earlier(case: Case, request: CaseRequest) -> int:
    """Leading positions of a request that an earlier save is taken to hold, however well it was seen."""
    return max(kept_before(case, request, Grade.DECLARED), stored_before(case, request))


def _seen(case: Case, request: CaseRequest) -> Grade:
    """How well the earlier save is seen of which that is not known."""
    read = kept_before(case, request, Grade.READ, together=True)
    return Grade.READ if read >= stored_before(case, request) else Grade.DECLARED


def _could_be_found(case: Case, request: CaseRequest) -> bool:
    """Whether a lookup could have found some of these tokens that it did not: not a prompt's last one, and
    whole units alone."""
    beyond = [(request.local + request.offered, findable(case, request, request.prompt))]
    held = union((start, end) for start, end, _ in case.assigned[CAUSE.id].at[request.row])
    return bool(intersect(held, beyond))


def _words(
    whole: Sequence[CaseRequest], less: Sequence[CaseRequest], hits: int, unsure: bool, failed: bool
) -> tuple[str, str]:
    """Title and headline. whole: the requests of which nothing was loaded or offered; less: those that the
    lookup found in part; hits: how many were found; unsure: of some the earlier save is not known to be at
    rest; failed: loads of some failed."""
    if unsure:
        headline = "prompts were not stored again after an earlier save of the same tokens"
        return "Not stored again after a save of these tokens: it was not seen that it came to rest", headline
    title = "The connector holds these tokens already and does not store them again"
    if whole:
        return title, "prompts that the connector holds already were computed again"
    if less:
        return f"{title}, and the lookup offers less than that", "the lookup offers less than the store holds"
    if not hits:
        headline = "tokens that an earlier request stored are not stored again"
        return capital(headline), headline
    if failed:
        headline = "the store holds them already: they were computed again, as a load failed"
        return f"{title}: they were computed again, as a load failed", headline
    behind = "the store holds them already: vLLM computes them behind a hit"
    return f"{title}: they are what a hit leaves to compute", behind
