"""lookup-miss: asked, and nothing was there. A finding only where something could be expected."""

from __future__ import annotations

from collections.abc import Mapping

from kvtrace.causes.diagnosis import Finding
from kvtrace.causes.evidence import loads, settings, transfers
from kvtrace.causes.rule import LIMIT, LOADS, NOTE, Case, Cause, LoadEnd, Results
from kvtrace.ledger.loads.outcome import LoadOf
from kvtrace.words import count, of_all, plural

_PREFIXES = (
    "A prefix that two prompts share is found only in whole units of the connector, and not at all where it "
    "keys whole prompts (ExampleConnector)."
)
CAUSE = Cause(
    id="lookup-miss",
    severity=NOTE,
    ledger=LOADS,
    meaning=(
        "Asked, and nothing was there, where a hit could be expected: the prompt begins like an earlier "
        "one of this run, or the engine is a kv_consumer. A new prompt is not a finding. A choice to confirm "
        "where the prompt, or its beginning, had been saved by a request that was over: dropped, or not "
        "found."
    ),
    seen_as="A lookup that was answered with 0, and no earlier save of this run that surely covers it.",
    remedy=f"See what was saved: what was not saved can't be loaded. {_PREFIXES}",
    load_ends=(LoadEnd.MISSED,),
)


def rule(case: Case) -> Results:
    asked = [
        row for row in case.run.load_rows if row.answer is not None and case.engines[row.engine].looks_up
    ]
    if not asked:
        return
    missed = [row for row in asked if _nothing(row)]
    found = sum((row.answer or 0) > 0 for row in asked)
    # Where a consumer finds some prompts, the others are taken to be new.
    consumers = [] if found else [row for row in missed if _role(case, row) == "kv_consumer"]
    expected = {row.request for row in consumers}
    alike = [row for row in missed if row.shared > row.local and row.request not in expected]
    due = [row for row in alike if loads.due(case, row)]
    if elsewhere := [one for row in consumers if (one := loads.kept_elsewhere(case, row))]:
        yield _found_nothing_of_others(case, asked, elsewhere)
    elif consumers or (due and not _nothing_to_find(case, due)):
        yield _found_nothing(case, asked, consumers, due, alike)
    elif less := _less(case, asked):
        yield _found_less(case, asked, less)
    elif alike and not _nothing_to_find(case, alike):
        yield _found_nothing(case, asked, consumers, due, alike)
    elif not loads.missed_elsewhere(case):
        new = [row for row in missed if row.shared <= row.local]
        yield CAUSE.ruled_out(_what_was_found(case, asked, new, found))


def _nothing_to_find(case: Case, missed: list[LoadOf]) -> bool:
    """Whether these lookups are of engines of which no token is known, or said, to be saved, and all are
    known: why nothing is found is why nothing was saved."""
    engines = {row.engine for row in missed}
    unseen = any(request.unseen for tag in engines for request in case.of_engine(tag))
    return not unseen and engines.isdisjoint(case.seen_saves | case.declared_saves)


def _found_nothing(
    case: Case, asked: list[LoadOf], consumers: list[LoadOf], due: list[LoadOf], alike: list[LoadOf]
) -> Finding:
    """``consumers``: lookups of those that only load; ``alike``: those of prompts that begin like earlier
    ones, and of these ``due``: where that is a whole unit, or more."""
    before = {row.request: one for row in due if (one := loads.kept_by_then(case, row))}
    repeated = [row for row in due if row.request in before] or due or ([] if consumers else alike)
    within, evidence, unasked = "of prompts that begin like an earlier one", _repeated(due, before), ""
    if not due and not consumers:
        longest = max(alike, key=lambda row: row.shared)
        what, size = loads.whole_size(case, longest)
        within, evidence = f"that had no whole {what} to find", [_WITHIN.format(longest.shared, what, size)]
    elif before and not consumers:
        within = "after an earlier save of their tokens"
    if consumers:
        within = "where a hit could be expected"
        unasked = transfers.not_asked(case, case.engines[consumers[0].engine], [one.id for one in consumers])
        evidence = [
            f"this engine is a kv_consumer: {of_all(len(consumers), len(asked), 'lookup')} found nothing "
            "that another engine had stored",
            *([unasked] if unasked else []),
            *evidence,
        ]
    wanting = consumers + repeated
    common = {row.request: row.shared for row in repeated}
    common |= {row.request: loads.findable(case, row, row.shared) for row in due}
    common |= {request: one.tokens for request, one in before.items()}
    tokens = float(sum(common[row.request] - row.local for row in repeated)) + sum(
        row.prompt - row.local for row in consumers
    )
    seen, taken = loads.sent_alone(case, (one.by for one in before.values()))
    never = bool(before) and not any((row.answer or 0) > 0 for row in asked)
    return loads.finding(
        case,
        CAUSE,
        f"Nothing was found by {of_all(len(wanting), len(asked), 'lookup')} {within} "
        f"({plural(tokens, 'token')}).{' Is that meant?' if before else ''}",
        wanting,
        severity=LIMIT if before else NOTE,
        tokens=tokens,
        evidence=[*loads.what_misses(case, {row.engine for row in due}).values(), *evidence, *seen],
        remedy=[
            *taken,
            *([transfers.REMEDY] if unasked else []),
            *([loads.NEVER_FOUND] if never else []),
            *([_SAVED, _PREFIXES] if before else [CAUSE.remedy]),
        ],
        headline="the lookups found nothing in the store",
    )


def _found_nothing_of_others(case: Case, asked: list[LoadOf], elsewhere: list[loads.KeptBefore]) -> Finding:
    """A consumer's lookups of prompts that another engine had saved. Whether they share a store is asked."""
    engine = case.engines[elsewhere[0].row.engine]
    unasked = transfers.not_asked(case, engine, [one.row.id for one in elsewhere])
    return loads.of_another_engine(
        case,
        CAUSE,
        f"This kv_consumer found nothing of what another engine had saved: "
        f"{of_all(len(elsewhere), len(asked), 'lookup')} of prompts that begin alike answered 0. "
        "Do both use one store?",
        elsewhere,
        evidence=[unasked] if unasked else [],
        remedy=[
            *([transfers.REMEDY] if unasked else []),
            *settings.set_alike(settings.differing(case, elsewhere)),
            _ONE_STORE,
            CAUSE.remedy,
        ],
        headline="the lookups found nothing of what another engine had saved",
    )


_ONE_STORE = (
    "See that both engines are given one store (its path or address in kv_connector_extra_config, no memory "
    "of one process), the same unit, model and dtype, and names that each process makes alike."
)


def _less(case: Case, asked: list[LoadOf]) -> list[loads.KeptBefore]:
    """Lookups that found a part of what had been kept of their tokens."""
    known = (loads.kept_by_then(case, row) for row in asked if (row.answer or 0) > 0)
    return [one for one in known if one is not None]


def _found_less(case: Case, asked: list[LoadOf], less: list[loads.KeptBefore]) -> Finding:
    tokens = sum(one.tokens - one.row.local - one.row.offered for one in less)
    first = less[0]
    return loads.finding(
        case,
        CAUSE,
        f"Less was found than had been saved by {of_all(len(less), len(asked), 'lookup')} "
        f"({plural(tokens, 'token')}). Is that meant?",
        [one.row for one in less],
        severity=LIMIT,
        tokens=float(tokens),
        evidence=[
            f"{first.row.id}: {plural(first.row.offered, 'token')} offered behind {count(first.row.local)} "
            f"that the GPU has, of {count(first.tokens)} that had been saved for {first.by.id}"
        ],
        remedy=[_LESS],
        headline="the lookups found less than had been saved",
    )


_LESS = (
    "See where get_num_new_matched_tokens ends: at the first unit that is not found, at a limit, or too "
    "early; what it leaves out is computed again."
)
_WITHIN = (
    "up to {} tokens are alike: behind those that the GPU has, and before a prompt's last token, they hold "
    "no whole {} of {} tokens"
)
_SAVED = (
    "See what it drops, and what get_num_new_matched_tokens declines: what was dropped or has expired, lies "
    "under another name than is asked for, is not written yet or is too little to load is not found."
)


def _role(case: Case, row: LoadOf) -> str:
    return case.engines[row.engine].role or ""


def _nothing(row: LoadOf) -> bool:
    """Nothing was there; a prompt that was saved before, and is not found, is another matter."""
    return row.answer == 0 and row.local < row.prompt and not row.ends.get(LoadEnd.MISSED_SAVED)


def _what_was_found(case: Case, asked: list[LoadOf], new: list[LoadOf], found: int) -> str:
    text = f"{plural(found, 'hit')} in {plural(len(asked), 'lookup')}"
    older = 0 if found else sum(place.older for place in case.run.places)
    text += f", though its store holds {plural(older, 'file')} from before this run" if older else ""
    text += f"; {plural(len(new), 'prompt')} like no earlier one of this run" if new else ""
    return text


def _repeated(repeated: list[LoadOf], before: Mapping[int, loads.KeptBefore]) -> list[str]:
    """What is known of prompts that begin like an earlier one."""
    evidence = []
    fresh = [row for row in repeated if row.request not in before]
    if fresh:
        longest = max(row.shared for row in fresh)
        evidence.append(
            f"{plural(len(fresh), 'prompt')} like an earlier one (up to {count(longest)} tokens), and no "
            "save that was over by then is known to hold them"
        )
    if before:
        most = max(before.values(), key=lambda one: one.tokens)
        evidence.append(
            f"{plural(len(before), 'prompt')} like an earlier one that was over by then: {most.row.id} in "
            f"{count(most.tokens)} tokens like {most.by.id}"
        )
    return evidence
