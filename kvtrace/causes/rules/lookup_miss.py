"""lookup-miss: asked, and nothing was there. A finding only where something could be expected."""

from __future__ import annotations

from collections.abc import Mapping

from kvtrace.causes.diagnosis import Finding
from kvtrace.causes.evidence import loads, settings, transfers, unlike
from kvtrace.causes.rule import LIMIT, LOADS, NOTE, Case, Cause, LoadEnd, Results
from kvtrace.ledger.loads.outcome import LoadOf
from kvtrace.terms import Grade
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
    within, evidence, unasked = "", _repeated(due, before), ""
    if not due and not consumers:
        longest = max(alike, key=lambda row: row.shared)
        what, size = loads.whole_size(case, longest)
        within, evidence = f"that had no whole {what} to find", [_WITHIN.format(longest.shared, what, size)]
    if consumers:
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
    saved = bool(before)
    if saved and not consumers:
        seen = all(map(_is_seen, before.values()))
        within = f"though their tokens had been {'saved' if seen else 'announced for saving'} before"
    meant = " Is that meant?" if saved else ""
    told = loads.what_misses(case, {row.engine for row in due})
    never = saved and not any((row.answer or 0) > 0 for row in asked)
    apart = _apart(case, repeated) if never else []
    return loads.finding(
        case,
        CAUSE,
        f"Nothing was found by {of_all(len(wanting), len(asked), 'lookup')} "
        f"{within or 'where a hit could be expected'} ({plural(tokens, 'token')}).{meant}",
        severity=LIMIT if saved else NOTE,
        tokens=tokens,
        requests=len(wanting),
        evidence=[*told.values(), *apart, *evidence],
        remedy=[
            *([transfers.REMEDY] if unasked else []),
            *([_TWO_PROCESSES] if apart else []),
            *([loads.NEVER_FOUND] if never else []),
            *([_WHOLE] if (unlike.REPEATED, False) in told else []),
            *([_SAVED, _PREFIXES] if saved else [CAUSE.remedy]),
        ],
        events=loads.events(case, wanting, CAUSE),
        headline="the lookups found nothing in the store",
    )


def _found_nothing_of_others(case: Case, asked: list[LoadOf], elsewhere: list[loads.KeptBefore]) -> Finding:
    """A consumer's lookups of prompts that another engine had saved. Whether they share a store is asked."""
    rows, first = [one.row for one in elsewhere], elsewhere[0]
    tokens = sum(one.tokens - one.row.local for one in elsewhere)
    unasked = transfers.not_asked(case, case.engines[rows[0].engine], [one.id for one in rows])
    return loads.finding(
        case,
        CAUSE,
        f"This kv_consumer found nothing of what another engine had saved: "
        f"{of_all(len(rows), len(asked), 'lookup')} of prompts that begin alike answered 0 "
        f"({plural(tokens, 'token')}). Do both use one store?",
        severity=LIMIT,
        tokens=float(tokens),
        requests=len(rows),
        evidence=[
            *([unasked] if unasked else []),
            f"{first.by.id} of another engine had saved {count(first.tokens)} tokens and was over; the "
            f"lookup of {first.row.id}, which begins alike, answered 0",
        ],
        events=loads.events(case, rows, CAUSE),
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


def _is_seen(kept: loads.KeptBefore) -> bool:
    """Whether more than its metadata says that it was saved."""
    return (kept.by.grade or Grade.DECLARED) > Grade.DECLARED


def _less(case: Case, asked: list[LoadOf]) -> list[loads.KeptBefore]:
    """Lookups that found a part of what had been kept of their tokens."""
    known = (loads.kept_by_then(case, row) for row in asked if (row.answer or 0) > 0)
    return [one for one in known if one is not None]


def _found_less(case: Case, asked: list[LoadOf], less: list[loads.KeptBefore]) -> Finding:
    tokens = sum(one.tokens - one.row.local - one.row.offered for one in less)
    rows, first = [one.row for one in less], less[0]
    return loads.finding(
        case,
        CAUSE,
        f"Less was found than had been saved by {of_all(len(less), len(asked), 'lookup')} "
        f"({plural(tokens, 'token')}). Is that meant?",
        severity=LIMIT,
        tokens=float(tokens),
        requests=len(less),
        evidence=[
            f"{first.row.id}: {plural(first.row.offered, 'token')} offered behind {count(first.row.local)} "
            f"that the GPU has, of {count(first.tokens)} that had been saved for {first.by.id}"
        ],
        remedy=[_LESS],
        events=loads.events(case, rows, CAUSE),
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

_WHOLE = (
    "As it seems, a prompt is found only where all of it came before: store each unit under a key of all "
    "tokens up to its end, and ask unit by unit; then a beginning that prompts share is found."
)
_TWO_PROCESSES = (
    "First see that the lookup asks the store that the workers fill, by a name that both make alike: what "
    "lies in one process's memory, or under a name made of a request's id, a process number or a random one, "
    "the other does not find."
)
_SAVED = (
    "See what it drops, and what get_num_new_matched_tokens declines: what was dropped or has expired, lies "
    "under another name than is asked for, is not written yet or is too little to load is not found."
)


def _apart(case: Case, missed: list[LoadOf]) -> list[str]:
    """Where no lookup finds anything, and those who ask and those who save are different processes."""
    engine = case.engines[missed[0].engine]
    saving = [worker for worker in engine.workers if worker.pid != engine.pid]
    if not saving:
        return []
    return [
        f"no lookup of this run found anything: {engine.process} asks (process {engine.pid}), "
        f"{saving[0].process} saves (process {saving[0].pid})"
    ]


def _role(case: Case, row: LoadOf) -> str:
    return case.engines[row.engine].role or ""


def _nothing(row: LoadOf) -> bool:
    """Nothing was there; a prompt that was saved before, and is not found, is another matter."""
    return row.answer == 0 and row.local < row.prompt and not row.ends.get(LoadEnd.MISSED_SAVED)


def _what_was_found(case: Case, asked: list[LoadOf], new: list[LoadOf], found: int) -> str:
    text = f"{plural(found, 'hit')} in {plural(len(asked), 'lookup')}"
    older = 0 if found else sum(place.older for place in case.run.places)
    text += f", though its store holds {plural(older, 'file')} from before this run" if older else ""
    if new:
        rest = "one prompt begins" if len(new) == 1 else f"{count(len(new))} prompts begin"
        text += f"; {rest} like no earlier one of this run"
        text += ", by more than the GPU has" if any(row.local for row in new) else ""
    deeper = sum((row.answer or 0) < 0 for row in asked)
    if deeper:
        text += f"; {plural(deeper, 'lookup')}: the GPU's own prefix cache reaches further than the store"
    return text


def _repeated(repeated: list[LoadOf], before: Mapping[int, loads.KeptBefore]) -> list[str]:
    """What is known of prompts that begin like an earlier one."""
    evidence = []
    kept = [*before.values()]
    fresh = [row for row in repeated if row.request not in before]
    if fresh:
        longest = max(row.shared for row in fresh)
        evidence.append(
            f"{plural(len(fresh), 'prompt')} begin{'s' if len(fresh) == 1 else ''} like an earlier one "
            f"(up to {count(longest)} tokens), and no save that was over by then is known to hold them"
        )
    if kept:
        most = max(kept, key=lambda one: one.tokens)
        evidence.append(
            f"{plural(len(kept), 'prompt')} begin{'s' if len(kept) == 1 else ''} like one that had been "
            f"saved and was over: {most.row.id} in {count(most.tokens)} tokens like {most.by.id}"
        )
    return evidence
