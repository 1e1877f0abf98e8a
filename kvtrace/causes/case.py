"""A run, prepared for the rules: requests with store entries, units, lost tokens by cause."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, TypeVar, cast

from kvtrace.causes.cause import Cause
from kvtrace.causes.diagnosis import Event, Fields, Finding, OfRequest, Whole
from kvtrace.causes.evidence.taken import kept
from kvtrace.causes.evidence.unit import Sample, StoredUnits, Unit, infer_unit
from kvtrace.ledger.ends import NOT_SAVED, OTHERS_READ, SaveEnd
from kvtrace.ledger.intervals import Interval, subtract, union
from kvtrace.ledger.reported import SAVE_HOOKS, UNFOLLOWED
from kvtrace.ledger.run import Engine, LostSpan, OutcomeAmount, Run
from kvtrace.ledger.values import replace
from kvtrace.terms import NOT_OBSERVED, SAVED, Grade
from kvtrace.words import sentence

if TYPE_CHECKING:
    from typing_extensions import Unpack

MAX_EVENTS = 3


@dataclass
class CaseRequest:
    """One row of Run.requests with its store entries."""

    row: int
    id: str
    engine: int
    prompt: int
    computed: int
    local: int
    external: int
    offered: int
    chunks: int
    chunk_step: int
    first_end: int  # position where the first chunk ended
    first_step: int
    digest: int
    block: int
    status: str
    last_step: int = 0
    preemptions: int = 0
    preempt_step: int = 0  # of the last one
    arrived: int = 0  # the prompt as it arrived, of a streaming session its first part
    grown_step: int = 0  # of the next part, 0 none
    saved: int = 0  # token-layers
    proved: int = 0  # of these, seen at rest when the run was over
    unseen: bool = False  # what became of a part of it is not observed
    caught: int = 0  # token-layers of which it is not, as an exception was caught where they were read
    handed_over: bool = False  # its blocks were kept for an asynchronous save
    taken: int | None = None
    """Positions [0, taken) of the prompt were kept and the others seen not to be; None: not known so."""
    lost: list[Interval] = field(default_factory=list)
    """Parts of its prompt that were offered and are known to be lost, in some pair."""
    grade: Grade | None = None
    """How well it is seen that its saved tokens were: the least of them; None where none were."""
    entries: list[StoredUnits] = field(default_factory=list)

    @property
    def stored_end(self) -> int:
        """How far the declared stores reach, within what had KV."""
        return max((min(e.end, e.available) for e in self.entries), default=0)

    @property
    def empty_entry(self) -> bool:
        """In the metadata with nothing to store, and never with anything."""
        return bool(self.entries) and all(e.slots == 0 for e in self.entries)


@dataclass
class Assigned:
    """The lost tokens that one cause explains: token-layers by request."""

    requests: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # request row -> token-layers
    of_prompts: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # ... at prompt positions
    samples: list[tuple[LostSpan, int, int]] = field(default_factory=list)  # span, start, end
    grades: dict[Grade, int] = field(default_factory=lambda: defaultdict(int))  # token-layers
    at: dict[int, list[tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(list))
    """Request row -> (start, end, pairs) of what was lost there."""


@dataclass
class Case:
    """A run and what the rules ask of it."""

    run: Run
    engines: dict[int, Engine]
    requests: list[CaseRequest]
    units: dict[int, Unit | None]
    empty_before: dict[int, tuple[int, int, int]]
    """Engine -> (step, digest, prompt) of the first request that was offered with 0 slots."""
    assigned: dict[str, Assigned] = field(default_factory=lambda: defaultdict(Assigned))
    """Cause -> the lost tokens that it explains; only causes that have some."""
    found_again: frozenset[int] = frozenset()
    """Engines without one store entry, in which a lookup found a prompt that the run had computed before."""
    unfollowed: frozenset[int] = frozenset()
    """Engines without one store entry, whose save hooks gave KV tensors to what can't be followed."""
    read_steps: frozenset[int] = frozenset()
    """Steps with a store entry whose slots were read, a part of them at least, or others in their place."""
    seen_saves: frozenset[int] = frozenset()
    """Engines of which some token was seen to be saved, by being read at the least."""
    seen_decode: frozenset[int] = frozenset()
    """... and some generated one."""
    declared_saves: frozenset[int] = frozenset()
    """Engines of which the metadata alone says that anything was saved."""
    unheard: Assigned = field(default_factory=Assigned)
    """Tokens that no metadata names, where that says nothing: not observed."""
    whole: Whole = field(default_factory=Whole)
    """The same, and all that was not lost, token by token."""
    ends: set[SaveEnd] = field(default_factory=set)
    """How tokens ended that were assigned to the cause behind that end."""
    _answers: dict[Hashable, object] = field(default_factory=dict)

    def affected(self, cause: Cause) -> list[CaseRequest]:
        """The requests that lost tokens by this cause."""
        assigned = self.assigned.get(cause.id)
        return [self.requests[row] for row in assigned.requests] if assigned else []

    def tokens(self, cause: Cause) -> int:
        """Tokens lost by this cause: most of the layers and ranks that lost a part of each."""
        return self.whole.tokens.get(f"{NOT_SAVED}:{cause.id}", 0)

    @property
    def total_tokens(self) -> float:
        """All positions that ever had KV."""
        return float(sum(r.computed for r in self.requests if r.engine in self.engines))

    def of_request(self, request: CaseRequest) -> OfRequest:
        """What became of the tokens of a request."""
        return self.whole.requests.get(request.row, OfRequest())

    def offers_decode(self, engine: int) -> bool:
        """Whether generated tokens are saved: as was seen of an engine of which any save was, else as its
        metadata says."""
        if engine in self.seen_saves:
            return engine in self.seen_decode
        return self.engines[engine].decode_entries > 0

    def once(self, what: Hashable, make: Callable[[], T]) -> T:
        """The answer to a question about the whole case, which many requests ask: found out once."""
        if what not in self._answers:
            self._answers[what] = make()
        return cast(T, self._answers[what])

    def of_engine(self, tag: int) -> Sequence[CaseRequest]:
        """The requests of one engine, in the order of ``requests``."""
        return self._by_engine.get(tag, ())

    @cached_property
    def _by_engine(self) -> dict[int, list[CaseRequest]]:
        found: dict[int, list[CaseRequest]] = defaultdict(list)
        for request in self.requests:
            found[request.engine].append(request)
        return dict(found)

    @cached_property
    def kept_of(self) -> dict[tuple[int, int, Grade], tuple[list[int], list[int]]]:
        """(engine, digest of a beginning, least grade) -> the steps in which prompts with that beginning
        began, in order, and the most that was kept of one of them before each of these steps, and after the
        last: as it was seen, else as the metadata of what was saved says."""
        rows: dict[tuple[int, int, Grade], list[tuple[int, int]]] = defaultdict(list)
        for row, shared in self.run.in_common.items():
            request = self.requests[row]
            for digest, _ in shared:
                for least in _LEAST:
                    if request.saved > 0 and (request.grade or Grade.DECLARED) >= least:
                        rows[request.engine, digest, least].append((request.chunk_step, kept_end(request)))
        found = {}
        for key, one in rows.items():
            one.sort()
            most = accumulate((taken for _, taken in one), max, initial=0)
            found[key] = ([step for step, _ in one], list(most))
        return found

    @cached_property
    def elsewhere(self) -> Mapping[int, int]:
        """Row of a request -> how many of its first tokens an earlier prompt of another engine has."""
        engines: dict[int, set[int]] = defaultdict(set)
        found = {}
        for row, beginnings in self.run.in_common.items() if len(self.engines) > 1 else ():
            mine = {self.requests[row].engine}
            found[row] = max((tokens for digest, tokens in beginnings if engines[digest] - mine), default=0)
            for digest, _ in beginnings:
                engines[digest] |= mine
        return found

    def alike(self, engine: int, digest: int) -> Sequence[CaseRequest]:
        """The requests of one engine whose prompts have the same tokens, in the order of ``requests``."""
        return self._by_digest.get((engine, digest), ()) if digest else ()

    @cached_property
    def _by_digest(self) -> dict[tuple[int, int], list[CaseRequest]]:
        found: dict[tuple[int, int], list[CaseRequest]] = defaultdict(list)
        for request in self.requests:
            found[request.engine, request.digest].append(request)
        return dict(found)

    def finding(self, cause: Cause, title: str, **given: Unpack[Fields]) -> Finding:
        """A finding; what is not given follows from the ledger and the catalogue."""
        tokens, total = given.get("tokens", self.tokens(cause)), self.total_tokens
        assigned = self.assigned.get(cause.id)
        values: Fields = {
            "severity": cause.severity,
            "tokens": tokens,
            "share": min(1.0, tokens / total) if total else 0.0,
            "requests": len(self.affected(cause)),
            "events": self.events(cause),
            "remedy": [cause.remedy],
            "grade": min(assigned.grades, default=None) if assigned else None,
            **given,
        }
        values["remedy"] = [one if one.startswith("or ") else sentence(one) for one in values["remedy"]]
        return Finding(cause.id, stage=cause.stage, title=title, versions=cause.versions, **values)

    def events(self, cause: Cause) -> list[Event]:
        """Concrete moments of the loss: the largest losses first, one a request."""
        assigned = self.assigned.get(cause.id)
        if assigned is None:
            return []
        found: list[Event] = []
        seen: set[int] = set()
        for span, start, end in sorted(assigned.samples, key=lambda s: (s[1] - s[2], s[0].request)):
            if span.request in seen:
                continue
            seen.add(span.request)
            request = self.requests[span.request]
            what = f"positions {start} to {end}; the prompt has {request.prompt} tokens"
            found.append(Event(request.id, span.step or request.first_step, what))
            if len(found) == MAX_EVENTS:
                break
        return found


T = TypeVar("T")
_SAMPLES = 512


def assign(case: Case, ident: str, span: LostSpan, intervals: Iterable[Interval]) -> None:
    """Give parts of a span to a cause."""
    add(case, case.assigned[ident], span, intervals)


def add(case: Case, assigned: Assigned, span: LostSpan, intervals: Iterable[Interval]) -> None:
    """Count parts of a span in."""
    prompt = case.requests[span.request].prompt
    for start, end in intervals:
        size = (end - start) * span.pairs
        assigned.at[span.request].append((start, end, span.pairs))
        assigned.grades[span.grade] += size
        assigned.requests[span.request] += size
        assigned.of_prompts[span.request] += max(0, min(end, prompt) - start) * span.pairs
        if len(assigned.samples) < _SAMPLES:
            assigned.samples.append((span, start, end))


def make_case(run: Run) -> Case:
    """Read the tables of a run into what the rules ask for, with no token assigned yet."""
    engines = {engine.tag: engine for engine in run.engines}
    requests = _requests(run, engines)
    silent = {tag for tag, engine in engines.items() if not engine.store_entries}
    found_again = frozenset(row.engine for row in run.load_rows if row.shared and row.offered) & silent
    stores = [entry for request in requests if request.saved for entry in request.entries]
    # where something was misplaced, something was read, too
    misplaced = {row.step for row in run.lost if row.ended in OTHERS_READ}
    read_steps = frozenset({entry.step for entry in stores if entry.slots > 0} | misplaced)
    case = Case(run, engines, requests, {}, {}, found_again=found_again, read_steps=read_steps)
    saved = [row for row in run.base if row.outcome == SAVED]
    seen = [row for row in saved if row.grade >= Grade.READ]
    case.seen_saves = frozenset(row.engine for row in seen)
    case.seen_decode = _seen_decode(case, seen)
    case.declared_saves = frozenset(row.engine for row in saved) - case.seen_saves
    pids = {limit.pid for limit in run.watch_limits if limit.hook in SAVE_HOOKS and limit.kind in UNFOLLOWED}
    case.unfollowed = frozenset(
        worker.engine for worker in run.workers() if worker.pid in pids and worker.engine in silent
    )
    for request in requests:
        if request.empty_entry:
            first = (request.entries[0].step, request.digest, request.prompt)
            known = case.empty_before.get(request.engine)
            if known is None or first[0] < known[0]:
                case.empty_before[request.engine] = first
    for tag, engine in engines.items():
        samples = [sample for request in case.of_engine(tag) for sample in _samples(case, request)]
        case.units[tag] = infer_unit(engine, samples, run.run.command)
    return case


def _seen_decode(case: Case, seen: Iterable[OutcomeAmount]) -> frozenset[int]:
    """Engines of which generated tokens were seen to be saved: not only those in the block in which the
    prompt ends, which is read as a whole.

    Args:
        seen: the rows of Run.base that were saved, by being read at the least.
    """
    generated: Counter[int] = Counter()
    for one in seen:
        generated[one.request] += one.amount - one.prompt
    found = set()
    for row, amount in generated.items():
        request = case.requests[row]
        engine = case.engines.get(request.engine)
        if engine is not None:
            room = -request.prompt % max(1, engine.block_size)
            if amount > room * max(1, engine.pairs):
                found.add(engine.tag)
    return frozenset(found)


def _requests(run: Run, engines: Mapping[int, Engine]) -> list[CaseRequest]:
    """The rows of Run.requests, each with its store entries."""
    requests = [
        CaseRequest(
            row=row, id=r.id, engine=r.engine, prompt=r.prompt, computed=r.computed, local=r.local,
            external=r.external, offered=r.offered, chunks=r.chunks, chunk_step=r.chunk_step,
            first_end=r.local + r.external + (r.chunk_tokens[0] if r.chunk_tokens else 0),
            first_step=r.first_step, digest=r.digest, block=r.block, status=r.status,
            last_step=r.last_step, preemptions=r.preemptions, preempt_step=r.preempt_step, saved=int(r.saved),
            arrived=r.arrived, grown_step=r.grown_step,
        )
        for row, r in enumerate(run.requests)
    ]  # fmt: skip
    for p in run.lost:
        if p.phase != "decode" and p.grade >= Grade.READ and p.ended != SaveEnd.NOT_DECLARED:
            requests[p.request].lost.append((p.start, p.end))
    guessed = {p.request for p in run.lost if p.phase != "decode" and p.grade < Grade.READ}
    for b in run.base:
        # What is generated hides no store of the prompt, unless a step's metadata could not be read and of
        # the prompt more is not known.
        request = requests[b.request]
        if b.outcome == SAVED and b.amount:
            request.grade = min(b.grade, request.grade or Grade.PROVED)
            request.proved += b.amount if b.grade >= Grade.PROVED else 0
        request.caught += b.amount if b.outcome == NOT_OBSERVED and b.ended == SaveEnd.CAUGHT else 0
        hides = b.request in guessed and unread_steps(engines.get(b.engine))
        if b.outcome == NOT_OBSERVED and (b.prompt or hides):
            request.unseen = True
    for save in run.async_saves:
        requests[save.request].handed_over = True
    for row, end in kept(run, engines).items():
        if not requests[row].unseen and (requests[row].grade or Grade.PROVED) >= Grade.READ:
            requests[row].taken = end
    for e in run.entries:
        if e.slots >= 0:
            requests[e.request].entries.append(StoredUnits(e.step, e.slots, e.tokens, e.start, e.available))
    return requests


def _samples(case: Case, request: CaseRequest) -> list[Sample]:
    """What a request tells of the unit; a streaming session also by its first part, and by all of it only
    where something of later parts is offered."""
    if not request.grown_step:
        return [_sample(case, request)]
    first = [entry for entry in request.entries if entry.step < request.grown_step]
    whole = [_sample(case, request)] if request.stored_end > request.arrived else []
    return [replace(_sample(case, request), prompt=request.arrived, stores=first, taken=None), *whole]


def _sample(case: Case, request: CaseRequest) -> Sample:
    reused = request.local + request.external > 0 or request.offered > 0
    loaded = reused and not request.saved
    before = kept_before(case, request)
    # What was read of less than earlier stores hold may be a later request's, which shares its blocks.
    if request.preemptions:  # what it lost by that is no rest of a unit
        return Sample(request.prompt, (), explained=True, after_empty=False, first_chunk=None, heard=False)
    another = 0 < (request.taken or 0) < before
    return Sample(
        prompt=request.prompt,
        stores=() if another else request.entries,
        explained=reused or request.computed < request.prompt or before > 0,
        after_empty=after_empty(case, request),
        first_chunk=request.chunk_step if request.chunks >= 2 else None,
        heard=not another
        and ((request.taken is not None and not _held(request)) or not why_unheard(case, request)),
        taken=None if loaded else _own(request, request.taken),
    )


def _own(request: CaseRequest, taken: int | None) -> int | None:
    """What of it its own entries hold: what was read beyond is another's store of a block that both share."""
    return min(taken, request.stored_end) if taken and request.entries else taken


def kept_end(request: CaseRequest) -> int:
    """How many of its first tokens were kept: as it was seen, else as the metadata of what was saved says."""
    if request.taken is not None:
        return request.taken if request.taken > request.local else 0
    return min([request.stored_end, *(start for start, _ in request.lost)]) if request.saved else 0


def kept_parts(request: CaseRequest) -> list[Interval]:
    """Positions that were kept and are not known to be lost: as it was seen, else as the metadata says."""
    if request.taken is not None:  # what the GPU's own prefix cache had nobody need have stored
        kept = [(request.local, request.taken)]
    else:
        kept = [(max(0, entry.start), min(entry.end, entry.available)) for entry in request.entries]
    return subtract(union(kept), union(request.lost))


_LEAST = (Grade.DECLARED, Grade.READ, Grade.WRITTEN)
"""What may be asked of an earlier save."""


def kept_before(
    case: Case, request: CaseRequest, least: Grade = Grade.DECLARED, together: bool = False
) -> int:
    """Leading positions that were kept of an earlier prompt that begins alike, at this grade or better.
    ``together``: or of one that began in the same step."""
    best = 0
    for digest, tokens in case.run.in_common.get(request.row, ()):
        steps, most = case.kept_of.get((request.engine, digest, least), ((), (0,)))
        best = max(best, min(tokens, most[bisect_left(steps, request.chunk_step + together)]))
    return best


def unread_steps(engine: Engine | None) -> bool:
    """Whether steps are left whose metadata could not be read, and that were not watched in full."""
    return engine is None or engine.unreadable_steps > len(engine.watched_steps)


def _held(request: CaseRequest) -> bool:
    """Whether its blocks were kept for a save that nobody saw: it may come after all that was watched."""
    return request.handed_over and not request.entries


def why_unheard(case: Case, request: CaseRequest) -> str:
    """Why it says nothing that no metadata names a store of a request's tokens, "" where it does say so."""
    if request.unseen:
        return "a part of their steps is not observed"
    if _held(request):
        return "their blocks were kept for a save that no metadata names"
    if request.engine in case.unfollowed and not request.entries:
        return "what the save hooks do with the KV tensors could not be followed"
    if request.engine in case.found_again:
        return "lookups find prompts of this run, and no metadata names a store"
    return ""


def after_empty(case: Case, request: CaseRequest) -> bool:
    """Left out of all metadata after a different prompt had been offered with 0 slots."""
    first = case.empty_before.get(request.engine)
    return (
        first is not None
        and not request.entries
        and request.chunk_step >= first[0]
        and (request.digest != first[1] or (not request.digest and request.prompt != first[2]))
    )
