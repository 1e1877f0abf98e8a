"""metadata-has-no-store: what the scheduler side did not offer, by a rule that kvtrace does not know."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvtrace.causes.case import CaseRequest, stored_before
from kvtrace.causes.evidence import transfers, unlike
from kvtrace.causes.evidence.prompts import ABORTED
from kvtrace.causes.evidence.unstored import metadata_unread, part_of_prompts, said_of_unread
from kvtrace.causes.rule import LIMIT, SAVES, Case, Cause, Interval, LostSpan, Results, Stage, Turn
from kvtrace.ledger.intervals import union
from kvtrace.ledger.run import Engine
from kvtrace.words import count, listed, of_all, plural

CAUSE = Cause(
    id="metadata-has-no-store",
    stage=Stage.SCHEDULE,
    severity=LIMIT,
    ledger=SAVES,
    meaning=(
        "The connector's scheduler side did not put these tokens into any step's metadata, by a rule that "
        "kvtrace does not know: admission, a quota, a minimum, a state of its own. It may be meant."
    ),
    seen_as=(
        "No metadata names slots of these positions; and they were seen not to be read, or the metadata of "
        "all steps of their requests is readable, and neither a save in the background nor a lookup that "
        "finds them speaks of a store that was not seen. Otherwise they are not observed."
    ),
    remedy=(
        "Look at build_connector_meta of this connector: what must be true of a request before it is offered "
        "for storing?"
    ),
)


def claim(case: Case, span: LostSpan, unclaimed: list[Interval]) -> list[Interval]:
    return unclaimed


CLAIMS = {Turn.LAST: claim}


def rule(case: Case) -> Results:
    rows = case.affected(CAUSE)
    if not rows:
        return
    engine = case.engines[rows[0].engine]
    name = engine.connector_name
    tags = dict.fromkeys(r.engine for r in rows)
    of_engine = [r for tag in tags for r in case.of_engine(tag)]
    without = [r for r in rows if not r.entries]
    stored = [r for r in of_engine if r.stored_end]
    here = {r.row for r in rows}
    other = [r for r in stored if r.row not in here]
    affected = of_all(len(rows), len(of_engine), "prompt")
    unknown = any(case.units.get(tag) is None for tag in tags)
    across = _across_chunks(case, rows)
    spread = " to ".join(count(n) for n in sorted({min(r.prompt for r in rows), max(r.prompt for r in rows)}))
    unread = metadata_unread(engine, rows)
    did, done = ("took", "seen to be read") if unread else ("offered", "offered")
    told = unlike.of_saves(case, CAUSE)
    loads = (unlike.LOADS, True) in told
    evidence = [
        *told.values(),
        *part_of_prompts(case, CAUSE),
        _how_much(len(without), len(rows) - len(without), len(other), done)
        + "".join(_disturbed(rows, other)),
        *said_of_unread(unread, rows),
        f"their prompts have {spread} tokens; no unit with a name "
        "(block, max_num_batched_tokens, a number of the connector) gives these stores"
        if unknown
        else f"their prompts have {spread} tokens, which the unit allows",
        *_not_explained(case, rows),
        *([f"of {of_all(across, len(rows), 'prompt')} {_ACROSS}"] if across else []),
    ]
    unasked = transfers.not_asked(case, engine, [r.id for r in without], [r.id for r in stored])
    evidence = [*([unasked] if unasked else []), *evidence, *([] if stored else _switched_off(engine))]
    part = len(without) < len(rows)
    what = ("nothing, or a part alone," if part else "nothing") if without else "a part alone"
    if across == len(rows):
        title = f"{name} {did} no block that two prefill chunks fill together, of {affected}. Is that meant?"
        headline = "blocks that two prefill chunks fill together are not stored"
    else:
        by = "those that it loads for" if loads else "by a rule that is not known"
        by = "as they ask for no transfer" if unasked else by
        title = f"{name} {did} {what} of {affected} for storing, {by}. Is that meant?"
        headline = f"the connector {did} {what} of {affected} for storing"
    yield case.finding(
        CAUSE,
        title,
        evidence=evidence,
        events=case.events(CAUSE),
        remedy=[text for text, holds in (
            (transfers.REMEDY, unasked),
            (_ACROSS_REMEDY, across == len(rows)),
            *((f"{since}: see what it left behind; {_SINCE}", True) for since in unlike.caught_before(told)),
            (_LOADS_REMEDY, loads),
            (CAUSE.remedy, True),
            (_SLOTS_REMEDY, unread and part),
        ) if holds],
        headline=headline,
    )  # fmt: skip


def _how_much(nothing: int, part: int, others: int, done: str) -> str:
    """Of how many of these prompts nothing was ``done``, of how many a part; and of how many others some."""
    of = {"nothing of": nothing, "a part of": part}
    said = " and ".join(f"{words} {count(number)}" for words, number in of.items() if number)
    return f"{said} of these was {done}" + (
        f"; some of {plural(others, 'other prompt')} was" if others else ""
    )


def _disturbed(rows: Sequence[CaseRequest], others: Sequence[CaseRequest]) -> Iterator[str]:
    """How many of these requests were aborted or preempted, beside those of which something was offered."""
    for word, of in _DISTURBED.items():
        if number := sum(map(of, rows)):
            yield f"; {count(number)} of these were {word}, of the others {count(sum(map(of, others)))}"


_DISTURBED: dict[str, Callable[[CaseRequest], bool]] = {
    "aborted": lambda request: request.status == ABORTED,
    "preempted": lambda request: request.preemptions > 0,
}
_SLOTS_REMEDY = "compare the slots that the save hook indexes with those that the metadata names"
_SINCE = "from then on nothing of these is offered"
_LOADS_REMEDY = (
    "see whether build_connector_meta passes over requests that load: what they compute is not stored"
)
_ACROSS_REMEDY = (
    "store such a block in the step that fills it: the first block of a chunk is the one in which it begins"
)
_ACROSS = "the tokens that are left out lie in a block across the end of a prefill chunk"


def _across_chunks(case: Case, rows: Sequence[CaseRequest]) -> int:
    """Of how many prompts a block was left out that two chunks fill together: it is whole in neither."""
    at = {
        row: union((start, end) for start, end, _ in parts)
        for row, parts in case.assigned[CAUSE.id].at.items()
    }
    return sum(
        r.chunks > 1 and any(start < r.first_end < end and end - start <= r.block for start, end in at[r.row])
        for r in rows
    )


def _not_explained(case: Case, rows: list[CaseRequest]) -> list[str]:
    """What of these requests could have explained it, and does not."""
    hits = [r for r in rows if r.offered > 0]
    asked = [r for r in rows if r.offered >= 0]
    before = [r for r in rows if stored_before(case, r)]
    found = []
    if hits:
        found.append(f"{of_all(len(hits), len(rows), 'lookup')} found some: these tokens lie beyond it")
    elif asked:
        found.append(f"no lookup of these found anything ({of_all(len(asked), len(rows), 'request')} asked)")
    if before:
        part = of_all(len(before), len(rows), "prompt")
        found.append(f"an earlier store holds the beginning of {part}: these tokens lie beyond it")
    else:
        found.append("no store of the same tokens is earlier in this run")
    return ["; ".join(found)]


def _switched_off(engine: Engine) -> list[str]:
    """Options of the connector that are off."""
    words = ("false", "off", "none", "never", "disabled")
    off = [
        f"{key} = {str(value).lower()}" for key, value in engine.extra.items() if str(value).lower() in words
    ]
    return (
        [f"switched off in kv_connector_extra_config: {listed(off)}; this may be the reason"] if off else []
    )
