"""What became of a request's positions in one pair: the evidence of each, and the one decision."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

from kvtrace.ledger.contents.compare import Returned, returned
from kvtrace.ledger.ends import NOT_LOADED, NOT_SAVED, OTHERS_READ, Blind, LoadEnd, Outcome, SaveEnd
from kvtrace.ledger.intervals import Interval, covers, intersect, subtract, union
from kvtrace.ledger.loads.outcome import Arrived, Part
from kvtrace.ledger.requests import Request
from kvtrace.ledger.saves.pairs import Pairs, StoreResult
from kvtrace.ledger.saves.stores import positions
from kvtrace.ledger.steps import Steps, StepState
from kvtrace.terms import LOADED, LOCAL_HIT, NOT_OBSERVED, PENDING, SAVED, Grade


@dataclass(frozen=True)
class Segment:
    """Positions [start, end) with one outcome. ``chunk``: index of the prefill chunk that computed them, -1
    for none. ``part``: of several connectors the one whose outcome it is."""

    start: int
    end: int
    outcome: Outcome
    chunk: int
    part: int = -1


@dataclass(frozen=True)
class Reuse:
    """What of a request need not be computed, in positions."""

    external: list[Interval]  # the connector is to bring it
    local: list[Interval]  # in the GPU prefix cache
    computed: list[Interval]  # by some chunk
    lost: Mapping[tuple[Part, ...], int]  # of external: as in Arrived

    def lost_in(self, pair: int) -> tuple[Part, ...]:
        return next((parts for parts, pairs in self.lost.items() if pairs >> pair & 1), ())


def reuse_of(request: Request, lost: Mapping[tuple[Part, ...], int]) -> Reuse:
    """What a request reused, by its chunks and the ledger of loads."""
    chunks = union([*((chunk.start, chunk.end) for chunk in request.chunks), *request.generated])
    external = [(a, min(b, request.computed)) for a, b in union(request.external)]
    if not request.preemptions:
        # What was computed after all, without a preemption, was loaded in vain: the load failed.
        external = subtract(external, chunks)
    local = subtract(subtract(union(request.reused), chunks), external)
    return Reuse(external, local, chunks, lost)


@dataclass(frozen=True)
class PositionsEvidence:
    """All that decides what becomes of one request's positions."""

    row: int
    request: Request
    pairs: Pairs
    reuse: Reuse
    unfinished: Mapping[str, SaveEnd]  # as in SaveEvidence, of this request
    unknown: Steps  # steps of which it is not known what they stored
    load: Arrived | None = None
    proved: Sequence[Returned] = ()  # as in SaveEvidence, of this request
    unequal: Sequence[Returned] = ()

    def load_grade(self, end: LoadEnd) -> Grade:
        return self.load.grade(end) if self.load else Grade.DECLARED

    def segments(self, pair: int) -> list[Segment]:
        """The positions [0, computed) in one pair, in order; neighbours differ."""
        return merged(_InPair(self, pair).segments())


_SAME = attrgetter("outcome", "chunk", "part")


def merged(segments: Iterable[Segment]) -> list[Segment]:
    """Segments in order, those that follow on and fared alike as one."""
    found: list[Segment] = []
    for one in segments:
        last = found[-1] if found else None
        if last and last.end == one.start and _SAME(last) == _SAME(one):
            found[-1] = Segment(last.start, one.end, last.outcome, last.chunk, last.part)
        else:
            found.append(one)
    return found


# --- the decision


class Token(NamedTuple):
    """All the evidence of one token in one pair.

    Attributes:
        load: how its load ended, and how well that is seen; None where the connector was not to bring it.
        stores: the reads of it, and the calls that were to store it, whatever they came to.
        unfinished: how an asynchronous save of it ended, where not well.
        proved: it came back with the KV that was computed. unequal: other KV came back for it.
        local: it was in the GPU's own prefix cache.
        computed: a step of the trace computed it, which went so; None where none did.
        stale: its slot was read before it was computed.
        for_others: it was read where other tokens' slots were to be, as far as is seen.
        silent: why silence on it says nothing; Blind.NO: whoever stored it would have been seen.
        watched: that nothing else was read in the steps that might have stored it is seen.
    """

    load: tuple[LoadEnd, Grade] | None = None
    stores: tuple[StoreResult, ...] = ()
    unfinished: SaveEnd | None = None
    proved: bool = False
    unequal: bool = False
    local: bool = False
    computed: StepState | None = StepState.RAN
    stale: bool = False
    for_others: bool = False
    silent: Blind = Blind.NO
    watched: bool = False


_PENDING = Outcome(PENDING)
_UNSEEN = Outcome(NOT_OBSERVED, grade=Grade.NOT_OBSERVED)
IN_GPU_CACHE = Outcome(LOCAL_HIT, grade=Grade.READ)


def decide(token: Token) -> Outcome:
    """What became of a token in a pair, once and from all of its evidence."""
    if token.load is not None:
        return _loaded(token, *token.load)
    saved = min((one for one in token.stores if one.end == SaveEnd.SAVED), key=_best_saved, default=None)
    if saved is not None:
        return _saved(token, saved)
    if token.local:
        return IN_GPU_CACHE
    if token.computed is None or token.computed == StepState.NOT_RECORDED:
        return _UNSEEN
    if token.computed == StepState.NOT_REACHED:
        return _PENDING
    return _not_saved(token)


def _loaded(token: Token, end: LoadEnd, grade: Grade) -> Outcome:
    if end == LoadEnd.LOADED:
        return Outcome(LOADED, grade=Grade.PROVED if token.proved else grade)
    if end == LoadEnd.PENDING:
        return _PENDING
    return _UNSEEN if end == LoadEnd.NOT_OBSERVED else Outcome(NOT_LOADED, end, grade)


def _best_saved(one: StoreResult) -> tuple[int, str]:
    """The best first, and what is seen at rest before what was sent."""
    return -one.grade, one.sent_to


def _saved(token: Token, store: StoreResult) -> Outcome:
    grade = _by_return(token, store.grade)
    if token.unfinished == SaveEnd.PENDING:  # what was read is read, whoever hears of it; the rest may come
        return _PENDING if grade < Grade.READ else Outcome(SAVED, grade=grade, sent_to=store.sent_to)
    # What is at rest is saved, whether the scheduler ever hears of it or not.
    if token.unfinished == SaveEnd.FAILED or (token.unfinished and grade < Grade.WRITTEN):
        return Outcome(NOT_SAVED, token.unfinished, Grade.READ)
    return Outcome(SAVED, grade=grade, sent_to="" if grade == Grade.PROVED else store.sent_to)


def _by_return(token: Token, grade: Grade) -> Grade:
    """What came back comes before what sizes say: as many bytes at rest may be others."""
    if token.proved:
        return Grade.PROVED
    return min(grade, Grade.READ) if token.unequal else grade


_BY_RETURN = Outcome(SAVED, grade=Grade.PROVED)  # whoever read it
_STALE = Outcome(NOT_SAVED, SaveEnd.STALE, Grade.READ)


def _not_saved(token: Token) -> Outcome:
    """Of a token that was computed and is not seen in the store: the first stage at which its way ended."""
    if token.silent == Blind.OUT_OF_SIGHT and not (token.proved and token.stale):
        # Unproved: who got it back may have taken it, handed over and not stored.
        return _BY_RETURN if token.proved else _UNSEEN
    return _by_its_call(token, min(token.stores)) if token.stores else _not_named(token)


def _not_named(token: Token) -> Outcome:
    """Of a token that no metadata names and nobody is seen to have read as its own."""
    if token.proved and (token.for_others or (token.silent and not token.stale)):
        return _BY_RETURN
    if token.stale:
        return _STALE
    if token.silent:
        return _UNSEEN
    return Outcome(NOT_SAVED, SaveEnd.NOT_DECLARED, Grade.READ if token.watched else Grade.DECLARED)


def _by_its_call(token: Token, call: StoreResult) -> Outcome:
    """Of a token that was to be stored, or was read: of its calls the one that ended at the first stage."""
    if call.end == SaveEnd.PENDING:
        return _PENDING
    doubted = call.blind == Blind.METADATA_UNREAD  # what was read is seen, and not whether it was named
    stale = token.stale and (doubted or call.end.hook_ran)
    unseen = not stale and (call.end == SaveEnd.NOT_OBSERVED or call.grade == Grade.NOT_OBSERVED)
    if token.proved and (unseen or token.for_others or call.end in OTHERS_READ):
        return _BY_RETURN
    if stale:
        return _STALE
    if doubted and token.watched:  # as if it were not named: nobody read it
        return Outcome(NOT_SAVED, SaveEnd.NOT_DECLARED, Grade.READ)
    if unseen:
        ended = None if call.end == SaveEnd.NOT_OBSERVED else call.end
        return Outcome(NOT_OBSERVED, ended, Grade.NOT_OBSERVED)
    return Outcome(NOT_SAVED, call.end, call.grade)


# --- the evidence


class _InPair:
    """A request's positions in one pair, as intervals with the same evidence."""

    def __init__(self, way: PositionsEvidence, pair: int) -> None:
        self._request, self._way, self._pair = way.request, way, pair
        misread = way.pairs.misread.get(way.row, {})
        self._misread = {step for step, pairs in misread.items() if pairs >> pair & 1}
        """Steps in which other slots were read in the place of the request's."""
        read, self._stale, self._for_others = self._read()
        own = union(positions(way.request, entry) for entry in way.request.entries)
        # What the GPU's prefix cache gave is another request's, unless this one's metadata names it too.
        others = subtract(way.reuse.local, own)
        stores = defaultdict(list, {key: subtract(union(parts), others) for key, parts in read.items()})
        for key, parts in self._declared(union(part for of in read.values() for part in of)).items():
            stores[key] += parts
        self._stores = {key: found for key, parts in stores.items() if (found := union(parts))}
        self._proved = returned(way.proved, 1 << pair)
        self._unequal = returned(way.unequal, 1 << pair)
        self._early = _named_early(way.request)
        self._load = self._of_load()
        self._unfinished = way.unfinished.get("") or way.unfinished.get(way.pairs.spool(pair))
        # Decode steps name no request: all steps of its life count.
        self._decode_unknown = way.pairs.decode_unknown or way.unknown.any_within(
            way.request.first_step, way.request.named_until
        )

    def _of_load(self) -> list[tuple[int, int, LoadEnd]]:
        """What the connector was to bring: how each part of it ended, but for what was computed after all."""
        reuse = self._way.reuse
        lost = reuse.lost_in(self._pair)
        loaded = subtract(reuse.external, union((a, b) for a, b, _ in lost))
        never_came = subtract(reuse.external, union([*loaded, *reuse.computed])) if lost else []
        found = [(a, b, LoadEnd.LOADED) for a, b in loaded]
        for start, end, ended in lost:
            found += [(a, b, ended) for a, b in intersect(never_came, [(start, end)])]
        return found

    def _read(self) -> tuple[dict[StoreResult, list[Interval]], list[Interval], list[Interval]]:
        """Positions that were read in this pair, by what that came to; those that were read before they were
        computed, or as a step had computed them in vain, and not after; and those that were read for others,
        as far as is seen."""
        request, pairs = self._request, self._way.pairs
        found: dict[StoreResult, list[Interval]] = defaultdict(list)
        stale: list[Interval] = []
        for_others: list[Interval] = []
        for read in pairs.reads.get(self._way.row, ()):
            if not read.pairs >> self._pair & 1:
                continue
            # Whole blocks are read, however far they are filled: of decode tokens that says nothing.
            stale += intersect(list(read.stale), [(0, request.at_step(read.step)[0])])
            if read.step in self._misread:
                for_others += read.positions
            elif not self._void(read.step):
                own = intersect(union(read.positions), [(0, request.computed)])
                vain = request.computed_anew(read.step)
                stale += intersect(own, vain)
                found[read.result] += subtract(own, vain)
        every = union(part for parts in found.values() for part in parts)
        early = self._meant(subtract(union(stale), every))
        return found, early, union(for_others)

    def _meant(self, early: list[Interval]) -> list[Interval]:
        """Of positions that were read too early alone, those that were to be stored: a last block that is not
        full is read with others, and may be left out where no metadata names it."""
        request = self._request
        whole = request.prompt // request.block * request.block if request.block else request.prompt
        named = union(positions(request, entry) for entry in request.entries if not entry.implied)
        return [part for part in early if part[0] < whole or intersect([part], named)]

    def _void(self, step: int) -> bool:
        """Whether what was read in a step is not in the store."""
        pairs = self._way.pairs
        return step in pairs.calls and pairs.call(step, self._pair).void

    def _declared(self, read: list[Interval]) -> dict[StoreResult, list[Interval]]:
        """Positions that a store entry names and that were not ``read``, by how its call ended."""
        request, pairs = self._request, self._way.pairs
        found: dict[StoreResult, list[Interval]] = defaultdict(list)
        for entry in request.entries:
            start, end = positions(request, entry)
            misread = entry.step in self._misread
            if end <= start or (entry.implied and misread):
                continue
            call = pairs.call(entry.step, self._pair)
            silent = entry.implied and not call.void  # what is void was read
            end_of = (call.unnamed_end, Grade.READ) if silent else (call.end, call.grade)
            store = StoreResult(*end_of, blind=call.blind)
            if misread and store.end == SaveEnd.SAVED:  # the metadata names the wrong ones itself
                store = StoreResult(SaveEnd.NOT_OBSERVED, Grade.NOT_OBSERVED, blind=Blind.UNSEEN)
            found[store] += subtract([(start, end)], read)
        return found

    def segments(self) -> Iterator[Segment]:
        marks = self._marks()
        for (start, end), (chunk, state) in zip(pairwise(marks), self._computed_by(marks), strict=True):
            yield Segment(start, end, decide(self._token(start, chunk, state)), chunk)

    def _marks(self) -> list[int]:
        """Where anything changes: between two marks all positions have the same evidence."""
        request, reuse = self._request, self._way.reuse
        marks = {0, request.computed, min(request.prompt, request.computed)}
        load = [(a, b) for a, b, _ in self._load]
        chunks = [(chunk.start, chunk.end) for chunk in request.chunks]
        known = (reuse.local, self._stale, self._early, self._for_others, load, chunks, request.generated)
        back = (self._proved, self._unequal)
        for intervals in (*known, *back, *self._stores.values()):
            for interval in intervals:
                marks.update(interval)
        return sorted(mark for mark in marks if 0 <= mark <= request.computed)

    def _computed_by(self, marks: Sequence[int]) -> list[tuple[int, StepState]]:
        """Of the positions between each two marks the chunk that computed them (-1 none), and the state of
        its step: of several chunks the first one that ran."""
        request, pairs = self._request, self._way.pairs
        worker = int(pairs.worker[self._pair])
        at = {mark: i for i, mark in enumerate(marks)}
        found = [(-1, StepState.RAN)] * max(0, len(marks) - 1)
        for index, chunk in enumerate(request.chunks):
            state = StepState(int(pairs.states[chunk.step][worker]))
            end = min(chunk.end, request.computed)
            for i in range(at[chunk.start], at[end]) if chunk.start < end else ():
                known, state_before = found[i]
                if known < 0 or state < state_before:
                    found[i] = (index, state)
        return found

    def _token(self, at: int, chunk: int, state: StepState) -> Token:
        way, request = self._way, self._request
        load = next(((end, way.load_grade(end)) for a, b, end in self._load if a <= at < b), None)
        generated = at >= request.prompt or covers(request.generated, at)
        silent, watched = self._silent(at, chunk)
        return Token(
            load=load,
            stores=tuple(store for store, parts in self._stores.items() if covers(parts, at)),
            unfinished=self._unfinished,
            proved=covers(self._proved, at),
            unequal=covers(self._unequal, at),
            local=covers(way.reuse.local, at),
            computed=state if chunk >= 0 or generated else None,
            stale=covers(self._stale, at),
            for_others=covers(self._for_others, at),
            silent=silent,
            watched=watched,
        )

    def _silent(self, at: int, chunk: int) -> tuple[Blind, bool]:
        """Of a position that nothing names and nobody was seen to read: why that says nothing; and whether
        that nobody did is seen."""
        request, way = self._request, self._way
        if way.pairs.out_of_sight:
            return Blind.OUT_OF_SIGHT, False
        if self._unfinished == SaveEnd.PENDING and all(entry.implied for entry in request.entries):
            return Blind.UNSEEN, False  # a save is under way, and no metadata says of what
        if chunk < 0:
            return Blind.METADATA_UNREAD if self._decode_unknown else Blind.NO, False
        step = request.chunks[chunk].step
        if way.unknown.any_within(step, max(step, request.named_until)):
            return Blind.METADATA_UNREAD, False
        watched = all(one.step in way.pairs.settled for one in request.chunks if one.step >= step)
        return (Blind.UNSEEN if not watched and covers(self._early, at) else Blind.NO), watched


def _named_early(request: Request) -> list[Interval]:
    """Prompt positions that metadata names in a step which had not computed them yet, and later no more: that
    the worker waits for them, or takes them as they are, the metadata does not say."""
    named = union(positions(request, entry) for entry in request.entries)
    early = union(
        (max(entry.start, entry.available), min(entry.start + entry.slots, request.at_step(entry.step)[0]))
        for entry in request.entries
        if not entry.implied and entry.start + entry.slots > entry.available
    )
    return subtract(early, named)
