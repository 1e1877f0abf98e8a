"""The records that speak of requests, request by request.

Together with :mod:`kvtrace.story` the only place where records are read one by one: there is a handful of
them per request, none per step or per decode token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from kvtrace.ledger.intervals import Interval, intersect, union
from kvtrace.ledger.scan import SpoolScan
from kvtrace.ledger.steps import NEVER, Array, Steps
from kvtrace.trace import facts, rows
from kvtrace.trace.format import NONE_ANSWER, STEP_MASK, STEP_SHIFT, Flag, Kind, Role

_OF_A_RESET, _DIGEST = 0x9E3779B97F4A7C15, (1 << 63) - 1
"""What makes other digests of the same tokens, and the bits that it may change."""
_SAME_STEP = 8
"""Entries of a request in one step that are compared for being the same one."""


class Admission(NamedTuple):
    """What the scheduler asked of the connector as it let a request in, and what it took."""

    t: int  # begin of the call
    step: int
    local: int  # tokens in the GPU's own prefix cache
    answer: int | None  # None: the connector asked for patience
    asynchronous: bool
    accepted: int | None = None  # the allocation's, where there was one
    allocated_t: int = 0  # begin of the first allocation of the same step that took tokens, 0 for none


class ComputedChunk(NamedTuple):
    """Positions [start, end) that a step computed."""

    t: int
    step: int
    start: int
    end: int


class PromptGrowth(NamedTuple):
    """The next part of a streaming session's prompt, from a step on."""

    step: int
    start: int  # positions that had KV by then
    before: int  # the prompt until then; what stands between it and ``start`` was generated


class StoreEntry(NamedTuple):
    """A store entry of the connector's metadata."""

    step: int
    slots: int  # what it names; -1 where it says nothing readable
    tokens: int
    start: int  # resolved position
    available: int  # positions with KV at the end of that step
    asynchronous: bool
    implied: bool = False  # measured on the workers, in no metadata


class RequestEnd(NamedTuple):
    """How a request left the scheduler."""

    t: int
    step: int
    computed: int
    output: int
    status: str


class Transfer(NamedTuple):
    """An asynchronous transfer of a request's blocks began, or was reported finished."""

    t: int
    step: int
    begun: bool
    store: bool
    load: bool
    spool: str  # of the worker that reported it, "" the scheduler
    failed: bool = False


@dataclass(frozen=True)
class Request:
    """One request, as the scheduler's records tell it. Positions are of its tokens."""

    id: str
    engine: int
    prompt: int  # all of it; of a session with what was generated between its parts
    computed: int
    """Positions that ever had KV (computed or reused); where the trace ends before the request, what its
    chunks show."""
    t_first: int
    digest: int = 0
    salt: int = 0  # keyed digest of its cache salt: equal tokens have other digests under another one
    prefix: int = 0
    block: int = 0
    lookups: tuple[Admission, ...] = ()
    chunks: tuple[ComputedChunk, ...] = ()
    entries: tuple[StoreEntry, ...] = ()
    load_steps: tuple[int, ...] = ()  # those whose metadata names a load of it
    reused: tuple[Interval, ...] = ()  # from the GPU's own prefix cache
    external: tuple[Interval, ...] = ()  # from the connector
    finish: RequestEnd | None = None
    preemptions: int = 0
    preempt_step: int = 0  # of the last one
    preempted: tuple[tuple[int, int], ...] = ()  # step of each, and the positions that had KV by then
    first_step: int = 0  # of any of its records, 0 where none names a step
    last_step: int = 0
    transfers: tuple[Transfer, ...] = ()
    prefixes: Mapping[int, int] = field(default_factory=dict)  # keyed digest of a beginning -> its tokens
    grown: tuple[PromptGrowth, ...] = ()  # of a streaming session, its later parts
    unread: bool = False  # what the metadata of the step that completed its prompt names of it is not known

    @property
    def named_until(self) -> int:
        """The last step whose metadata is taken to name it: workers are told of its end in the step behind
        it (``SchedulerOutput.finished_req_ids``), and a connector may say then what is to be stored."""
        return self.last_step + 1

    def gave_back(self, step: int) -> bool:
        """Whether it was over before a step, and no asynchronous save held its blocks: what is read in them
        may be read for whoever else had them, or will have them."""
        held = any(one.store and one.begun for one in self.transfers)
        return 0 < self.last_step < step and not held

    def computed_anew(self, step: int) -> list[Interval]:
        """Positions of the prompt that steps up to this one computed, and a later one once more, with no
        preemption between: as a load had failed, vLLM threw away what these steps computed."""
        if not self.external:
            return []
        until = self.preempted[0][0] if self.preempted else NEVER
        before = union((one.start, one.end) for one in self.chunks if one.step <= step)
        again = union((one.start, one.end) for one in self.chunks if step < one.step < until)
        return intersect(intersect(before, again), [(0, self.prompt)])

    @property
    def arrived(self) -> int:
        """The prompt as it arrived: what was looked up, and what the digests are of."""
        return self.grown[0].before if self.grown else self.prompt

    @property
    def generated(self) -> list[Interval]:
        """What was generated between the parts of its prompt."""
        return [(one.before, one.start) for one in self.grown if one.before < one.start]

    def at_step(self, step: int) -> tuple[int, int]:
        """The prompt as it was after a step, and how far there was KV when it grew next, or in the end."""
        later = next((one for one in self.grown if one.step > step), None)
        return (later.before, later.start) if later else (self.prompt, self.computed)

    def without_kv(self) -> Request:
        """The request in a model that keeps no KV of tokens."""
        return replace(
            self, computed=0, lookups=(), chunks=(), entries=(), load_steps=(), reused=(), external=()
        )

    @property
    def looked_up(self) -> Admission | None:
        """The lookup that counted: the last one with an answer before the request first ran."""
        answered = [lookup for lookup in self.lookups if lookup.answer is not None]
        first = [lookup for lookup in answered if lookup.accepted is not None]
        return first[0] if first else (answered[-1] if answered else None)


@dataclass(frozen=True)
class Requests:
    """All requests of a run in order of arrival, and the steps whose metadata could not be read."""

    requests: tuple[Request, ...]
    unreadable: Steps


def collect(scans: Sequence[SpoolScan], tags: Collection[int]) -> Requests:
    """Requests in order of arrival, the same whatever the order of the spools.

    Args:
        tags: those of the engines that are known.
    """
    readers = [_SpoolReader(scan) for scan in sorted(scans, key=lambda s: s.name)]
    for reader in readers:
        reader.read()
    drafts = [draft for reader in readers for draft in reader.drafts if draft.known]
    drafts.sort(key=lambda draft: (draft.t_first, draft.engine, draft.id))
    if len(tags) == 1:
        for draft in drafts:
            draft.engine = draft.engine if draft.engine in tags else next(iter(tags))
    _reset(scans, drafts)
    transfers = _transfers(scans, drafts)
    unreadable = [np.array(reader.unreadable, dtype=np.int64) for reader in readers]
    unreadable += [steps for scan in scans for steps in _unread_connectors(scan)]
    steps = Steps(np.concatenate(unreadable)) if unreadable else Steps()
    return Requests(
        requests=tuple(
            draft.settled(tuple(transfers.get(row, ())), steps) for row, draft in enumerate(drafts)
        ),
        unreadable=steps,
    )


def _reset(scans: Sequence[SpoolScan], drafts: Iterable[_Draft]) -> None:
    """What a connector was made to forget is nobody's beginning any more: prompts that are asked for after a
    reset have digests of their own."""
    resets = {fact.step for scan in scans for fact in scan.facts_of(facts.CacheResetFact)}
    for draft in drafts if resets else ():
        asked = next((lookup.step for lookup in draft.lookups), draft.first_step)
        resets_before = sum(step >> STEP_SHIFT == asked >> STEP_SHIFT and step < asked for step in resets)
        draft.comes_after(resets_before)


def _unread_connectors(scan: SpoolScan) -> Iterable[Array]:
    """Steps whose metadata was not understood; a connector of connectors is read through its parts."""
    parents = {fact.parent for fact in scan.facts_of(facts.ConnectorFact)}
    return (steps for index, steps in scan.unreadable.items() if index not in parents)


# -------------------------------------------------------------------------- one request


@dataclass
class _Draft:
    """A request while its records are read, in the order of the file."""

    id: str
    t_first: int
    engine: int = 0
    prompt: int = -1
    digest: int = 0
    salt: int = 0
    prefix: int = 0
    block: int = 0
    lookups: list[Admission] = field(default_factory=list)
    chunks: list[ComputedChunk] = field(default_factory=list)
    stores: list[StoreEntry] = field(default_factory=list)  # positions and sizes as the metadata gave them
    load_steps: set[int] = field(default_factory=set)
    reused: list[Interval] = field(default_factory=list)
    external: list[Interval] = field(default_factory=list)
    finish: RequestEnd | None = None
    preemptions: int = 0
    preempt_step: int = 0
    preempted: list[tuple[int, int]] = field(default_factory=list)
    reach: int = 0  # positions with KV before the last preemption
    first_step: int = 0
    last_step: int = 0
    prefixes: dict[int, int] = field(default_factory=dict)
    grown: list[PromptGrowth] = field(default_factory=list)
    unread: bool = False  # metadata named KV of it, and not what for
    admission: int = 0  # index of the first lookup of this admission

    @property
    def known(self) -> bool:
        """False: named once, never scheduled, nothing known."""
        return self.prompt >= 0 or bool(self.chunks) or self.finish is not None

    def saw(self, step: int) -> None:
        if step > 0 and step & STEP_MASK:
            self.first_step = min(self.first_step or step, step)
            self.last_step = max(self.last_step, step)

    def arrive(self, row: rows.Arrival) -> None:
        if self.prompt < 0 or not self.digest:
            self.prompt, self.digest, self.prefix = max(0, row.prompt), row.digest, row.prefix
            self.salt = row.salt

    def grow(self, row: rows.Growth) -> None:
        if row.prompt > self.prompt >= 0:
            self.grown.append(PromptGrowth(row.step, max(0, row.start), self.prompt))
            self.prompt = row.prompt

    def begins_with(self, row: rows.Prefixes) -> None:
        if row.first > 0 and row.stride > 0:
            for i, digest in enumerate((row.digest0, row.digest1, row.digest2, row.digest3)):
                if digest:
                    self.prefixes[digest] = row.first + i * row.stride

    def comes_after(self, resets: int) -> None:
        """It was asked for after so many resets of its connector's store: its tokens have digests that no
        request before the last reset has."""
        other = resets * _OF_A_RESET & _DIGEST

        def of(digest: int) -> int:
            return digest and digest ^ other

        self.digest, self.prefix = of(self.digest), of(self.prefix)
        self.prefixes = {of(digest): tokens for digest, tokens in self.prefixes.items()}

    def look_up(self, row: rows.Lookup) -> None:
        answer = None if row.external == NONE_ANSWER else row.external
        asynchronous = bool(rows.flags(row.head) & Flag.ASYNC)
        new = Admission(row.t0, row.step, max(0, row.local), answer, asynchronous)
        if len(self.lookups) > self.admission and self.lookups[-1].accepted is None:
            self.lookups[-1] = new  # asked again while it waits: one admission, one lookup
        else:
            self.lookups.append(new)

    def allocate(self, row: rows.Allocation) -> None:
        if len(self.lookups) <= self.admission:
            return
        last = self.lookups[-1]
        took = row.external > 0 and row.step == last.step
        self.lookups[-1] = last._replace(
            # An asynchronous load is announced twice, the second time with 0.
            accepted=max(last.accepted or 0, row.external),
            allocated_t=last.allocated_t or (row.t0 if took else 0),
        )

    def compute(self, row: rows.Chunk) -> None:
        """One prefill chunk; at an admission it also shows what was reused before its start."""
        start = max(0, row.start)
        if not self.chunks or rows.flags(row.head) & (Flag.FIRST | Flag.RESUMED):
            self._admit(start)
        self.chunks.append(ComputedChunk(row.t, row.step, start, start + max(0, row.tokens)))
        if self.prompt < 0:
            self.prompt = row.prompt
        self.block = self.block or max(0, row.block)

    def _admit(self, start: int) -> None:
        answered = [one for one in self.lookups[self.admission :] if one.answer is not None]
        self.admission = len(self.lookups)
        loaded = local = 0
        if answered:
            last = answered[-1]
            local = min(last.local, start)
            accepted = last.accepted if last.accepted is not None else max(0, last.answer or 0)
            loaded = min(accepted, start - local)
        # What was computed before a preemption was computed here, whoever gives it back.
        seen = self.reach
        if loaded:
            self.external.append((max(seen, local), local + loaded))
            self.reused.append((seen, local))
            self.reused.append((max(seen, local + loaded), start))
        else:
            self.reused.append((seen, start))

    def store(self, row: rows.MetadataEntry) -> None:
        asynchronous = bool(rows.flags(row.head) & Flag.ASYNC)
        entry = StoreEntry(row.step, row.slots, row.tokens, row.start, 0, asynchronous)
        # A connector inside another one says the same again in the same step.
        if entry not in self.stores[-_SAME_STEP:]:
            self.stores.append(entry)

    def preempt(self, row: rows.Preemption) -> None:
        self.preemptions += 1
        self.preempt_step = max(self.preempt_step, row.step)
        self.reach = max([self.reach, row.computed, *(chunk.end for chunk in self.chunks)])
        self.preempted.append((row.step, row.computed if row.computed > 0 else self.reach))

    def settled(self, transfers: tuple[Transfer, ...], unreadable: Steps) -> Request:
        """The request, with what needs all records."""
        computed = self._computed()
        prompt = max(0, self.prompt)
        return Request(
            id=self.id,
            engine=self.engine,
            prompt=prompt,
            computed=computed,
            t_first=self.t_first,
            digest=self.digest,
            salt=self.salt,
            prefix=self.prefix,
            block=self.block,
            lookups=tuple(self.lookups),
            chunks=tuple(self.chunks),
            entries=tuple(_placed(self, prompt, computed)),
            unread=self.unread or bool(self.chunks and self.chunks[-1].step in unreadable),
            transfers=transfers,
            load_steps=tuple(sorted(self.load_steps)),
            reused=tuple(self.reused),
            external=tuple(self.external),
            finish=self.finish,
            preemptions=self.preemptions,
            preempt_step=self.preempt_step,
            preempted=tuple(self.preempted),
            first_step=self.first_step,
            last_step=self.last_step,
            prefixes=self.prefixes,
            grown=tuple(self.grown),
        )

    def _computed(self) -> int:
        ends = [0, self.reach, *(chunk.end for chunk in self.chunks)]
        # vLLM counts what an asynchronous load is to bring as computed before it is there.
        if self.finish is not None and (self.chunks or self.reach or not self.lookups):
            ends.append(self.finish.computed)
        return max(ends)


def _placed(draft: _Draft, prompt: int, computed: int) -> Iterable[StoreEntry]:
    """The store entries with their positions, and with how far the request was by then."""
    stores = draft.stores
    reach: list[tuple[int, int]] = []  # step, positions computed by its end
    for chunk in draft.chunks:
        reach.append((chunk.step, max(chunk.end, reach[-1][1] if reach else 0)))
    stored = at = 0
    for entry in stores:
        while at < len(reach) and reach[at][0] <= entry.step:
            at += 1
        available = reach[at - 1][1] if at else 0
        grows = next((one for one in draft.grown if one.step > entry.step), None)
        had, got = (grows.before, grows.start) if grows else (prompt, computed)
        decodes = at == len(reach) or (grows is not None and reach[at][0] >= grows.step)
        if decodes and available >= had and (not at or entry.step > reach[at - 1][0]):
            available = got  # a decode step: how far it got is not recorded
        size = entry.slots if entry.slots >= 0 else max(entry.tokens, -1)
        start = entry.start
        if size >= 0 and start < 0:
            # Without a position: on from what is stored. Where that overshoots what there
            # is, the entry counts from the start again.
            start = stored if stored + size <= available else max(0, min(stored, available - size))
        if size >= 0:
            stored = max(stored, start + size)
        yield entry._replace(slots=size, start=max(0, start), available=available)


# ---------------------------------------------------------------------------- one spool


class _SpoolReader:
    """One spool's records about requests. ``unreadable``: steps with an entry that cannot be used."""

    def __init__(self, scan: SpoolScan) -> None:
        self._scan = scan
        self._open: dict[str, _Draft] = {}
        self.drafts: list[_Draft] = []
        self.unreadable: list[int] = []
        self._unsized: set[int] = set()

    def read(self) -> None:
        readers: dict[int, tuple[type[Any], Callable[[Any], None]]] = {  # by the head's lowest byte
            Kind.REQUEST: (rows.Arrival, self._arrival),
            Kind.PREFIX: (rows.Prefixes, self._prefixes),
            Kind.GROWN: (rows.Growth, self._to(_Draft.grow)),
            Kind.LOOKUP: (rows.Lookup, self._to(_Draft.look_up)),
            Kind.ALLOC: (rows.Allocation, self._to(_Draft.allocate)),
            Kind.CHUNK: (rows.Chunk, self._chunk),
            Kind.META: (rows.MetadataEntry, self._metadata),
            Kind.PREEMPT: (rows.Preemption, self._to(_Draft.preempt)),
            Kind.FINISH: (rows.Finish, self._finish),
        }
        for words in rows.one_by_one(self._scan.of_requests):
            found = readers.get(words[0] & 0xFF)
            if found is not None:
                row, read = found
                read(row._make(words))
        tags = self._scan.scheduled
        for draft in self.drafts:
            if not draft.engine and tags:
                draft.engine = max(tags)
            # Beside an entry that does not say how much, the size of its neighbours is a guess.
            draft.stores = [entry for entry in draft.stores if entry.step not in self._unsized]

    def _draft(self, name_id: int, step: int, t: int) -> _Draft:
        """The request that a record speaks of, as far as it was read."""
        name = self._scan.names.get(name_id, f"request #{name_id}")
        draft = self._open.get(name)
        tag = step >> STEP_SHIFT
        if draft is not None and tag and draft.engine and draft.engine != tag:
            draft = None  # the same id in another engine of this process
        if draft is None:
            draft = self._open[name] = _Draft(name, t)
            self.drafts.append(draft)
        draft.engine = draft.engine or tag
        draft.saw(step)
        return draft

    def _to(self, tell: Callable[[_Draft, Any], None]) -> Callable[[Any], None]:
        """Tells the request of a record that stands for no more than itself; its second word is its time."""
        return lambda row: tell(self._draft(row.request, row.step, row[1]), row)

    def _arrival(self, row: rows.Arrival) -> None:
        name = self._scan.names.get(row.request, f"request #{row.request}")
        before = self._open.get(name)
        if before is not None and before.finish is not None:
            del self._open[name]  # the id is used again
        self._draft(row.request, 0, row.t).arrive(row)

    def _prefixes(self, row: rows.Prefixes) -> None:
        draft = self._open.get(self._scan.names.get(row.request, ""))
        if draft is not None:
            draft.begins_with(row)

    def _chunk(self, row: rows.Chunk) -> None:
        if row.step > 0 and row.step & STEP_MASK:
            self._draft(row.request, row.step, row.t).compute(row)

    def _metadata(self, row: rows.MetadataEntry) -> None:
        if row.step <= 0 or not row.step & STEP_MASK:
            return
        marks = rows.flags(row.head)
        # Not readable: of unknown shape, given to no request, or without a word of how much of it.
        if marks & Flag.UNREADABLE or (
            marks & Flag.STORE and (not row.request or max(row.slots, row.tokens) < 0)
        ):
            self.unreadable.append(row.step)
            if row.request and not marks & Flag.UNREADABLE:
                self._unsized.add(row.step)
        elif marks & Flag.STORE:
            self._draft(row.request, row.step, row.t).store(row)
        elif not marks & Flag.LOAD and row.request:
            self._draft(row.request, row.step, row.t).unread = True
        if marks & Flag.LOAD and row.request:
            self._draft(row.request, row.step, row.t).load_steps.add(row.step)

    def _finish(self, row: rows.Finish) -> None:
        draft = self._draft(row.request, row.step, row.t)
        status = self._scan.names.get(row.status_name, "").rsplit(".", 1)[-1]
        draft.finish = RequestEnd(row.t, row.step, max(0, row.computed), max(0, row.output), status)
        draft.preemptions = max(draft.preemptions, row.preemptions)


# ---------------------------------------------------------------------------- transfers


def _transfers(scans: Sequence[SpoolScan], requests: Sequence[_Draft]) -> dict[int, list[Transfer]]:
    """Begins and ends of asynchronous transfers by the request's row, in the order of the spools: workers
    report them too, and know a request by its id alone."""
    by_id = rows_by_id(requests)
    found: dict[int, list[Transfer]] = defaultdict(list)
    for scan in scans:
        kinds = rows.kind(scan.of_requests[:, 0])
        for words in scan.of_requests[(kinds == Kind.OPEN) | (kinds == Kind.DONE)].tolist():
            record = rows.decode(words)
            assert isinstance(record, (rows.TransferBegun, rows.TransferDone))
            marks = rows.flags(record.head)
            at = owner(by_id.get(scan.names.get(record.request, ""), ()), requests, record.step, record.t)
            if at is None:
                continue
            found[at].append(
                Transfer(
                    t=record.t,
                    step=record.step,
                    begun=isinstance(record, rows.TransferBegun),
                    store=bool(marks & Flag.STORE),
                    load=bool(marks & Flag.LOAD),
                    spool=scan.name if rows.role(record.head) == Role.WORKER else "",
                    failed=isinstance(record, rows.TransferDone) and record.failed > 0,
                )
            )
    return found


def by_engine(requests: Sequence[Request]) -> dict[int, dict[int, Request]]:
    """Engine -> row -> request."""
    found: dict[int, dict[int, Request]] = defaultdict(dict)
    for row, request in enumerate(requests):
        found[request.engine][row] = request
    return found


def rows_by_id(requests: Sequence[Request | _Draft]) -> dict[str, list[int]]:
    """Rows of the requests by the engine's id: several may have the same one after the other."""
    found: dict[str, list[int]] = defaultdict(list)
    for row, request in enumerate(requests):
        found[request.id].append(row)
    return found


def owner(candidates: Iterable[int], requests: Sequence[Request | _Draft], step: int, t: int) -> int | None:
    """Of several requests with the same id the latest one that had arrived, None where none fits."""
    tag = step >> STEP_SHIFT
    fitting = [row for row in candidates if not tag or requests[row].engine == tag]
    before = [row for row in fitting if requests[row].t_first <= t]
    return before[-1] if before else (fitting[0] if fitting else None)
