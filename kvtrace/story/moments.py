"""What happened to one request, in order: its records, and what its steps did on the workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtrace.ledger.run import Engine, OfferedEntry, Run
from kvtrace.story import worker_steps
from kvtrace.story.records import Source
from kvtrace.story.story import Entry, Moment
from kvtrace.trace import facts, rows
from kvtrace.trace.format import NONE_ANSWER, STEP_MASK, STEP_SHIFT, Flag, Role

MAX_STEPS = 4096
"""Steps whose calls are given; of a request with more, the first ones."""
_FIRST = {"arrival": 0, "lookup": 1, "allocation": 2}
"""The order of moments at the same time."""


@dataclass(frozen=True)
class Subject:
    """The request that a story is about. ``began``, ``after``: times of its arrival, and of the next arrival
    of the same id (None without one)."""

    id: str
    row: int  # in Run.requests
    engine: Engine
    began: int
    after: int | None

    def owns(self, row: rows.Row) -> bool:
        """Whether a record of this id speaks of this request."""
        step, t = _step(row), _time(row)
        inside = not step or step >> STEP_SHIFT == self.engine.tag
        return inside and t >= self.began and (self.after is None or t < self.after)


def moments(subject: Subject, run: Run, spools: Sequence[Source]) -> tuple[list[Moment], list[str]]:
    """The request's moments in order, and notes on what is left out."""
    found = [(row, one) for one in spools for row in one.of_request(subject.id) if subject.owns(row)]
    found.sort(key=lambda item: _time(item[0]))
    gathered = _Gathered(subject.began, chunks=sum(isinstance(row, rows.Chunk) for row, _ in found))
    for row, source in found:
        gathered.add_record(row, source.names)
    gathered.add_stores(one for one in run.entries if one.request == subject.row)
    steps = sorted(gathered.of_steps)[:MAX_STEPS]
    notes = []
    if len(steps) < len(gathered.of_steps):
        notes.append(f"calls are given for the first {MAX_STEPS} of {len(gathered.of_steps)} steps")
    ranks, more = worker_steps.on_ranks(steps, subject.engine, spools, subject.began)
    for step, of_step in ranks.items():
        gathered.of_steps[step].ranks = of_step
    gathered.add_trouble(spools, set(steps))
    ordered = sorted(gathered.all, key=lambda one: (one.at_ns, _FIRST.get(one.kind, 3)))
    return ordered, notes + more


def _step(row: rows.Row) -> int:
    return getattr(row, "step", 0)  # an arrival is in no step


def _time(row: rows.Row) -> int:
    """When it was, or began: the first word after the head of every row about a request."""
    return int(row[1])


def _direction(head: int) -> str:
    return "store" if rows.flags(head) & Flag.STORE else "load"


_PLAIN: Mapping[type[Any], tuple[str, tuple[str, ...]]] = {
    rows.Arrival: ("arrival", ("prompt", "max_tokens")),
    rows.Growth: ("grown", ("prompt", "start")),
    rows.Allocation: ("allocation", ("external",)),
    rows.Preemption: ("preempted", ("computed",)),
}
"""What a moment is called that tells fields of its record alone, and these."""


class _Gathered:
    """The moments so far. ``of_steps``: step (with tag) -> the moment that holds its entries and ranks."""

    def __init__(self, began: int, chunks: int) -> None:
        self._began, self._chunks = began, chunks
        self.all: list[Moment] = []
        self.of_steps: dict[int, Moment] = {}

    def _add(self, kind: str, t: int, step: int, **numbers: Any) -> Moment:
        moment = Moment(kind, t - self._began, step & STEP_MASK, numbers)
        self.all.append(moment)
        return moment

    def _of_step(self, step: int, t: int) -> Moment:
        if step not in self.of_steps:
            self.of_steps[step] = self._add("metadata", t, step)
        return self.of_steps[step]

    # -- records of the request

    def add_record(self, row: rows.Row, names: Mapping[int, str]) -> None:
        if isinstance(row, rows.Finish):
            status = names.get(row.status_name, "").rsplit(".", 1)[-1]
            self._add("finish", row.t, row.step, status=status, output=row.output, computed=row.computed)
            return
        if type(row) in _PLAIN:
            kind, fields = _PLAIN[type(row)]
            self._add(kind, _time(row), _step(row), **{name: getattr(row, name) for name in fields})
            return
        readers: dict[type[Any], Callable[[Any], None]] = {
            rows.Lookup: self._lookup,
            rows.Chunk: self._chunk,
            rows.MetadataEntry: self._metadata,
            rows.TransferBegun: self._transfer_begun,
            rows.TransferDone: self._transfer_done,
        }
        readers[type(row)](row)

    def _lookup(self, row: rows.Lookup) -> None:
        external = None if row.external == NONE_ANSWER else row.external
        asynchronous = bool(rows.flags(row.head) & Flag.ASYNC)
        self._add("lookup", row.t0, row.step, local=row.local, external=external, asynchronous=asynchronous)

    def _chunk(self, row: rows.Chunk) -> None:
        moment = self._of_step(row.step, row.t)  # the metadata may have been read before it
        moment.kind = "chunk"
        number = sum(one.kind == "chunk" for one in self.all)
        resumed = bool(rows.flags(row.head) & Flag.RESUMED)
        moment.facts = {
            "number": number, "of": self._chunks, "start": row.start, "end": row.start + row.tokens,
            "resumed": resumed,
        }  # fmt: skip

    def _metadata(self, row: rows.MetadataEntry) -> None:
        marks = rows.flags(row.head)
        if marks & Flag.LOAD:
            entry = Entry("load", row.slots, row.start, bool(marks & Flag.ASYNC))
            known = self._of_step(row.step, row.t).entries
            if entry not in known:  # a connector inside another one says the same again
                known.append(entry)
        elif marks & Flag.STORE:
            self._of_step(row.step, row.t)  # its entries come from the ledger, with their positions

    def _transfer_begun(self, row: rows.TransferBegun) -> None:
        self._add("transfer-opened", row.t, row.step, direction=_direction(row.head))

    def _transfer_done(self, row: rows.TransferDone) -> None:
        side = "scheduler" if rows.role(row.head) == Role.SCHEDULER else "worker"
        direction, failed = _direction(row.head), bool(row.failed)
        self._add("transfer-done", row.t, row.step, direction=direction, failed=failed, side=side)

    # -- what else is known

    def add_stores(self, entries: Iterable[OfferedEntry]) -> None:
        """Store entries, with the positions that the ledger gave them."""
        for one in entries:
            if one.step in self.of_steps:
                entry = (one.slots, one.start, one.asynchronous, not one.implied, one.available)
                self.of_steps[one.step].entries.append(Entry("store", *entry))

    def add_trouble(self, spools: Iterable[Source], steps: set[int]) -> None:
        """Exceptions and warnings of the connector's hooks in these steps, one of each."""
        seen: set[tuple[object, ...]] = set()
        for source in spools:
            for t, fact in source.documents:
                if not isinstance(fact, (facts.HookExceptionFact, facts.SwallowedFact, facts.LogFact)):
                    continue
                how, kind, where = _trouble(fact)
                key = (how, fact.step, fact.hook, kind, fact.message)
                if fact.step not in steps or key in seen:
                    continue
                seen.add(key)
                self._add(
                    "trouble", t, fact.step, how=how, hook=fact.hook, layer=fact.layer or "", type=kind,
                    message=fact.message, where=where,
                )  # fmt: skip


def _trouble(fact: facts.HookExceptionFact | facts.SwallowedFact | facts.LogFact) -> tuple[str, str, str]:
    """(what became of it, its type, where)."""
    if isinstance(fact, facts.LogFact):
        return "logged", fact.level, fact.logger
    return "raised" if isinstance(fact, facts.HookExceptionFact) else "swallowed", fact.type, fact.where
