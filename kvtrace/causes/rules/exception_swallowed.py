"""exception-swallowed: the connector caught its own exception in a hook, and went on."""

from __future__ import annotations

from collections.abc import Sequence

from kvtrace.causes.evidence.hooks import SAVE_HOOKS
from kvtrace.causes.evidence.logs import exception_line, logs_in, place
from kvtrace.causes.model import Finding
from kvtrace.causes.rule import (
    FAULT,
    NOTE,
    SAVES,
    Case,
    Cause,
    Event,
    Interval,
    Piece,
    Results,
    SaveEnd,
    Stage,
    Turn,
)
from kvtrace.ledger.model import Swallowed
from kvtrace.ledger.reported import HARMLESS
from kvtrace.terms import NOT_OBSERVED
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
        "read fewer slots than their metadata names (a note where they read all)."
    ),
    remedy="Fix the connector at the place named here.",
    save_ends=(SaveEnd.CAUGHT,),
)
_SCHEDULE_HOOKS = ("build_connector_meta", "update_state_after_alloc", "request_finished")


def claim(case: Case, piece: Piece, left: list[Interval]) -> list[Interval]:
    """Positions without a store entry whose metadata was built in a call that caught an exception."""
    if not piece.step:
        return []
    at = {
        step
        for fact in case.run.swallowed
        if fact.hook == "build_connector_meta" and fact.type not in HARMLESS
        for step, _ in fact.places
    }
    return left if piece.step in at else []


CLAIMS = {Turn.STEP: claim}


def rule(case: Case) -> Results:
    facts = [fact for fact in case.run.swallowed if fact.type not in HARMLESS or fact.logged]
    facts.sort(key=lambda fact: (fact.hook not in SAVE_HOOKS, -fact.count))
    trust = case.run.trust
    watched = trust.measured + trust.blind
    if case.affected(CAUSE):
        in_hooks = [f for f in facts if f.hook in (*SAVE_HOOKS, *_SCHEDULE_HOOKS)]
        yield _lost_tokens(case, in_hooks or facts or case.run.swallowed)
    elif facts:
        yield _caught(case, facts)
    elif watched:
        yield CAUSE.ruled_out(
            f"no exception was raised and caught in {plural(watched, 'watched store call')}"
        )


def _lost_tokens(case: Case, facts: Sequence[Swallowed]) -> Finding:
    """Tokens were lost in calls that caught these exceptions."""
    first, trust = facts[0], case.run.trust
    evidence = [exception_line(fact) for fact in facts[:3]]
    did = [
        f"{count(n)} {what}"
        for n, what in (
            (trust.nothing, "read 0 slots of the KV tensor"),
            (trust.short, "read fewer slots than the metadata names"),
            (trust.unwritten, "read the KV and wrote no file"),
        )
        if n
    ]
    if did:
        evidence.append(
            f"of {plural(trust.measured, 'measured store call')} {', '.join(did)}; every hook returned as "
            "if nothing were wrong"
        )
    return case.finding(
        CAUSE,
        f"The connector catches {listed(dict.fromkeys(f.type for f in facts))} in {first.hook} and goes "
        f"on: {plural(len(case.affected(CAUSE)), 'request')} lost tokens.",
        evidence=evidence + logs_in(case, (*SAVE_HOOKS, *_SCHEDULE_HOOKS)),
        events=_events(facts) or case.events(CAUSE),
        headline=f"the connector catches {first.type} in {first.hook} and goes on",
        remedy=[f"fix the connector at {first.where}, and let {first.hook} raise what it can't handle"],
    )


def _caught(case: Case, facts: Sequence[Swallowed]) -> Finding:
    """Exceptions were caught, and no token is known to be lost by them."""
    loud = [f for f in facts if f.logged and f.hook in SAVE_HOOKS and not case.run.trust.caught_agreed]
    loud += _in_threads(case, facts)
    shown = loud or facts
    return case.finding(
        CAUSE,
        f"The connector caught {listed(dict.fromkeys(f.type for f in shown))} in "
        f"{listed(dict.fromkeys(place(f.hook) for f in shown))}; "
        + ("what it saved then could not be measured." if loud else "no save is known to be lost by it."),
        severity=FAULT if loud else NOTE,
        evidence=[exception_line(fact) for fact in shown[:3]] + logs_in(case, {f.hook for f in shown}),
        events=_events(shown),
        remedy=[f"look at {shown[0].where}"],
        headline=f"the connector catches {shown[0].type}" if loud else "",
    )


def _in_threads(case: Case, facts: Sequence[Swallowed]) -> list[Swallowed]:
    """Of the connector's own threads: where no save could be measured, and they caught exceptions about as
    often as there were requests. Once in a while is no sign of lost saves."""
    base = case.run.base
    unseen = base[base["outcome"] == NOT_OBSERVED]["request"].nunique() if len(base) else 0
    if not unseen or case.run.trust.agreed:
        return []
    return [f for f in facts if f.hook == "thread" and f.logged and f.count * 2 >= unseen]


def _events(facts: Sequence[Swallowed]) -> list[Event]:
    return [
        Event("", step, f"{fact.type} caught in {place(fact.hook)}", layer=layer or None)
        for fact in facts[:3]
        for step, layer in fact.places[:1]
    ]
