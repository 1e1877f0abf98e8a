"""save-never-finished: an asynchronous save that began and never came back."""

from __future__ import annotations

from collections.abc import Sequence

from kvtrace.causes.diagnosis import Finding
from kvtrace.causes.evidence import unlike
from kvtrace.causes.rule import FAULT, LIMIT, SAVES, Case, Cause, Event, Results, SaveEnd, Stage
from kvtrace.ledger.loads.asynchronous import NO_END_TOLD
from kvtrace.ledger.run import AsyncSave
from kvtrace.terms import Grade
from kvtrace.words import capital, count, listed, of_all, plural

CAUSE = Cause(
    id="save-never-finished",
    stage=Stage.COMPLETION,
    severity=FAULT,
    ledger=SAVES,
    meaning="An asynchronous save whose completion never came back, or came from some ranks only.",
    seen_as=(
        "request_finished kept the blocks, and no completion of the request: the connector defines none of "
        "the hooks by which vLLM hears of one, or three saves that began later "
        "are done, or 60 s went by, or 5 s after some ranks were done, or, after its copy, longer than any "
        "save took (twice that where some ended). What the end of the trace cuts off is pending. Where no "
        "metadata names a save, nothing was read, and ten times as long went by as any save took: a choice "
        "to confirm; a fault where one that began later came to its end, and no other engine is to fetch the "
        "blocks."
    ),
    remedy="Look at get_finished: every rank must report the request, also when its transfer failed.",
    save_ends=(SaveEnd.NOT_FINISHED,),
)

_NOTHING = "where nothing is on its way, request_finished must return False"


def rule(case: Case) -> Results:
    saves = case.run.async_saves
    never = [save for save in saves if save.end == SaveEnd.NOT_FINISHED]
    pending = [save for save in saves if save.end == SaveEnd.PENDING]
    if case.affected(CAUSE) or never:
        yield _never(case, never, pending)
        return
    idle = [save for save in pending if save.idle and not case.requests[save.request].stored_end]
    if idle:
        yield _idle(case, idle)
    elif pending:
        yield CAUSE.not_observed(
            f"{plural(len(pending), 'asynchronous save')} still in flight when the trace ends"
        )
    elif saves:
        yield CAUSE.ruled_out(f"{plural(len(saves), 'asynchronous save')} began, and each came back")


def _never(case: Case, never: Sequence[AsyncSave], pending: Sequence[AsyncSave]) -> Finding:
    saves = case.run.async_saves
    missing = listed(map(str, sorted({rank for save in never if save.reported for rank in save.missing})))
    without = [s for s in (*never, *pending) if not case.requests[s.request].entries]
    such = of_all(len(without), len(never) + len(pending), "such request")
    many = ("at least " if pending else "") + plural(len(never), "asynchronous save")
    return case.finding(
        CAUSE,
        f"{capital(many)} never finished{f' (rank {missing})' if missing else ''}.",
        evidence=[
            f"of {plural(len(saves), 'asynchronous save')} that request_finished announced "
            f"{count(len(never))} never came back, though the run went on; "
            f"{count(sum(s.end == SaveEnd.SAVED for s in saves))} did, and of {count(len(pending))} no end "
            "was seen when the run was over; the blocks of those that do not come back stay allocated",
            *([f"rank {missing} did not report all that others did"] if missing else []),
            *([f"no metadata names a save of {such}"] if without else []),
            *([NO_END_TOLD] if any(_mute(case, save) for save in never) else []),
        ],
        events=[
            Event(
                case.requests[save.request].id,
                case.requests[save.request].last_step,
                "blocks kept for an asynchronous save, and no report of its end",
                rank=save.missing[0] if save.reported and save.missing else None,
            )
            for save in never[:3]
        ],
        headline=f"{many} never finished",
        requests=len(never),
        remedy=[
            "get_finished must name each such request once, on "
            f"{f'rank {missing} too' if missing else 'every rank'}, also when its transfer failed",
            _NOTHING,
        ],
    )


def _mute(case: Case, save: AsyncSave) -> bool:
    return case.engines[case.requests[save.request].engine].mute


def _may_come(case: Case, save: AsyncSave, told: Sequence[AsyncSave]) -> bool:
    """Whether none that began later came back, or another engine may fetch it: the engine only saves, the
    request asks for it, or those that came back were not seen to be read here."""
    request = case.run.requests[save.request]
    own = [case.run.requests[one.request] for one in told]
    own = [one for one in own if one.engine == request.engine]
    for_others = case.engines[request.engine].role == "kv_producer" or request.id in case.run.asking
    unread = any((case.requests[one.request].grade or Grade.DECLARED) < Grade.READ for one in told)
    return for_others or unread or not any(one.t_end > request.t_end for one in own)


def _idle(case: Case, saves: Sequence[AsyncSave]) -> Finding:
    """A choice to confirm where another engine may be about to fetch these blocks, or they wait in a row."""
    told = [save for save in case.run.async_saves if save.end == SaveEnd.SAVED]
    held = not any(_may_come(case, save, told) for save in saves)
    asked = ", though one that began later came to its end." if held else ". Is one on its way?"
    return case.finding(
        CAUSE,
        f"request_finished kept the blocks of {plural(len(saves), 'request')} for a save that was not "
        f"seen to begin{asked}",
        severity=FAULT if held else LIMIT,
        evidence=[
            *unlike.told_apart(
                case, [one.request for one in saves], [one.request for one in told], "whose save came back"
            ).values(),
            "no metadata names a save of these, nothing of them was read, and no end was reported until the "
            f"run was over; {plural(len(told), 'other asynchronous save')} came back",
            "their blocks stay allocated until then",
        ],
        events=[
            Event(case.requests[save.request].id, case.requests[save.request].last_step, "blocks kept")
            for save in saves[:3]
        ],
        requests=len(saves),
        remedy=[_NOTHING],
        headline=f"the blocks of {plural(len(saves), 'request')} were kept for a save that was not seen",
    )
