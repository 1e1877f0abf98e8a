"""exception-swallowed: the connector caught its own exception in a hook, and went on."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from kvtrace.causes.case import CaseRequest
from kvtrace.causes.diagnosis import Finding
from kvtrace.causes.evidence.accounted import all_accounted, all_written
from kvtrace.causes.evidence.logs import exception_line, logs_in, place
from kvtrace.causes.rule import (
    FAULT,
    LIMIT,
    NOTE,
    SAVES,
    Case,
    Cause,
    Event,
    Interval,
    LostSpan,
    Results,
    SaveEnd,
    Stage,
    Turn,
)
from kvtrace.causes.rules import stored_nothing
from kvtrace.ledger.reported import ALL_SAID, BACKGROUND, SAVE_HOOKS, ended_its_work, may_end_a_save
from kvtrace.ledger.run import Swallowed
from kvtrace.terms import NOT_OBSERVED, SAVED, Grade
from kvtrace.trace.facts import Limit
from kvtrace.words import count, listed, plural

CAUSE = Cause(
    id="exception-swallowed",
    stage=Stage.HOOK,
    severity=FAULT,
    ledger=SAVES,
    meaning=(
        "The connector caught an exception inside its hook and went on: every hook fires, and less is "
        "stored, or nothing."
    ),
    seen_as=(
        "Exceptions raised and handled inside the connector's frames in watched calls, where such calls "
        "read fewer slots than their metadata names (of exceptions that ordinary control flow raises only "
        "those that a handler for any exception took, as often as calls lost slots). Or such an exception "
        "ended a piece of work that saves, in a hook or in the background, and nothing shows that what was "
        "read for it came to rest; where no token was seen to be saved, as often as there were requests. "
        "That a file is there or not is how code finds out what is; it counts where nobody caught it, and "
        "it ended the work, or all files that were opened to write were not there afterwards. A choice "
        "where the call may have tried once more: what is put into memory is not seen. A note where the same "
        "call went on, or all tokens are accounted for."
    ),
    remedy="Fix the connector where it catches the exception; the evidence names the place.",
    save_ends=(SaveEnd.CAUGHT,),
)
_SAVE_PATH = (*SAVE_HOOKS, "get_finished")
_FINDS_OUT = frozenset({"FileExistsError", "FileNotFoundError"})
"""By these code finds out whether something is there, where it catches them; but for files that it opens to
write."""
_ENDS_A_LOOP = frozenset(
    {"Empty", "QueueEmpty", "StopIteration", "StopAsyncIteration", "CancelledError", "GeneratorExit"}
)
"""By these loops of threads and tasks end or wait."""
_UNHEARD = frozenset({Limit.EXCEPTIONS, Limit.STEPS, Limit.THREAD, Limit.PROCESS})
"""Where exceptions that are caught may not be seen."""
_SCHEDULE_HOOKS = ("build_connector_meta", "update_state_after_alloc", "request_finished")


def claim(case: Case, span: LostSpan, unclaimed: list[Interval]) -> list[Interval]:
    """Positions without a store entry whose metadata was built in a call that caught an exception."""
    if not span.step:
        return []
    at = {
        step
        for fact in case.run.swallowed
        if fact.hook == "build_connector_meta" and not fact.harmless
        for step, _ in fact.places
    }
    return unclaimed if span.step in at else []


def claim_read(case: Case, span: LostSpan, unclaimed: list[Interval]) -> list[Interval]:
    """Positions that were read and are not whole at rest, or in nothing that left, of steps in which an
    exception ended work that saves."""
    if span.ended not in (SaveEnd.NOT_AT_REST, SaveEnd.NOTHING_READ):
        return []
    entries = case.requests[span.request].entries
    steps = {span.step, *(entry.step for entry in entries if entry.slots > 0)}
    for fact in case.run.swallowed:
        at = {step for step, _ in fact.places}
        if _ends_a_save(case, fact) and (steps & at or 0 in at or _goes_on(fact, max(steps))):
            return unclaimed
    return []


def _goes_on(fact: Swallowed, step: int) -> bool:
    """Whether it came so often that of later calls it is not known which they were, and the last of those
    that are known was before the end of a step."""
    return len(fact.places) >= ALL_SAID and fact.places[ALL_SAID - 1][0] <= step


def claim_idle(case: Case, span: LostSpan, unclaimed: list[Interval]) -> list[Interval]:
    """Positions of steps whose metadata says nothing readable, in which nothing was read and a save hook
    caught an exception."""
    steps = set(stored_nothing.idle_steps(case, span))
    for fact in case.run.swallowed:
        ended = fact.hook in SAVE_HOOKS and not fact.went_on and not fact.harmless
        if ended and steps & {step for step, _ in fact.places}:
            return unclaimed
    return []


CLAIMS = {Turn.STEP: claim, Turn.WORKER: claim_idle, Turn.READ: claim_read}


def _all_heard(case: Case) -> bool:
    """Whether no exception that was caught can have been missed, and none lost anything."""
    return all_written(case) and not any(one.kind in _UNHEARD for one in case.run.watch_limits)


def rule(case: Case) -> Results:
    facts = [
        fact
        for fact in case.run.swallowed
        if not fact.harmless
        or fact.logged
        or fact.in_vain
        or fact.ended
        or (fact.type not in _FINDS_OUT and fact.went_on is False)
    ]
    facts.sort(key=lambda fact: (fact.hook not in SAVE_HOOKS, -fact.count))
    trust = case.run.trust
    watched = trust.measured + trust.blind
    telling = [fact for fact in facts if not fact.broad]
    if case.affected(CAUSE):
        in_hooks = [f for f in facts if f.hook in (*SAVE_HOOKS, *_SCHEDULE_HOOKS)]
        yield _lost_tokens(case, in_hooks or facts or case.run.swallowed)
    elif telling:
        lost = [fact for fact in telling if _lost_work(case, fact)]
        other = not lost or "store-failed" in case.assigned
        yield _caught(case, telling) if other else _unsaved(case, lost)
    elif watched and not (facts or case.run.swallowed) and watched == trust.calls and _all_heard(case):
        yield CAUSE.ruled_out(f"no exception was raised and caught in all {plural(watched, 'store call')}")
    elif watched and not facts:
        yield CAUSE.not_observed(
            f"{count(watched)} of {plural(trust.calls, 'store call')} were watched: no save is known to be "
            "lost by an exception in these"
        )


def _lost_tokens(case: Case, facts: Sequence[Swallowed]) -> Finding:
    """Tokens were lost in calls that caught these exceptions."""
    first, types = facts[0], listed(dict.fromkeys(f.type for f in facts))
    return case.finding(
        CAUSE,
        f"The connector catches {types} in {place(first.hook)} and goes on: "
        f"{plural(len(case.affected(CAUSE)), 'request')} lost tokens.",
        evidence=_evidence(case, facts, (*SAVE_HOOKS, *_SCHEDULE_HOOKS)),
        events=_events(facts) or case.events(CAUSE),
        headline=f"the connector catches {first.type} in {place(first.hook)} and goes on",
        remedy=[f"fix the connector at {first.where}, and let no lookup promise what was lost so"],
    )


def _evidence(case: Case, facts: Sequence[Swallowed], hooks: Iterable[str]) -> list[str]:
    """``hooks``: those whose log lines are quoted."""
    # the message of an exception has a path only as far as the configuration names it
    made = [f"no file that it opened to write was made: in {os.path.dirname(fact.in_vain)}, for one"
            for fact in facts[:1] if fact.in_vain]  # fmt: skip
    return [*map(exception_line, facts[:3]), *made, *logs_in(case, hooks)]


def _events(facts: Sequence[Swallowed]) -> list[Event]:
    return [
        Event("", step, f"{fact.type} caught in {place(fact.hook)}", layer=layer or None)
        for fact in facts[:3]
        for step, layer in fact.places[:1]
    ]


def _lost_work(case: Case, fact: Swallowed) -> bool:
    """Whether an exception ended work that saves, and nothing shows that it came to rest all the same."""
    whose = _concerned(case, [fact])
    return bool(whose) and (
        _ends_a_save(case, fact) or (may_end_a_save(fact) and any(r.caught for r in whose))
    )


def _ends_a_save(case: Case, fact: Swallowed) -> bool:
    """Whether an exception ended a piece of work that saves."""
    saving = (fact.asked_by or SAVE_HOOKS[0]) if fact.hook in BACKGROUND else fact.hook
    if saving not in _SAVE_PATH or fact.went_on or fact.broad:
        return False
    if fact.type in _FINDS_OUT and not (fact.ended or fact.far):
        return bool(fact.in_vain)
    # What is put into memory is not seen: its call may have gone on with that.
    if fact.ended or (fact.went_on is False and any(one.went for one in case.run.outside)):
        return fact.type not in _ENDS_A_LOOP
    # It is not known whether the work went on: no KV was touched in it, before or after.
    return ended_its_work(fact)


def _concerned(case: Case, facts: Sequence[Swallowed]) -> list[CaseRequest]:
    """Requests that were offered in the steps of these exceptions, of which a part was read and is not seen
    at rest; of all steps where a step is not known."""
    steps = {step for fact in facts for step, _ in fact.places}
    return [
        request
        for request in case.requests
        if _in_doubt(case, request)
        and (0 in steps or any(entry.step in steps and entry.slots > 0 for entry in request.entries))
    ]


def _in_doubt(case: Case, request: CaseRequest) -> int:
    """Tokens of it that were read and are not seen at rest."""
    read = request.grade is not None and request.grade < Grade.WRITTEN
    whole = case.of_request(request)
    return (whole.saved if read else 0) + whole.caught


def _unsaved(case: Case, facts: Sequence[Swallowed]) -> Finding:
    """Work that saves ended in these exceptions: what was read for it came to rest nowhere that is seen."""
    first, whose = facts[0], _concerned(case, facts)
    tokens = sum(_in_doubt(case, r) for r in whose)
    where = place(first.hook) + (f", in work of {first.asked_by}" if first.asked_by else "")
    ended = "ended the work" if first.ended else "was caught"
    known = any(_ends_a_save(case, fact) or ended_its_work(fact) for fact in facts)
    return case.finding(
        CAUSE,
        f"{first.type} {ended} in {where}: nothing shows that {plural(tokens, 'token')} of "
        f"{plural(len(whose), 'request')}, which were to be saved in these steps, came to rest."
        + ("" if known else " Was it tried once more?"),
        evidence=_evidence(case, facts, {fact.hook for fact in facts}),
        events=_events(facts),
        severity=FAULT if known else LIMIT,
        tokens=tokens,
        requests=len(whose),
        grade=Grade.READ,
        headline=f"{first.type} {ended} where the connector saves",
        remedy=[f"look at {first.where}, and let the save be reported as failed"],
    )


def _caught(case: Case, facts: Sequence[Swallowed]) -> Finding:
    """Exceptions were caught, and no token is known to be lost by them."""
    open_ends = not all_accounted(case)
    loud = [f for f in facts if open_ends and f.logged and f.hook in SAVE_HOOKS]
    loud += [fact for fact in _where_nothing_is_seen(case, facts) if fact not in loud]
    shown = loud or facts
    cost = "what it saved then was not seen" if loud else "no save is known to be lost by it alone"
    return case.finding(
        CAUSE,
        f"The connector caught {listed(dict.fromkeys(f.type for f in shown))} in "
        f"{listed(dict.fromkeys(place(f.hook) for f in shown))}; {cost}.",
        evidence=_evidence(case, shown, {fact.hook for fact in shown}),
        events=_events(shown),
        severity=FAULT if loud else NOTE,
        remedy=[f"look at {shown[0].where}"],
        headline=f"the connector catches {shown[0].type}" if loud else "",
    )


def _where_nothing_is_seen(case: Case, facts: Sequence[Swallowed]) -> list[Swallowed]:
    """Where no token was seen to be saved, those that came about as often as there were requests: logged ones
    of the connector's own threads, and those that ended work that saves. Once in a while is no sign of lost
    saves."""
    base = case.run.base
    unseen = len({one.request for one in base if one.outcome == NOT_OBSERVED})
    if not unseen or case.run.trust.agreed:
        return []
    nothing = not any(one.outcome == SAVED for one in base)
    return [
        fact
        for fact in facts
        if fact.count * 2 >= unseen
        and ((fact.hook == "thread" and fact.logged) or (nothing and _ends_a_save(case, fact)))
    ]
