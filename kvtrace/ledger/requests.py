"""The scheduler's records, request by request.

The only place where records are read one by one: there is a handful of them per request,
none per step or per decode token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvtrace.ledger.scan import Array, SpoolScan, Steps
from kvtrace.trace import facts
from kvtrace.trace.format import NONE_ANSWER, STEP_MASK, STEP_SHIFT, Flag, Kind

_SAME_STEP = 8
"""Entries of a request in one step that are compared for being the same one."""


@dataclass
class Lookup:
    step: int
    local: int
    answer: int | None  # None: the connector asked for patience
    accepted: int | None = None  # ALLOC's, where there was one


@dataclass
class Chunk:
    step: int
    start: int
    end: int


@dataclass
class Entry:
    """A store entry of the connector's metadata."""

    step: int
    slots: int  # what it names; -1 where it says nothing readable
    tokens: int
    start: int  # resolved position
    available: int  # positions with KV at the end of that step
    asynchronous: bool
    implied: bool = False  # measured on the workers, in no metadata


@dataclass
class Request:
    id: str
    engine: int = 0
    prompt: int = -1
    digest: int = 0
    prefix: int = 0
    max_tokens: int = 0
    block: int = 0
    t_first: int = 0
    lookups: list[Lookup] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    raw_entries: list[tuple[int, int, int, int, bool]] = field(default_factory=list)
    reused: list[tuple[int, int]] = field(default_factory=list)  # from the GPU's own prefix cache
    external: list[tuple[int, int]] = field(default_factory=list)  # from the connector
    finish: tuple[int, int, int, str] | None = None  # step, computed, output, status
    preemptions: int = 0
    load_entries: int = 0
    steps: list[int] = field(default_factory=list)  # steps of any record, unordered
    reach: int = 0  # positions with KV before the last preemption
    preempt_step: int = 0  # of the last one
    saves: dict[str, str] = field(default_factory=dict)
    """Asynchronous saves that did not end well: worker's spool ("" all) -> pending | never | lost."""
    prefixes: dict[int, int] = field(default_factory=dict)  # keyed digest of a beginning -> its tokens
    _fresh: int = 0  # first lookup of this admission

    @property
    def computed(self) -> int:
        """Positions that ever had KV (computed or reused); where the trace ends before the
        request, what its chunks show."""
        ends = [self.reach, *(chunk.end for chunk in self.chunks)]
        # vLLM counts what an asynchronous load is to bring as computed before it is there.
        if self.finish is not None and (self.chunks or self.reach or not self.lookups):
            ends.append(self.finish[1])
        return max([0, *ends])

    @property
    def looked_up(self) -> Lookup | None:
        """The lookup that counted: the last one with an answer before the request first ran."""
        answered = [lookup for lookup in self.lookups if lookup.answer is not None]
        first = [lookup for lookup in answered if lookup.accepted is not None]
        return first[0] if first else (answered[-1] if answered else None)


@dataclass
class Requests:
    """All requests of a run, and the steps whose metadata could not be read."""

    requests: list[Request] = field(default_factory=list)
    unreadable: Steps = field(default_factory=lambda: Steps(np.empty(0, dtype=np.int64)))
    negative_answers: list[tuple[str, int, int]] = field(default_factory=list)  # id, step, answer


def collect(scans: list[SpoolScan]) -> Requests:
    """Requests in order of arrival, the same whatever the order of the spools."""
    book = Requests()
    dark: list[Array] = []
    for scan in sorted(scans, key=lambda s: s.path.name):
        parents = {fact.parent for fact in scan.facts(facts.Connector)}
        # A connector of connectors is read through its parts.
        dark.extend(steps for ordinal, steps in scan.unreadable.items() if ordinal not in parents)
        if len(scan.rows):
            dark.append(np.array(_read(scan, book), dtype=np.int64))
    book.unreadable = Steps(np.concatenate(dark) if dark else np.empty(0, dtype=np.int64))
    kept = []
    for request in book.requests:
        if request.prompt < 0 and not request.chunks and request.finish is None:
            continue  # named once, never scheduled, nothing known
        _settle(request)
        kept.append(request)
    kept.sort(key=lambda r: (r.t_first, r.engine, r.id))
    book.requests = kept
    book.negative_answers.sort()
    return book


def _read(scan: SpoolScan, book: Requests) -> list[int]:
    """Add a spool's requests to the book; returns steps with an entry that cannot be used."""
    unreadable: list[int] = []
    open_requests: dict[str, Request] = {}
    own_tags = set(scan.scheduled)
    names = scan.names

    def state(name_id: int, step: int, t: int) -> Request:
        name = names.get(name_id, f"request #{name_id}")
        request = open_requests.get(name)
        tag = step >> STEP_SHIFT
        if request is not None and tag and request.engine and request.engine != tag:
            request = None  # the same id in another engine of this process
        if request is None:
            request = Request(id=name, t_first=t)
            open_requests[name] = request
            book.requests.append(request)
        if tag and not request.engine:
            request.engine = tag
        if step & STEP_MASK:
            request.steps.append(step)
        return request

    for w0, a, b, c, d, e, f, g in scan.rows.tolist():
        kind, marks = w0 & 0xFF, (w0 >> 32) & 0xFFFF
        if kind == Kind.CHUNK:
            if c <= 0 or not c & STEP_MASK:
                continue
            request = state(b, c, a)
            _chunk(request, c, d, e, marks)
            if request.prompt < 0:
                request.prompt = f
            request.block = request.block or max(0, g)
        elif kind == Kind.META:
            if c <= 0 or not c & STEP_MASK:
                continue
            if marks & Flag.UNREADABLE:
                unreadable.append(c)
            elif marks & Flag.STORE and b and max(d, e) < 0:
                unreadable.append(c)  # it names the request, and not how much of it
            elif marks & Flag.STORE and b:
                # A connector inside another one says the same again in the same step.
                entry = (c, d, e, f, bool(marks & Flag.ASYNC))
                known = state(b, c, a).raw_entries
                if not any(old == entry for old in known[-_SAME_STEP:]):
                    known.append(entry)
            elif marks & Flag.STORE:
                unreadable.append(c)  # an entry that no request can be given to
            elif marks & Flag.LOAD and b:
                state(b, c, a).load_entries += 1
        elif kind == Kind.LOOKUP:
            request = state(d, c, a)
            answer = None if f == NONE_ANSWER else f
            new = Lookup(c, max(0, e), answer)
            if len(request.lookups) > request._fresh and request.lookups[-1].accepted is None:
                request.lookups[-1] = new  # asked again while it waits: one admission, one lookup
            else:
                request.lookups.append(new)
            if answer is not None and answer < 0:
                book.negative_answers.append((request.id, c, answer))
        elif kind == Kind.ALLOC:
            request = state(d, c, a)
            if request.lookups and len(request.lookups) > request._fresh:
                # An asynchronous load is announced twice, the second time with 0.
                request.lookups[-1].accepted = max(request.lookups[-1].accepted or 0, e)
        elif kind == Kind.REQUEST:
            name = names.get(b, f"request #{b}")
            old = open_requests.get(name)
            if old is not None and old.finish is not None:
                del open_requests[name]  # the id is used again
            request = state(b, 0, a)
            if request.prompt < 0 or not request.digest:
                request.prompt, request.digest, request.prefix, request.max_tokens = max(0, d), e, f, g
        elif kind == Kind.FINISH:
            request = state(b, c, a)
            status = names.get(f, "").rsplit(".", 1)[-1]
            request.finish = (c, max(0, d), max(0, e), status)
            request.preemptions = max(request.preemptions, g)
        elif kind == Kind.PREEMPT:
            request = state(b, c, a)
            request.preemptions += 1
            request.preempt_step = max(request.preempt_step, c)
            request.reach = max([request.reach, d, *(chunk.end for chunk in request.chunks)])
    for request in open_requests.values():
        if not request.engine and len(own_tags) == 1:
            request.engine = next(iter(own_tags))
    for request in book.requests:
        if not request.engine and own_tags:
            request.engine = max(own_tags)
    return unreadable


def _chunk(request: Request, step: int, start: int, tokens: int, marks: int) -> None:
    """One prefill chunk; at an admission it also shows what was reused before its start."""
    start = max(0, start)
    if not request.chunks or marks & (Flag.FIRST | Flag.RESUMED):
        fresh = [lookup for lookup in request.lookups[request._fresh :] if lookup.answer is not None]
        request._fresh = len(request.lookups)
        loaded = local = 0
        if fresh:
            last = fresh[-1]
            local = min(last.local, start)
            accepted = last.accepted if last.accepted is not None else max(0, last.answer or 0)
            loaded = min(accepted, start - local)
        # What was computed before a preemption was computed here, whoever gives it back.
        seen = request.reach
        if loaded:
            request.external.append((max(seen, local), local + loaded))
            request.reused.append((seen, local))
            request.reused.append((max(seen, local + loaded), start))
        else:
            request.reused.append((seen, start))
    request.chunks.append(Chunk(step, start, start + max(0, tokens)))


def _settle(request: Request) -> None:
    """What needs the whole request: positions of the store entries."""
    request.prompt = max(0, request.prompt)
    computed = request.computed
    reach: list[tuple[int, int]] = []  # step, positions computed by its end
    top = 0
    for chunk in request.chunks:
        top = max(top, chunk.end)
        reach.append((chunk.step, top))
    stored = at = 0
    for step, slots, tokens, start, asynchronous in request.raw_entries:
        while at < len(reach) and reach[at][0] <= step:
            at += 1
        available = reach[at - 1][1] if at else 0
        if at == len(reach) and available >= request.prompt and (not reach or step > reach[-1][0]):
            available = computed  # a decode step: how far it got is not recorded
        size = slots if slots >= 0 else max(tokens, -1)
        if size >= 0 and start < 0:
            # Without a position: on from what is stored. Where that overshoots what there
            # is, the entry counts from the start again.
            start = stored if stored + size <= available else max(0, min(stored, available - size))
        if size >= 0:
            stored = max(stored, start + size)
        request.entries.append(Entry(step, size, tokens, max(0, start), available, asynchronous))
    request.raw_entries.clear()
