"""key-mismatch: saved a moment ago, asked for with the same tokens, and not found."""

from __future__ import annotations

from bisect import bisect_left
from functools import partial

from kvtrace.causes.case import CaseRequest
from kvtrace.causes.diagnosis import Fields, Finding
from kvtrace.causes.evidence import loads, settings, sizes
from kvtrace.causes.evidence.logs import caught_where_it_saves
from kvtrace.causes.rule import FAULT, LIMIT, LOADS, Case, Cause, Event, LoadEnd, Results
from kvtrace.ledger.loads.outcome import LoadOf
from kvtrace.terms import Grade
from kvtrace.trace.format import STEP_MASK
from kvtrace.words import count, listed, of_all, plural

CAUSE = Cause(
    id="key-mismatch",
    severity=FAULT,
    ledger=LOADS,
    meaning=(
        "The tokens were saved, under another key than the lookup computes (alignment, hash seed per "
        "process, salt, LoRA, multimodal)."
    ),
    seen_as=(
        "A prompt was saved in every layer, all but its last token or tokens; the save was written; "
        "nothing else was saved since, or it stands in its file when the run is over; a "
        "request with the same tokens is looked up and gets the answer 0. "
        "Or no lookup of the run finds anything, though prompts were saved and left the process, or are not "
        "stored again. A choice to confirm where the connector was seen to remove or empty files that it "
        "wrote, where it does find other prompts that it saved, or where another engine saved them, at a "
        "place to which both write."
    ),
    remedy=(
        "See whether the entry is there at the lookup: a store that was emptied, or an index that was never "
        "written, looks the same from here. If it is, use one function for both keys. Up to vLLM 0.28, or "
        "with a hash other than sha256, set PYTHONHASHSEED where keys build on vLLM's block hashes."
    ),
    load_ends=(LoadEnd.MISSED_SAVED,),
)


def rule(case: Case) -> Results:
    repeated = [row for row in case.run.load_rows if row.saved_before > row.local and row.answer is not None]
    hits = [row for row in repeated if (row.answer or 0) > 0]
    lost = loads.affected(case, CAUSE)
    if not lost and (never := _never_found(case)):
        yield _unfound(case, never)
        return
    if not lost:
        if others := loads.saved_elsewhere(case):
            yield _of_other_engines(case, others)
            return
        if apart := loads.missed_elsewhere(case):
            yield CAUSE.not_observed(loads.NOT_COMPARED.format(lookups=plural(len(apart), "lookup")))
            return
        if hits and all(_found_whole(case, row) for row in repeated):
            whose = of_all(len(hits), len(repeated), "prompt")
            yield CAUSE.ruled_out(f"{whose} that this run had saved whole before, found again by the lookup")
        return
    tokens = loads.tokens(case, lost, CAUSE)
    at_once = [row for row in lost if row.others_between == 0]
    first = (at_once or lost)[0]
    alike = _remainder(case, lost)
    if alike and any(case.requests[row.request].prompt % alike[0] == alike[1] for row in hits):
        alike = None  # others of that length are found
    one_more = alike is not None and alike[1] == 1  # than whole blocks
    evidence = [
        f"step {first.step & STEP_MASK}: {first.saved_by} had saved {count(first.saved_before)} of these "
        f"{count(first.prompt)} tokens in every layer, nothing else was saved in between, and the lookup "
        "answered 0",
        *_alignment(alike, lost),
    ]
    if len(at_once) < len(lost):
        rest = f"in {count(len(lost) - len(at_once))} of {plural(len(lost), 'lookup')}"
        evidence.append(f"{rest} other prompts were saved in between; none of these prompts was ever found")
    yield _finding(
        case,
        [(row, row.saved_by, row.saved_before) for row in at_once or lost],
        of_all(len(lost), len(repeated), "lookup"),
        tokens,
        {
            "evidence": evidence,
            "remedy": [*([_ROUND] if one_more else []), CAUSE.remedy],
            "headline": "what was saved is not found by the lookup",
        },
        declines=bool(hits) and not one_more,
    )


_ROUND = (
    "Round the lookup as the store does. All these prompts are one token longer than whole blocks: where it "
    "subtracts one more token first, it asks for a block less."
)


def _found_whole(case: Case, row: LoadOf) -> bool:
    return row.local + row.offered >= loads.findable(case, row, row.saved_before)


def _finding(
    case: Case,
    found: list[tuple[LoadOf, str, int]],
    lookups: str,
    again: float,
    given: Fields,
    declines: bool = False,
) -> Finding:
    """``found``: lookups, each with the id of the request that had saved its tokens, and how many.
    ``lookups``: how many of them. ``again``: tokens that were computed again. ``declines``: the keys of other
    prompts do match: it may decline what it finds, as where few are to load at a time."""
    caught = caught_where_it_saves(case)
    gone = [sizes.removed_in_words(one) for one in sizes.removed(case)]
    apart = loads.what_misses(case, {row.engine for row, _, _ in found})
    # An index that an exception kept from being written answers as another key does.
    first = ["First look at the exception that is caught where it saves: see the evidence."] if caught else []
    does = "does not offer" if declines else "does not find"
    title = (
        f"{_connectors(case, found)} {does} what it saved: {lookups} of prompts with the same tokens "
        f"as an earlier save answered 0 ({plural(again, 'token')} computed again)."
    )
    if declines:
        first.append(_look_at_the_answer(case, found))
    values: Fields = {
        **given,
        "severity": LIMIT if gone or declines else FAULT,
        "evidence": [*apart.values(), *given["evidence"], *gone, *caught],
        "events": [
            Event(row.id, row.step, f"{count(kept)} tokens saved by {by}; lookup 0")
            for row, by, kept in found[:3]
        ],
        "remedy": first + given["remedy"],
    }
    if gone:
        title += " The connector removes what it stored: is that meant?"
    elif declines:
        title += " It finds others: does it decline some of what it finds?"
    return loads.finding(case, CAUSE, title, **values)


def _look_at_the_answer(case: Case, found: list[tuple[LoadOf, str, int]]) -> str:
    return (
        f"Look at what get_num_new_matched_tokens of {_connectors(case, found)} finds of such a prompt, and "
        "at all that makes it answer 0 nevertheless; its own log may say which."
    )


def _connectors(case: Case, found: list[tuple[LoadOf, str, int]]) -> str:
    return listed(c.cls for row, _, _ in found if (c := case.engines[row.engine].connector))


def _never_found(case: Case) -> list[tuple[LoadOf, CaseRequest, int]]:
    """Lookups that found nothing of a prompt that the run had kept, each with the request that kept it and
    how many of its tokens; in engines in which no lookup ever found anything.

    Only where the save was surely done: it was seen leaving the process, or the connector itself does not
    store the same tokens again.
    """
    hits = {row.engine for row in case.run.load_rows if (row.answer or 0) > 0}
    held = case.assigned.get("already-stored")
    parents = {connector.parent for connector in case.run.connectors}
    found = []
    for row in case.run.load_rows:
        request = case.requests[row.request]
        engine = case.engines[row.engine]
        if row.engine in hits or row.answer != 0 or not engine.looks_up or not request.digest:
            continue
        if engine.connector is not None and engine.connector.ordinal in parents:
            continue  # of several connectors in one the one that stores need not be one that looks up
        known = held is not None and row.request in held.requests and not request.saved
        key = (row.engine, request.digest)
        over = case.once(("kept and over", key, known), partial(_kept, case, key, known))
        end = bisect_left(over, row.step, key=lambda r: r.last_step)
        # One token at least is to be computed: of a prompt that was kept whole a lookup in whole units may
        # find no more than the GPU's own prefix cache has.
        kept = (over[at] for at in range(end - 1, -1, -1))
        by = next((one for one in kept if row.local < (one.taken or 0) < request.prompt), None)
        if by is not None:
            found.append((row, by, by.taken or 0))
    return found


def _kept(case: Case, key: tuple[int, int], known: bool) -> list[CaseRequest]:
    """The requests of an (engine, digest) of which something was kept, in the order in which they ended.

    Args:
        known: the connector itself says that they are stored; else they were seen leaving the process.
    """
    kept = [
        r for r in case.alike(*key) if r.taken and (known or (r.grade or Grade.DECLARED) >= Grade.WRITTEN)
    ]
    return sorted(kept, key=lambda r: r.last_step)


def _unfound(case: Case, never: list[tuple[LoadOf, CaseRequest, int]]) -> Finding:
    first, by, kept = never[0]
    tokens = float(sum(kept - row.local for row, _, kept in never))
    asked = [row for row in case.run.load_rows if row.answer is not None]
    shared = [row for row in asked if row.shared and not row.answer]
    repeated = [row for row, _, _ in never if not case.requests[row.request].saved]
    evidence = [
        f"step {first.step & STEP_MASK}: {count(kept)} of these {count(first.prompt)} tokens had "
        f"been saved for {by.id}, and the lookup answered 0",
        f"no lookup of this run ever found anything ({plural(len(asked), 'lookup')}, {count(len(shared))} of "
        "prompts that begin like an earlier one)",
    ]
    if repeated:
        evidence.append(
            f"{plural(len(repeated), 'request')} with the same tokens got no store again: what stores knows "
            "them, and what looks up does not"
        )
    found = [(row, by.id, kept) for row, by, kept in never]
    rows = [row for row, _, _ in never]
    alike = _remainder(case, rows)
    one_more = alike is not None and alike[1] == 1  # than whole blocks
    return _finding(
        case,
        found,
        of_all(len(never), len(never), "lookup"),
        tokens,
        {
            "tokens": tokens,
            "requests": len(never),
            "grade": min((by.grade for _, by, _ in never if by.grade is not None), default=None),
            "evidence": evidence + (_alignment(alike, rows) if one_more else []),
            # No key was compared: the lookup may as well find the entry and decline it.
            "remedy": [
                *([_ROUND] if one_more else []),
                loads.NEVER_FOUND,
                _look_at_the_answer(case, found),
                CAUSE.remedy,
            ],
            "headline": "what was saved is never found by a lookup",
        },
    )


_ALIKE_IN_EACH = (
    "If the store is meant to be shared, or to outlive its engine: make names that each process makes alike "
    "(hashlib over the tokens; not hash(), which of a text differs by process; no process number, no random "
    "or engine's id, in directories neither), and have an engine that starts read what lies there."
)
_BLOCK_HASHES = (
    "Up to vLLM 0.28, or with a hash other than sha256, set PYTHONHASHSEED where keys build on vLLM's block "
    "hashes."
)


def _of_other_engines(case: Case, missed: list[loads.KeptBefore]) -> Finding:
    """A choice to confirm: each engine may be meant to keep to itself."""
    tokens = sum(one.tokens - one.row.local for one in missed)
    rows = [one.row for one in missed]
    lookups = of_all(len(missed), len(loads.missed_elsewhere(case)), "lookup")
    stored_again = sum(case.requests[row.request].saved > 0 for row in rows)
    evidence = [
        f"both write at or below {one.place}: {one.by.id} had saved {count(one.tokens)} tokens and was "
        f"over; the lookup of {one.row.id}, which begins alike, answered 0"
        for one in missed[:1]
    ]
    if stored_again:
        evidence.append(f"stored again: {of_all(stored_again, len(missed), 'such prompt')}")
    return loads.finding(
        case,
        CAUSE,
        f"{_connectors(case, [(row, '', 0) for row in rows])} does not find what another engine saved at "
        f"the same place: {lookups} of prompts that begin alike answered 0 ({plural(tokens, 'token')} "
        "computed again). Is each engine meant to keep to itself?",
        severity=LIMIT,
        tokens=float(tokens),
        requests=len(missed),
        grade=min((one.by.grade for one in missed if one.by.grade is not None), default=None),
        evidence=evidence,
        events=[
            Event(one.row.id, one.row.step, f"{count(one.tokens)} tokens saved by {one.by.id}; lookup 0")
            for one in missed[:3]
        ],
        remedy=[*settings.set_alike(settings.differing(case, missed)), _ALIKE_IN_EACH, _BLOCK_HASHES],
        headline="what another engine saved at the same place is not found",
    )


def _remainder(case: Case, rows: list[LoadOf]) -> tuple[int, int] | None:
    """(block, remainder) where all prompts have the same length within a block."""
    requests = [case.requests[row.request] for row in rows]
    found = {(request.block, request.prompt % request.block) for request in requests if request.block > 0}
    return found.pop() if len(found) == 1 else None


def _alignment(alike: tuple[int, int] | None, rows: list[LoadOf]) -> list[str]:
    if alike is None:
        return []
    block, rest = alike
    if rest == 1 and all(row.saved_before == row.prompt - 1 for row in rows):
        row = rows[0]
        return [
            f"all these prompts are one token longer than whole blocks of {block}: the store rounds "
            f"{count(row.prompt)} tokens to {count(row.saved_before)}, floor((n - 1) / {block}) x {block}; "
            f"a lookup that subtracts one more token first, as floor((n - 2) / {block}) x {block}, asks "
            f"for {count((row.prompt - 2) // block * block)} tokens"
        ]
    return [f"all these prompts leave {plural(rest, 'token')} in their last block of {block}"]
