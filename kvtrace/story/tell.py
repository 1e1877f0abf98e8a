"""Puts a request's story together: what its records say, in order, and where its tokens ended up."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from kvtrace import causes, ledger
from kvtrace.causes.assign import assign_pieces
from kvtrace.causes.case import Assigned, Case, make_case
from kvtrace.causes.outcomes import kept, not_saved
from kvtrace.causes.registry import CATALOGUE
from kvtrace.causes.tables import rows
from kvtrace.errors import KvtraceError
from kvtrace.ledger.ends import NOT_SAVED
from kvtrace.ledger.model import PIECE_COLUMNS, Engine, Run, Span
from kvtrace.story import find, worker_steps
from kvtrace.story.model import Entry, Moment, Pair, Range, Story
from kvtrace.story.records import Source, sources, tag_of
from kvtrace.terms import cause_of
from kvtrace.trace import facts
from kvtrace.trace.format import NONE_ANSWER, STEP_MASK, Flag, Role
from kvtrace.trace.reader import of_type
from kvtrace.trace.rows import (
    Allocation,
    Arrival,
    Chunk,
    Finish,
    Lookup,
    MetadataEntry,
    Preemption,
    Row,
    TransferBegun,
    TransferDone,
    flags,
    of_kind,
    role,
)

MAX_STEPS = 4096
"""Steps whose calls are told; a request with more has its first ones told."""


def tell(run_dir: Path, wanted: str, layer: str | None = None, token: int | None = None) -> Story:
    """The story of one request.

    Args:
        wanted: the client's or the engine's id, or a prefix that fits one request only; ``ID#2``.
        layer: only this layer's calls: its name, or its number.
        token: only what concerns this position.

    Raises:
        KvtraceError: no such request, layer or position; several fit; no readable spool.
    """
    spools = sources(run_dir)
    clients = {
        fact.engine: fact.client
        for source in spools
        for _, fact in of_type(facts.ClientId, source.documents)
        if fact.engine
    }
    arrivals = _arrivals(spools)
    ident, number = find.find(wanted, [one for _, one in arrivals], clients)
    run = ledger.read_run(run_dir, watch=(ident,))
    same = [at for at, row in enumerate(rows(run.requests)) if row.id == ident]
    if number >= len(same):
        raise KvtraceError("no such request", ident, "its records are incomplete: it is not in the ledgers")
    own = same[number]
    request = list(rows(run.requests))[own]
    engine = next((one for one in run.engines if one.tag == request.engine), None)
    if engine is None:
        raise KvtraceError("a request of no known engine", ident, "its scheduler left no readable record")
    after = min((r.t_first for i, r in enumerate(rows(run.requests)) if i in same and i > own), default=None)
    diagnosis = causes.diagnose(run)
    judged = diagnosis.requests
    judged = judged[(judged["id"] == ident) & (judged["t_first"] == request.t_first)]
    pairs = _pairs(engine)
    story = Story(
        id=ident,
        client=request.client,
        engine=int(request.engine),
        prompt=int(request.prompt),
        computed=int(request.computed),
        output=int(request.output),
        block=int(request.block),
        status=request.status,
        finished=bool(request.finished),
        preemptions=int(request.preemptions),
        verdict=str(judged["verdict"].iloc[0]) if len(judged) else "",
        pairs=pairs,
        moments=[],
        ranges=_ranges(run, own, len(pairs)),
        token=token,
        layer=None if layer is None else _layer(layer, pairs),
    )
    if token is not None and not 0 <= token < story.computed:
        there = f"positions 0 to {story.computed - 1} had KV" if story.computed else "no position ever had KV"
        raise KvtraceError(f"no position {token} in request {ident}", there)
    _moments(story, run, engine, spools, own, int(request.t_first), after)
    return story


def _arrivals(spools: list[Source]) -> list[tuple[int, str]]:
    """(time, id) of each request that any scheduler knew, in order."""
    found: list[tuple[int, str]] = []
    for source in spools:
        seen: set[str] = set()
        arrived = of_kind(Arrival, source.rows)
        for t, request in zip(arrived.t.tolist(), arrived.request.tolist(), strict=True):
            if ident := source.names.get(request, ""):
                seen.add(ident)
                found.append((t, ident))
        found.extend((1 << 62, ident) for ident in sorted(source.ids - seen))
    return sorted(found)


def _pairs(engine: Engine) -> list[Pair]:
    """As the ledger counts them: the engine's workers in order, each with its layers."""
    pairs = [
        Pair(worker.rank, worker.process, layer) for worker in engine.workers for layer in worker.kv_layers
    ]
    pairs.extend(Pair(-1, "", "") for _ in range(engine.pairs - len(pairs)))
    return pairs


def _layer(wanted: str, pairs: Sequence[Pair]) -> str:
    names = list(dict.fromkeys(pair.layer for pair in pairs if pair.layer))
    if wanted in names:
        return wanted
    if wanted.isascii() and wanted.isdigit():
        number = int(wanted[:9])
        fits = [name for name in names if str(number) in re.split(r"\D+", name)]
        if len(fits) != 1 and number < len(names):
            fits = [names[number]]
    else:
        fits = [name for name in names if wanted and wanted in name]
    if len(fits) == 1:
        return fits[0]
    known = f"{len(names)} layers own KV" + (f", {names[0]} to {names[-1]}" if names else "")
    shown = ascii(wanted)[1:-1][:120]
    raise KvtraceError(f"{len(fits)} layers fit {shown!r}" if fits else f"no layer {shown!r}", known)


# ------------------------------------------------------------------------------ where tokens went


def _ranges(run: Run, own: int, pairs: int) -> list[Range]:
    """The request's positions by account; neighbours of the same fate are one range."""
    case = make_case(run)
    by_pairs: dict[tuple[int, ...], list[tuple[int, int, str]]] = defaultdict(list)
    for span in run.spans:
        if span.request == own:
            by_pairs[span.pairs].extend(_named(case, own, span))
    found: list[Range] = []
    for members, parts in by_pairs.items():
        for start, end, account in sorted(parts):
            last = found[-1] if found else None
            if last and last.end == start and last.account == account and last.pairs == list(members):
                last.end = end
            else:
                found.append(Range(start, end, account, _stage(account), list(members)))
    return sorted(found, key=lambda part: (part.start, part.pairs))


def _stage(account: str) -> int | None:
    cause = CATALOGUE.get(cause_of(account) or "")
    return cause.stage if cause else None


def _named(case: Case, own: int, span: Span) -> list[tuple[int, int, str]]:
    """(start, end, account) of a span; what was not saved gets its cause from the rules."""
    if span.outcome.name != NOT_SAVED:
        return [(span.start, span.end, kept(span.outcome.name, span.outcome.code))]
    prompt = case.requests[own].prompt
    engine = case.requests[own].engine
    found: list[tuple[int, int, str]] = []
    for start, end, phase in (
        (span.start, min(span.end, prompt), "prefill"),
        (max(span.start, prompt), span.end, "decode"),
    ):
        if start >= end:
            continue
        piece = (
            own,
            engine,
            start,
            end,
            len(span.pairs),
            phase,
            span.chunk,
            span.step,
            span.outcome.code,
            span.live,
        )
        alone = pd.DataFrame([piece], columns=list(PIECE_COLUMNS))
        one = replace(case, run=replace(case.run, pieces=alone), assigned=defaultdict(Assigned))
        assign_pieces(one)
        for cause, assigned in one.assigned.items():
            found.extend((low, high, not_saved(cause)) for _, low, high in assigned.samples)
    return found


# ------------------------------------------------------------------------------ what happened


@dataclass
class _Told:
    """A request's moments while they are gathered."""

    story: Story
    began: int
    moments: list[Moment]
    steps: dict[int, Moment]
    """Step (with tag) -> the moment that holds its entries and ranks."""
    declared: set[int]
    """Steps whose metadata holds a store entry for the request."""

    def add(self, kind: str, t: int, step: int, **facts: Any) -> Moment:
        moment = Moment(kind, t - self.began, step & STEP_MASK, facts)
        self.moments.append(moment)
        return moment

    def of_step(self, step: int, t: int) -> Moment:
        if step not in self.steps:
            self.steps[step] = self.add("metadata", t, step)
        return self.steps[step]


def _moments(
    story: Story, run: Run, engine: Engine, spools: list[Source], own: int, began: int, after: int | None
) -> None:
    told = _Told(story, began, [], {}, set())
    mine: list[tuple[Row, Source]] = []
    for source in spools:
        for row in source.of_request(story.id):
            step = _step(row)
            inside = not step or tag_of(step) == engine.tag
            if inside and _time(row) >= began and (after is None or _time(row) < after):
                mine.append((row, source))
    mine.sort(key=lambda item: _time(item[0]))
    chunks = sum(isinstance(row, Chunk) for row, _ in mine)
    for row, source in mine:
        _record(told, row, source, chunks)
    _stores(told, run, own)
    steps = set(sorted(told.steps)[:MAX_STEPS])
    if len(steps) < len(told.steps):
        story.notes.append(f"calls are told for the first {MAX_STEPS} of {len(told.steps)} steps")
    story.notes.extend(worker_steps.fill(told.steps, steps, engine, spools, began))
    _trouble(told, spools, steps)
    order = {"arrival": 0, "lookup": 1, "allocation": 2}
    story.moments = sorted(told.moments, key=lambda m: (m.at_ns, order.get(m.kind, 3)))


def _step(row: Row) -> int:
    return getattr(row, "step", 0)  # an arrival is in no step


def _time(row: Row) -> int:
    """When it was, or began: the first word after the head of every row about a request."""
    return int(row[1])


def _record(told: _Told, row: Row, source: Source, chunks: int) -> None:
    marks, t, step = flags(row.head), _time(row), _step(row)
    if isinstance(row, Arrival):
        told.add("arrival", t, 0, prompt=row.prompt, max_tokens=row.max_tokens)
    elif isinstance(row, Lookup):
        external = None if row.external == NONE_ANSWER else row.external
        asynchronous = bool(marks & Flag.ASYNC)
        told.add("lookup", t, step, local=row.local, external=external, asynchronous=asynchronous)
    elif isinstance(row, Allocation):
        told.add("allocation", t, step, external=row.external, blocks=row.blocks)
    elif isinstance(row, Chunk):
        moment = told.of_step(step, t)  # the metadata may have been read before it
        moment.kind = "chunk"
        number = sum(1 for one in told.moments if one.kind == "chunk")
        start, end, resumed = row.start, row.start + row.tokens, bool(marks & Flag.RESUMED)
        moment.facts = {"number": number, "of": chunks, "start": start, "end": end, "resumed": resumed}
    elif isinstance(row, MetadataEntry) and marks & Flag.LOAD:
        entry = Entry("load", row.slots, row.tokens, row.start, bool(marks & Flag.ASYNC))
        known = told.of_step(step, t).entries
        if entry not in known:  # a connector inside another one says the same again
            known.append(entry)
    elif isinstance(row, MetadataEntry) and marks & Flag.STORE:
        told.of_step(step, t)  # its entries come from the ledger, with their positions
        told.declared.add(step)
    elif isinstance(row, Preemption):
        told.add("preempted", t, step, computed=row.computed)
    elif isinstance(row, TransferBegun):
        told.add("transfer-opened", t, step, direction="store" if marks & Flag.STORE else "load")
    elif isinstance(row, TransferDone):
        side = "scheduler" if role(row.head) == Role.SCHEDULER else "worker"
        direction = "store" if marks & Flag.STORE else "load"
        told.add("transfer-done", t, step, direction=direction, failed=bool(row.failed), side=side)
    elif isinstance(row, Finish):
        status = source.names.get(row.status_name, "").rsplit(".", 1)[-1]
        told.add("finish", t, step, status=status, output=row.output, computed=row.computed)


def _stores(told: _Told, run: Run, own: int) -> None:
    """The store entries, with the positions that the ledger gave them."""
    for entry in rows(run.entries[run.entries["request"] == own]):
        step = int(entry.step)
        known = told.steps.get(step)
        if known is None:
            continue
        known.entries.append(
            Entry(
                "store", int(entry.slots), int(entry.tokens), int(entry.start), bool(entry.asynchronous),
                step in told.declared,
            )
        )  # fmt: skip


def _trouble(told: _Told, spools: list[Source], steps: set[int]) -> None:
    """Exceptions and warnings of the connector's hooks in this request's steps, one of each."""
    seen: set[tuple[object, ...]] = set()
    for source in spools:
        for t, fact in source.documents:
            if (
                not isinstance(fact, (facts.HookException, facts.Swallowed, facts.Log))
                or fact.step not in steps
            ):
                continue
            if isinstance(fact, facts.Log):
                how, kind, where = "logged", fact.level, fact.logger
            else:
                how = "raised" if isinstance(fact, facts.HookException) else "swallowed"
                kind, where = fact.type, fact.where
            key = (how, fact.step, fact.hook, kind, fact.message)
            if key in seen:
                continue
            seen.add(key)
            told.add(
                "trouble", t, fact.step, how=how, hook=fact.hook, layer=fact.layer or "", type=kind,
                message=fact.message, where=where,
            )  # fmt: skip
