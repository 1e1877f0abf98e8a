"""What became of a request's positions in one pair."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from kvtrace.ledger.ends import NOT_LOADED, NOT_SAVED, LoadEnd, Outcome, SaveEnd
from kvtrace.ledger.intervals import Interval, covers, intersect, subtract, union
from kvtrace.ledger.loads.model import LoadOf, Part
from kvtrace.ledger.requests import Request
from kvtrace.ledger.saves.pairs import Pairs, Read
from kvtrace.ledger.saves.stores import positions
from kvtrace.ledger.steps import Steps, StepState
from kvtrace.terms import LOADED, LOCAL_HIT, NOT_OBSERVED, PENDING, SAVED, Grade

_LOCAL_HIT = Outcome(LOCAL_HIT, grade=Grade.READ)
_PENDING, _NOT_OBSERVED = Outcome(PENDING), Outcome(NOT_OBSERVED, grade=Grade.NOT_OBSERVED)


@dataclass(frozen=True)
class Segment:
    """Positions [start, end) with one outcome. ``chunk``: index of the prefill chunk that computed them, -1
    for none. ``part``: of several connectors the one whose outcome it is."""

    start: int
    end: int
    outcome: Outcome
    chunk: int
    part: int = -1


_FATE = attrgetter("outcome", "chunk", "part")


@dataclass(frozen=True)
class Reuse:
    """What of a request need not be computed, in positions."""

    external: list[Interval]  # the connector is to bring it
    local: list[Interval]  # in the GPU prefix cache
    computed: list[Interval]  # by some chunk
    lost: Mapping[tuple[Part, ...], int]  # of external: as in LoadOf

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
class Way:
    """All that decides what becomes of one request's positions."""

    row: int
    request: Request
    pairs: Pairs
    reuse: Reuse
    unfinished: Mapping[str, SaveEnd]  # as in Evidence, of this request
    unknown: Steps  # steps of which it is not known what they stored
    load: LoadOf | None = None
    proved: Sequence[tuple[int, tuple[Interval, ...]]] = ()  # as in Evidence, of this request

    def load_grade(self, end: LoadEnd) -> Grade:
        return self.load.grade(end) if self.load else Grade.DECLARED

    def segments(self, pair: int) -> list[Segment]:
        """The positions [0, computed) in one pair, in order; neighbours differ."""
        return merged(_InPair(self, pair).segments())


def merged(segments: Iterable[Segment]) -> list[Segment]:
    """Segments in order, those that follow on and fared alike as one."""
    found: list[Segment] = []
    for one in segments:
        last = found[-1] if found else None
        if last and last.end == one.start and _FATE(last) == _FATE(one):
            found[-1] = Segment(last.start, one.end, last.outcome, last.chunk, last.part)
        else:
            found.append(one)
    return found


_Stored = tuple[SaveEnd, int, str]
"""How what was read or named ended, how well that is seen (a Grade), and the peer of what was only sent."""


class _InPair:
    """A request's positions in one pair, as intervals with the same fate."""

    def __init__(self, way: Way, pair: int) -> None:
        self._request, self._way, self._pair = way.request, way, pair
        request, reads = way.request, way.pairs.reads.get(way.row, ())
        self._reads, stale = self._read_in_pair(reads)
        self._read = union(part for parts in self._reads.values() for part in parts)
        self._stale = subtract(stale, self._read)
        stored = self._stored()
        self._saved = sorted(
            (-grade, sent_to, union(parts))
            for (end, grade, sent_to), parts in stored.items()
            if end == SaveEnd.SAVED
        )  # the best first, and what is seen at rest before what was sent
        self._failed = sorted(
            (end, Grade(grade), union(parts))
            for (end, grade, _), parts in stored.items()
            if end != SaveEnd.SAVED
        )  # by stage: the ends are in the order of the stages
        self._proved = union(part for pairs, parts in way.proved if pairs >> pair & 1 for part in parts)
        self._early = _named_early(request)
        self._lost = way.reuse.lost_in(pair)
        external = way.reuse.external
        self._loaded = subtract(external, union((a, b) for a, b, _ in self._lost))
        # To come from the connector, not there when it was needed, and computed by no step.
        self._never_came = (
            subtract(external, union([*self._loaded, *way.reuse.computed])) if self._lost else []
        )
        self._handed_over = way.unfinished.get("") or way.unfinished.get(way.pairs.spool(pair))
        # Decode steps name no request: all steps of its life count.
        self._decode_unknown = way.pairs.decode_unknown or (
            request.last_step > 0 and way.unknown.any_within(request.first_step, request.last_step)
        )

    def _read_in_pair(self, reads: Sequence[Read]) -> tuple[dict[_Stored, list[Interval]], list[Interval]]:
        """Positions that were read in this pair, each by the best that became of it; and those that were
        read before they were computed."""
        by_end: dict[_Stored, list[Interval]] = defaultdict(list)
        stale: list[Interval] = []
        for read in reads:
            if read.pairs >> self._pair & 1:
                if not self._void(read.step):
                    by_end[read.end, read.grade, read.sent_to] += read.positions
                stale += intersect(list(read.stale), [(0, self._request.stood(read.step)[0])])
        found: dict[_Stored, list[Interval]] = {}
        left = [(0, self._request.computed)]
        for key in sorted(by_end, key=lambda key: (key[0], -key[1], key[2])):
            found[key] = intersect(union(by_end[key]), left)
            left = subtract(left, found[key])
        # Whole blocks are read, however far they are filled: of decode tokens that says nothing.
        return found, union(stale)

    def _void(self, step: int) -> bool:
        """Whether what was read in a step is not in the store."""
        pairs = self._way.pairs
        void = pairs.void.get(step)
        return self._misread(step) or (void is not None and bool(void[self._pair]))

    def _misread(self, step: int) -> bool:
        """Whether other slots were read in a step in the place of the request's."""
        return bool(self._way.pairs.misread.get((step, self._way.row), 0) >> self._pair & 1)

    def _stored(self) -> dict[_Stored, list[Interval]]:
        """Positions that were read or that a store entry names, by how that ended and how well it is seen."""
        request, pairs = self._request, self._way.pairs
        found: dict[_Stored, list[Interval]] = defaultdict(list)
        for entry in request.entries:
            start, end = positions(request, entry)
            if end <= start:
                continue
            misread = self._misread(entry.step)
            if entry.implied and misread:
                continue  # read in the place of other tokens
            ends = pairs.implied if entry.implied else pairs.ends
            ended = SaveEnd(int(ends[entry.step][self._pair]))
            grade = int(Grade.READ if entry.implied else pairs.grades[entry.step][self._pair])
            if misread and ended == SaveEnd.SAVED:  # the metadata names the wrong ones itself
                ended, grade = SaveEnd.NOT_OBSERVED, int(Grade.NOT_OBSERVED)
            kept = int(pairs.kept[entry.step][self._pair])
            if kept >= 0:
                # What was read of the step's stores is shared out as they were declared.
                part = max(0, entry.slots) * kept // max(1, pairs.declared[entry.step])
                middle = min(end, start + part)
                found[SaveEnd.SAVED, grade, ""] += [(start, middle)] if middle > start else []
                start = max(start, middle)
            if end > start:
                found[ended, grade, ""] += subtract([(start, end)], self._read)
        own = union(positions(request, entry) for entry in request.entries)
        # What the GPU's prefix cache gave is another request's, unless this one's metadata names it too.
        others = subtract(self._way.reuse.local, own)
        for key, parts in self._reads.items():
            found[key] += subtract(parts, others)
        return found

    def segments(self) -> Iterator[Segment]:
        marks = self._marks()
        for (start, end), (chunk, state) in zip(pairwise(marks), self._computed_by(marks), strict=True):
            yield Segment(start, end, self._outcome(start, chunk, state), chunk)

    def _marks(self) -> list[int]:
        """Where anything changes: between two marks all positions fare alike."""
        request, reuse = self._request, self._way.reuse
        marks = {0, request.computed, min(request.prompt, request.computed)}
        failed = [intervals for _, _, intervals in self._failed]
        saved = [intervals for _, _, intervals in self._saved]
        lost = [(a, b) for a, b, _ in self._lost]
        chunks = [(chunk.start, chunk.end) for chunk in request.chunks]
        known = (self._loaded, self._never_came, reuse.local, self._stale, self._early, self._proved)
        for intervals in (*known, *saved, *failed, lost, chunks, request.generated):
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

    def _outcome(self, at: int, chunk: int, state: StepState) -> Outcome:
        if covers(self._loaded, at):
            proved = covers(self._proved, at)
            grade = Grade.PROVED if proved else self._way.load_grade(LoadEnd.LOADED)
            return Outcome(LOADED, grade=grade)
        if covers(self._never_came, at):
            end = next(end for a, b, end in self._lost if a <= at < b)
            return _load_outcome(end, self._way.load_grade(end))
        saved = next((one for one in self._saved if covers(one[2], at)), None)
        if saved is not None:
            grade = Grade.PROVED if covers(self._proved, at) else Grade(-saved[0])
            # What is at rest is saved, whether the scheduler ever hears of it or not.
            open_end = self._handed_over if grade < Grade.WRITTEN else None
            if open_end == SaveEnd.PENDING:
                return _PENDING
            if open_end or self._handed_over == SaveEnd.FAILED:
                return Outcome(NOT_SAVED, self._handed_over, Grade.READ)
            return Outcome(SAVED, grade=grade, sent_to="" if grade == Grade.PROVED else saved[1])
        if covers(self._way.reuse.local, at):
            return _LOCAL_HIT
        if chunk < 0 and at < self._request.prompt and not covers(self._request.generated, at):
            return _NOT_OBSERVED  # no chunk of the trace computed it
        if state == StepState.NOT_REACHED:
            return _PENDING
        if state == StepState.NOT_RECORDED or self._way.pairs.given_away:
            return _NOT_OBSERVED
        return self._outcome_of_store(at, chunk)

    def _outcome_of_store(self, at: int, chunk: int) -> Outcome:
        """Of a position that was computed and is not in the store."""
        ended, grade = next(
            ((end, grade) for end, grade, intervals in self._failed if covers(intervals, at)),
            (None, Grade.DECLARED),
        )
        if ended == SaveEnd.PENDING:
            return _PENDING
        if covers(self._stale, at) and (ended is None or ended >= SaveEnd.NOTHING_READ):
            return Outcome(NOT_SAVED, SaveEnd.STALE, Grade.READ)
        if ended == SaveEnd.NOT_OBSERVED:
            return _NOT_OBSERVED
        if ended is not None:
            known = grade != Grade.NOT_OBSERVED
            return Outcome(NOT_SAVED if known else NOT_OBSERVED, ended, grade)
        request, way = self._request, self._way
        if chunk < 0:
            unknown = self._decode_unknown
            return _NOT_OBSERVED if unknown else Outcome(NOT_SAVED, SaveEnd.NOT_DECLARED)
        step = request.chunks[chunk].step
        if way.unknown.any_within(step, max(step, request.last_step)):
            return _NOT_OBSERVED
        seen = all(one.step in way.pairs.settled for one in request.chunks if one.step >= step)
        if not seen and covers(self._early, at):
            return _NOT_OBSERVED
        return Outcome(NOT_SAVED, SaveEnd.NOT_DECLARED, Grade.READ if seen else Grade.DECLARED)


def _named_early(request: Request) -> list[Interval]:
    """Prompt positions that metadata names in a step which had not computed them yet, and later no more: that
    the worker waits for them, or takes them as they are, the metadata does not say."""
    named = union(positions(request, entry) for entry in request.entries)
    early = union(
        (max(entry.start, entry.available), min(entry.start + entry.slots, request.stood(entry.step)[0]))
        for entry in request.entries
        if not entry.implied and entry.start + entry.slots > entry.available
    )
    return subtract(early, named)


def _load_outcome(end: LoadEnd, grade: Grade) -> Outcome:
    """The outcome of a position that the connector was to bring and did not."""
    if end == LoadEnd.PENDING:
        return _PENDING
    return _NOT_OBSERVED if end == LoadEnd.NOT_OBSERVED else Outcome(NOT_LOADED, end, grade)
