"""key-mismatch: saved a moment ago, asked for with the same tokens, and not found."""

from __future__ import annotations

from kvtrace.causes.case import CaseRequest
from kvtrace.causes.diagnosis import Fields, Finding
from kvtrace.causes.evidence import loads, settings, sizes
from kvtrace.causes.evidence.logs import caught_where_it_saves
from kvtrace.causes.rule import FAULT, LIMIT, LOADS, Case, Cause, LoadEnd, Results
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
        "written, looks the same from here. If it is, use one function for both keys, over all that is in "
        "them (tokens, cache_salt, LoRA, images). Up to vLLM 0.28, or with a hash other than sha256, set "
        "PYTHONHASHSEED where keys build on vLLM's block hashes."
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
    at_once = [row for row in lost if row.others_between == 0]
    first = (at_once or lost)[0]
    by = case.requests[first.saved_by]
    longer = any(row.prompt % max(1, case.engines[row.engine].block_size) == 1 for row in hits)
    one_more = [] if longer else _one_more(case, lost)  # else others of that length are found
    evidence = [
        f"step {first.step & STEP_MASK}: {_DID.get(by.grade, '{} had saved').format(by.id)} "
        f"{count(first.saved_before)} of these {count(first.prompt)} tokens in every layer, and the lookup "
        f"answered 0; nothing else was saved in between in {of_all(len(at_once), len(lost), 'such lookup')}",
        *one_more,
    ]
    yield _finding(
        case,
        lost,
        [case.requests[row.saved_by] for row in lost],
        of_all(len(lost), len(repeated), "lookup"),
        {
            "tokens": loads.tokens(case, lost, CAUSE),
            "evidence": evidence,
            "remedy": [*([_ROUND] if one_more else []), CAUSE.remedy],
            "headline": "an earlier save is not found by the lookup",
        },
        declines=bool(hits) and not one_more,
    )


_DID = {
    None: "the metadata of {} had named",
    Grade.DECLARED: "the metadata of {} had named",
    Grade.READ: "a save of {} had read",
}
"""What an earlier save is known to have done, where no more of it was seen."""
_ROUND = (
    "Round the lookup as the store does. All these prompts are one token longer than whole blocks: where it "
    "subtracts one more token first, it asks for a block less."
)


def _found_whole(case: Case, row: LoadOf) -> bool:
    return row.local + row.offered >= loads.findable(case, row, row.saved_before)


def _finding(
    case: Case,
    found: list[LoadOf],
    savers: list[CaseRequest],
    lookups: str,
    given: Fields,
    declines: bool = False,
) -> Finding:
    """``found``: lookups of what had been saved, by ``savers``. ``lookups``: how many of them. ``declines``:
    the keys of other prompts do match: it may decline what it finds, as where few are to load at a time."""
    caught = caught_where_it_saves(case)
    gone = [sizes.removed_in_words(one) for one in sizes.removed(case)]
    apart = loads.what_misses(case, {row.engine for row in found})
    # An index that an exception kept from being written answers as another key does.
    first = ["First look at the exception that is caught where it saves: see the evidence."] if caught else []
    seen, taken = loads.sent_alone(case, savers)
    does = "does not offer" if declines else "does not find"
    title = (
        f"{_connectors(case, found)} {does} an earlier save: {lookups} of prompts with the same tokens "
        f"answered 0 ({plural(given['tokens'], 'token')} computed again)."
    )
    if declines:
        taken.append(_look_at_the_answer(case, found))
    values: Fields = {
        **given,
        "severity": LIMIT if gone or declines else FAULT,
        "evidence": [*apart.values(), *given["evidence"], *seen, *gone, *caught],
        "remedy": first + taken + given["remedy"],
    }
    if gone:
        title += " The connector removes what it stored: is that meant?"
    elif declines:
        kept = "" if all(map(_left, savers)) else "was this one kept, or "
        title += f" It finds others: {kept}does it decline some of what it finds?"
    return loads.finding(case, CAUSE, title, found, **values)


def _look_at_the_answer(case: Case, found: list[LoadOf]) -> str:
    return (
        f"Look at what get_num_new_matched_tokens of {_connectors(case, found)} finds of such a prompt, and "
        "at all that makes it answer 0 nevertheless; its own log may say which."
    )


def _connectors(case: Case, found: list[LoadOf]) -> str:
    return listed(c.cls for row in found if (c := case.engines[row.engine].connector))


def _never_found(case: Case) -> list[loads.KeptBefore]:
    """Lookups that found nothing of a prompt that the run had kept, in engines in which no lookup ever found
    anything.

    Only where the save was surely done: it was seen leaving the process, or the connector itself does not
    store the same tokens again.
    """
    hits = {row.engine for row in case.run.load_rows if (row.answer or 0) > 0}
    held = case.assigned.get("already-stored")
    parents = {connector.parent for connector in case.run.connectors}
    found = []
    for row in case.run.load_rows:
        request, engine = case.requests[row.request], case.engines[row.engine]
        if row.engine in hits or row.answer != 0 or not engine.looks_up or not request.digest:
            continue
        if engine.connector is not None and engine.connector.ordinal in parents:
            continue  # of several connectors in one the one that stores need not be one that looks up
        known = held is not None and row.request in held.requests and not request.saved
        one = loads.kept_by_then(case, row)
        # Where whole prompts are keyed, one that begins alike is another one.
        if one and one.by.digest == request.digest and (known or _left(one.by)):
            found.append(one)
    return found


def _left(request: CaseRequest) -> bool:
    """Whether all that was saved of it was seen leaving the process."""
    return (request.grade or Grade.DECLARED) >= Grade.WRITTEN


def _unfound(case: Case, never: list[loads.KeptBefore]) -> Finding:
    first = never[0]
    asked = sum(row.answer is not None for row in case.run.load_rows)
    again = sum(not case.requests[one.row.request].saved for one in never)
    rows = [one.row for one in never]
    one_more = _one_more(case, rows)
    return _finding(
        case,
        rows,
        [one.by for one in never],
        of_all(len(never), len(never), "lookup"),
        {
            "tokens": float(sum(one.tokens - one.row.local for one in never)),
            "grade": min((one.by.grade for one in never if one.by.grade is not None), default=None),
            "evidence": [
                f"step {first.row.step & STEP_MASK}: {count(first.tokens)} of these "
                f"{count(first.row.prompt)} tokens had been saved for {first.by.id}; the lookup answered 0",
                f"no lookup of this run ever found anything ({plural(asked, 'lookup')}); "
                f"{plural(again, 'request')} with the same tokens got no store again",
                *one_more,
            ],
            # No key was compared: the lookup may as well find the entry and decline it.
            "remedy": [
                *([_ROUND] if one_more else []),
                loads.NEVER_FOUND,
                _look_at_the_answer(case, rows),
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
    rows = [one.row for one in missed]
    lookups = of_all(len(missed), len(loads.missed_elsewhere(case)), "lookup")
    return loads.of_another_engine(
        case,
        CAUSE,
        f"{_connectors(case, rows)} does not find what another engine saved at the same place: {lookups} of "
        "prompts that begin alike answered 0. Is each engine meant to keep to itself?",
        missed,
        remedy=[*settings.set_alike(settings.differing(case, missed)), _ALIKE_IN_EACH, _BLOCK_HASHES],
        headline="what another engine saved at the same place is not found",
    )


def _one_more(case: Case, rows: list[LoadOf]) -> list[str]:
    """Says so where all prompts are one token longer than whole blocks, and the store rounds prompt - 1."""
    blocks = {case.requests[row.request].block for row in rows}
    size = blocks.pop() if len(blocks) == 1 else 0
    if not size or any(row.prompt % size != 1 or row.saved_before not in (0, row.prompt - 1) for row in rows):
        return []
    return [
        f"all these prompts are one token longer than whole blocks of {size}: the store keeps "
        f"floor((n - 1) / {size}) x {size} of n tokens, all but one; a lookup that subtracts one more token "
        "first asks for a block less"
    ]
