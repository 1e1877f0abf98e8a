"""exception-swallowed: the connector caught its own exception in a hook, and went on."""

from __future__ import annotations

from kvtrace.causes.case import Case, Piece
from kvtrace.causes.cause import SAVES, Cause
from kvtrace.causes.claims import Claim, Turn
from kvtrace.causes.evidence.logs import exception_line, logs_in, place
from kvtrace.causes.model import Event, Results
from kvtrace.ledger.effects import HARMLESS
from kvtrace.ledger.ends import SaveEnd
from kvtrace.ledger.intervals import Interval
from kvtrace.ledger.model import NOT_OBSERVED, Swallowed
from kvtrace.terms import FAULT, NOTE, Stage
from kvtrace.words import count, listed, plural

CAUSE = Cause(
    id="exception-swallowed",
    stage=Stage.HOOK,
    severity=FAULT,
    ledger=SAVES,
    meaning=(
        "The connector raised and caught its own exception inside the hook, and went on: every hook fires, "
        "nothing is stored."
    ),
    seen_as=(
        "Exceptions raised and handled inside the connector's frames in watched calls, where such calls "
        "read fewer slots than their metadata names (a note where they read all)."
    ),
    remedy="Mend the connector at the place named here.",
    save_ends=(SaveEnd.CAUGHT,),
)
_SAVE_HOOKS = ("save_kv_layer", "wait_for_save")
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


CLAIMS: dict[Turn, Claim] = {Turn.STEP: claim}


def rule(case: Case) -> Results:
    facts = [fact for fact in case.run.swallowed if fact.type not in HARMLESS or fact.logged]
    facts.sort(key=lambda fact: (fact.hook not in _SAVE_HOOKS, -fact.count))
    trust = case.run.trust
    if case.affected(CAUSE):
        mine = [f for f in facts if f.hook in (*_SAVE_HOOKS, *_SCHEDULE_HOOKS)] or facts
        mine = mine or case.run.swallowed
        first = mine[0]
        evidence = [exception_line(fact) for fact in mine[:3]]
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
                f"of {plural(trust.measured, 'measured store call')} {', '.join(did)}; every hook returned "
                "as if all were well"
            )
        evidence += logs_in(case, (*_SAVE_HOOKS, *_SCHEDULE_HOOKS))
        yield case.finding(
            CAUSE,
            f"The connector catches its own {listed(dict.fromkeys(f.type for f in mine))} in {first.hook} "
            f"and goes on: {plural(len(case.affected(CAUSE)), 'request')} lost tokens by it.",
            evidence=evidence,
            events=_events(mine) or case.events(CAUSE),
            headline=f"the connector catches its own {first.type} in {first.hook} and goes on",
            remedy=[f"mend the connector at {first.where}, and let {first.hook} raise what it can't mend"],
        )
        return
    if facts:
        loud = [f for f in facts if f.logged and f.hook in _SAVE_HOOKS and not trust.caught_agreed]
        loud += _in_threads(case, facts)
        shown = loud or facts
        yield case.finding(
            CAUSE,
            f"The connector caught {listed(dict.fromkeys(f.type for f in shown))} of its own in "
            f"{listed(dict.fromkeys(place(f.hook) for f in shown))}; "
            + ("what it saved then could not be measured." if loud else "no save is known to be lost by it."),
            severity=FAULT if loud else NOTE,
            evidence=[exception_line(fact) for fact in shown[:3]] + logs_in(case, {f.hook for f in shown}),
            events=_events(shown),
            remedy=[f"look at {shown[0].where}"],
            headline=f"the connector catches its own {shown[0].type}" if loud else "",
        )
        return
    watched = trust.measured + trust.blind
    if watched:
        yield CAUSE.ruled_out(
            f"no exception was raised and caught in {plural(watched, 'watched store call')}"
        )


def _in_threads(case: Case, facts: list[Swallowed]) -> list[Swallowed]:
    """Of the connector's own threads: where no save could be measured, and they caught exceptions about as
    often as there were requests. Once in a while is no sign of lost saves."""
    base = case.run.base
    dark = base[base["account"] == NOT_OBSERVED]["request"].nunique() if len(base) else 0
    if not dark or case.run.trust.agreed:
        return []
    return [f for f in facts if f.hook == "thread" and f.logged and f.count * 2 >= dark]


def _events(facts: list[Swallowed]) -> list[Event]:
    return [
        Event("", step, f"{fact.type} caught in {place(fact.hook)}", layer=layer or None)
        for fact in facts[:3]
        for step, layer in fact.places[:1]
    ]
