"""hook-raised: a connector hook raised an exception."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvtrace.causes.evidence.logs import error, place
from kvtrace.causes.rule import (
    FAULT,
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
from kvtrace.ledger.reported import BACKGROUND, SAVE_HOOKS, START_HOOKS
from kvtrace.ledger.run import HookException
from kvtrace.words import count, listed, plural, sentence

CAUSE = Cause(
    id="hook-raised",
    stage=Stage.HOOK,
    severity=FAULT,
    ledger=SAVES,
    weighs=True,
    meaning="A connector hook raised.",
    seen_as="The exception's type, message and place.",
    remedy="Fix the connector where the hook raised; the evidence names the place.",
    save_ends=(SaveEnd.RAISED,),
)
_PATH = re.compile(r"Error: \[Errno \d+\] [^:]+: '(/[^']+?)(?:/…)?'")
"""A path that the configuration names: that it can't be had is no fault of the connector's code."""
_MISSING = "FileNotFoundError"
_MISFIT = re.compile(r"\btakes .*argument|unexpected keyword argument|missing .*argument")
_DOCTOR = "; kvtrace doctor names each hook that does not take what this vLLM gives it"
_AT_START = (*START_HOOKS, "__init__")
_STOPPED = ("KeyboardInterrupt", "SystemExit")
"""Somebody stopped the process while a hook ran (Ctrl-C, SIGTERM): no exception of the connector's."""


def claim(case: Case, span: LostSpan, unclaimed: list[Interval]) -> list[Interval]:
    """Positions that no metadata was seen to name, of a step in which a save hook raised."""
    raised = {e.step for e in case.run.exceptions if e.hook in SAVE_HOOKS and e.type not in _STOPPED}
    return unclaimed if span.step and span.step in raised else []


def claim_read(case: Case, span: LostSpan, unclaimed: list[Interval]) -> list[Interval]:
    """Positions that a hook was to read in a step in which it raised, or that were read and never put, where
    a piece of work in the background ended in an exception."""
    if span.ended == SaveEnd.NOT_AT_REST and any(e.hook in BACKGROUND for e in case.run.exceptions):
        return unclaimed
    return claim(case, span, unclaimed) if span.ended == SaveEnd.NOTHING_READ else []


CLAIMS = {Turn.STEP: claim, Turn.READ: claim_read}


def _remedy(raised: Sequence[HookException], writes: bool) -> list[str]:
    """``writes``: it does, elsewhere in the run: what is missing is a file of its own, and no place."""
    texts = (f"{one.type}: {one.message}" for one in raised if not (writes and one.type == _MISSING))
    path = next((path for text in texts for path in _PATH.findall(text)), None)
    if path:
        return [f"make {path} a place where this user may write, or configure another one"]
    places = listed(dict.fromkeys(one.where for one in raised if one.where), 2)
    misfit = any(one.type == "TypeError" and _MISFIT.search(one.message) for one in raised)
    if not places:
        return [CAUSE.remedy]
    return [f"Fix the connector at {places}: {error(raised[0])}{_DOCTOR if misfit else ''}"]


def rule(case: Case) -> Results:
    run = case.run
    raised = [e for e in run.exceptions if e.hook not in _AT_START and e.type not in _STOPPED]
    steps = sum(one.raised for one in run.hooks) - sum(e.type in _STOPPED for e in run.exceptions)
    stopped = [e for e in run.exceptions if e.type in _STOPPED]
    if raised or steps > 0 or (case.affected(CAUSE) and not stopped):
        n = max(sum(e.count_so_far for e in raised), steps)
        evidence = [
            f"{e.hook}{f' of {e.layer}' if e.layer else ''}: {e.type}: {e.message} (at {e.where}), "
            f"{plural(e.count_so_far, 'time')}"
            for e in raised[:3]
        ] or [f"{plural(steps, 'call')} raised; the exceptions were not recorded"]
        hooks = listed(dict.fromkeys(place(e.hook) for e in raised)) or "a hook"
        kinds = listed(dict.fromkeys(e.type for e in raised)) or "an exception"
        moments = [Event("", e.step, f"{e.hook} raised {e.type}", layer=e.layer or None) for e in raised[:3]]
        yield case.finding(
            CAUSE,
            f"{sentence(hooks)} raised {kinds}, {plural(n, 'time')}.",
            evidence=evidence,
            events=case.events(CAUSE) or moments,
            headline=f"{hooks} raised {kinds}",
            remedy=_remedy(raised, any(one.put for one in run.outside)),
        )
        return
    if case.affected(CAUSE):
        hooks = listed(dict.fromkeys(e.hook for e in stopped))
        yield case.finding(
            CAUSE,
            f"The process was stopped ({stopped[0].type}) while {hooks} ran: it was not saved then.",
            severity=NOTE,
            remedy=["nothing: somebody ended the process"],
        )
        return
    total = sum(one.calls for one in run.timing)
    if total and not any(one.raised for one in run.hooks):
        yield CAUSE.ruled_out(f"0 of {count(total)} hook calls raised")
