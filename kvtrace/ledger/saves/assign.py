"""The ledger of saves: every position of every request, in every pair, has exactly one outcome.

A pair is one KV-owning layer on one rank. Pairs that fared alike in all steps of a request
form a class and are counted together: intervals of positions times the number of pairs.
Positions that were not saved leave here as *lost*, with where their way ended; the
rules in ``kvtrace.causes`` say which cause stands behind it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvtrace.ledger.ends import NOT_SAVED, Outcome, SaveEnd
from kvtrace.ledger.intervals import Interval, intersect, length, subtract
from kvtrace.ledger.loads.outcome import Arrived
from kvtrace.ledger.requests import Request, by_engine
from kvtrace.ledger.run import Engine, LostSpan, OfferedEntry, OutcomeAmount, Span, Trust
from kvtrace.ledger.saves.joint import joint_segments
from kvtrace.ledger.saves.pairs import Pairs, SaveEvidence, pairs_of
from kvtrace.ledger.saves.positions import IN_GPU_CACHE, PositionsEvidence, Segment, reuse_of
from kvtrace.ledger.steps import Array
from kvtrace.ledger.whole import least, swept
from kvtrace.terms import NOT_OBSERVED, PENDING, SAVED, Grade

_BEFORE_A_READ = frozenset(SaveEnd(code) for code in range(SaveEnd.NO_CONNECTOR, SaveEnd.CAUGHT + 1))
"""Ends that are known of a rank whether its reads were watched or not."""


@dataclass(frozen=True)
class RequestSaves:
    """One request's part in the ledger of saves."""

    saved: int = 0  # token-layers
    unsaved: int = 0
    diverged: bool = False  # ranks that hold a part of the same layer saved different amounts
    local: int = 0  # positions
    external: int = 0


@dataclass(frozen=True)
class Saves:
    """The ledger of saves, before the causes are named. Tables as in :class:`~kvtrace.ledger.run.Run`."""

    total: int
    base: Sequence[OutcomeAmount]
    lost: Sequence[LostSpan]
    entries: Sequence[OfferedEntry]
    requests: tuple[RequestSaves, ...]
    spans: tuple[Span, ...]
    trust: Trust
    ways: Mapping[int, PositionsEvidence] = field(default_factory=dict)
    """By the request's row."""
    whole: Sequence[OutcomeAmount] = ()
    kept: Mapping[int, Array] = field(default_factory=dict)
    """Engine -> prompt tokens that were saved, and that may have been, pair by pair; shape (pairs, 2)."""


def assign(
    requests: Sequence[Request],
    engines: Sequence[Engine],
    evidence: SaveEvidence,
    loads: Mapping[int, Arrived],
    watch: Collection[str] = (),
    parts: Sequence[Mapping[int, PositionsEvidence]] = (),
) -> Saves:
    """Assign each position its outcome.

    Args:
        loads: what became of the accepted loads, by the request's row.
        watch: ids of the requests whose spans are kept.
        parts: of engines with several connectors, the ways of each of these: saved is what any of them saved.

    Raises:
        AssertionError: the outcomes do not sum to positions x pairs.
    """
    of_engine = by_engine(requests)
    made = {engine.tag: pairs_of(engine, of_engine[engine.tag], evidence) for engine in engines}
    total = 0
    base: list[OutcomeAmount] = []
    lost: list[LostSpan] = []
    whole: list[OutcomeAmount] = []
    kept = {tag: np.zeros((len(pairs), 2), dtype=np.int64) for tag, (pairs, _) in made.items()}
    found: list[RequestSaves] = []
    spans: list[Span] = []
    ways: dict[int, PositionsEvidence] = {}
    for row, request in enumerate(requests):
        if request.engine not in made:
            found.append(RequestSaves())
            continue
        way = ways[row] = _way(row, request, made[request.engine][0], evidence, loads.get(row))
        of_parts = [(number, part[row]) for number, part in enumerate(parts) if row in part]
        of_request = _OfRequest(row, way, of_parts)
        base += of_request.base()
        lost += of_request.lost()
        whole += of_request.whole()
        kept[request.engine] += of_request.kept()
        found.append(of_request.sums())
        total += request.computed * len(way.pairs)
        if request.id in watch:
            spans += of_request.spans()
    result = Saves(
        total,
        base=base,
        lost=lost,
        entries=_entries(requests),
        requests=tuple(found),
        spans=tuple(spans),
        trust=sum((trust for _, trust in made.values()), Trust()),
        ways=ways,
        whole=whole,
        kept=kept,
    )
    _check(result)
    return result


def _check(saves: Saves) -> None:
    assigned = sum(one.amount for one in saves.base)
    assigned += sum((one.end - one.start) * one.pairs for one in saves.lost)
    assert assigned == saves.total, f"token ledger: {assigned} of {saves.total} token-layers have an outcome"


def _way(
    row: int, request: Request, pairs: Pairs, evidence: SaveEvidence, load: Arrived | None
) -> PositionsEvidence:
    reuse = reuse_of(request, load.lost if load else {})
    unfinished = evidence.unfinished.get(row, {})
    # An address leads another engine to the KV where it was computed: nobody needs to have stored it.
    proved = evidence.kept if pairs.out_of_sight else evidence.proved
    back = proved.get(row, ()), evidence.unequal.get(row, ())
    return PositionsEvidence(row, request, pairs, reuse, unfinished, evidence.unknown, load, *back)


def _entries(requests: Sequence[Request]) -> list[OfferedEntry]:
    return [
        OfferedEntry(
            row, request.engine, entry.step, entry.slots, entry.tokens, entry.start, entry.available,
            entry.asynchronous, entry.implied,
        )
        for row, request in enumerate(requests)
        for entry in request.entries
    ]  # fmt: skip


@dataclass(frozen=True)
class _Class:
    """Pairs in which a request fared alike."""

    pairs: int
    live: bool
    segments: Sequence[Segment]

    @property
    def saved(self) -> int:
        return sum(_length(one) for one in self.segments if one.outcome.name == SAVED)

    @property
    def bounds(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """At least and at most so many were saved by all that is said, where no more counts as lost than what
        never came to a read on that rank; and by the slots that were seen alone. What is not observed may
        have been saved."""
        whole = sum(map(_length, self.segments))
        lost = [one for one in self.segments if one.outcome.name == NOT_SAVED]
        before = sum(_length(one) for one in lost if one.outcome.end in _BEFORE_A_READ)
        seen = [one for one in self.segments if one.outcome.grade >= Grade.READ]
        surely = sum(_length(one) for one in seen if one.outcome.name == SAVED)
        kept = sum(_length(one) for one in seen if one.outcome.name != SAVED)
        return (self.saved, whole - before), (surely, whole - kept)


def _length(one: Segment) -> int:
    return one.end - one.start


class _OfRequest:
    """One request's rows in the tables. ``parts``: of several connectors the ways of each."""

    def __init__(
        self, row: int, way: PositionsEvidence, parts: Sequence[tuple[int, PositionsEvidence]]
    ) -> None:
        self._row, self._way, self._request = row, way, way.request
        of_pair = partial(joint_segments, parts) if parts else way.segments
        counts, evidence = _classes([part for _, part in parts] or [way])
        alike: dict[tuple[bool, tuple[Segment, ...]], list[int]] = defaultdict(list)
        for number, (_, pair) in enumerate(counts):
            alike[bool(way.pairs.live[pair]), tuple(of_pair(pair))].append(number)
        self._classes = [
            _Class(sum(counts[number][0] for number in numbers), live, segments)
            for (live, segments), numbers in alike.items()
        ]
        of = {number: at for at, numbers in enumerate(alike.values()) for number in numbers}
        self._class_of = np.array([of[number] for number in evidence.tolist()], dtype=np.int64)

    def base(self) -> list[OutcomeAmount]:
        """What needs no cause."""
        amounts: Counter[Outcome] = Counter()
        prompts: Counter[Outcome] = Counter()
        for one in self._classes:
            for part in one.segments:
                if part.outcome.name != NOT_SAVED:
                    amounts[part.outcome] += (part.end - part.start) * one.pairs
                    prompts[part.outcome] += self._here(part.outcome, [(part.start, part.end)]) * one.pairs
        return self._rows(amounts, prompts)

    def whole(self) -> list[OutcomeAmount]:
        """The same in tokens: those of which no pair lost its part. What the GPU's prefix cache gave was not
        computed here, also where a save read it again."""
        tokens: Counter[Outcome] = Counter()
        prompts: Counter[Outcome] = Counter()
        parts = [
            (part.start, part.end, part.outcome, one.pairs) for one in self._classes for part in one.segments
        ]
        for start, end, outcomes in swept(parts):
            outcome = least(outcomes)
            if outcome.name == NOT_SAVED:
                continue
            again = intersect([(start, end)], self._way.reuse.local if outcome.name == SAVED else [])
            for one, of in ((outcome, subtract([(start, end)], again)), (IN_GPU_CACHE, again)):
                if of:
                    tokens[one] += length(of)
                    prompts[one] += self._here(one, of)
        return self._rows(tokens, prompts)

    def kept(self) -> Array:
        """Prompt tokens that were saved, and that may have been, pair by pair; shape (pairs, 2)."""
        kept = [
            [
                sum(self._of_prompt(part.start, part.end) for part in one.segments if part.outcome.name in of)
                for of in ((SAVED,), (NOT_OBSERVED, PENDING))
            ]
            for one in self._classes
        ]
        return np.array(kept, dtype=np.int64)[self._class_of]

    def _here(self, outcome: Outcome, parts: list[Interval]) -> int:
        """Prompt tokens, without those that the connector was to bring, where it is not known whether it did:
        nobody computed them here."""
        if outcome.name == NOT_OBSERVED:
            reuse = self._way.reuse
            parts = subtract(parts, subtract(reuse.external, reuse.computed))
        return sum(self._of_prompt(*part) for part in parts)

    def _of_prompt(self, start: int, end: int) -> int:
        return max(0, min(end, self._request.prompt) - start)

    def _rows(self, amounts: Mapping[Outcome, int], prompts: Mapping[Outcome, int]) -> list[OutcomeAmount]:
        return [
            OutcomeAmount(
                self._row, self._request.engine, outcome.name, outcome.code, amount, prompts[outcome],
                outcome.grade, outcome.sent_to,
            )
            for outcome, amount in amounts.items()
        ]  # fmt: skip

    def lost(self) -> list[LostSpan]:
        """What was not saved, prompt and decode apart."""
        return [
            LostSpan(
                self._row, self._request.engine, low, high, one.pairs, phase,
                _step(self._request, part.chunk), SaveEnd(part.outcome.code), one.live, part.outcome.grade,
                part.part,
            )
            for one in self._classes
            for part in one.segments
            if part.outcome.name == NOT_SAVED
            for low, high, phase in _phases(part, self._request.prompt)
        ]  # fmt: skip

    def sums(self) -> RequestSaves:
        bounds = np.array([one.bounds for one in self._classes], dtype=np.int64).reshape(-1, 2, 2)
        of_pairs = bounds[self._class_of]
        return RequestSaves(
            saved=sum(one.saved * one.pairs for one in self._classes),
            unsaved=sum(
                (part.end - part.start) * one.pairs
                for one in self._classes
                for part in one.segments
                if part.outcome.name == NOT_SAVED
            ),
            diverged=len(self._classes) > 1
            and any(_ranks_differ(self._way.pairs.layer, *of_pairs[:, at].T) for at in (0, 1)),
            local=length(self._way.reuse.local),
            external=length(self._way.reuse.external),
        )

    def spans(self) -> list[Span]:
        """The segments of each class of pairs."""
        return [
            Span(
                request=self._row, start=part.start, end=part.end, outcome=part.outcome,
                step=_step(self._request, part.chunk), live=one.live,
                pairs=tuple(np.flatnonzero(self._class_of == number).tolist()), part=part.part,
            )
            for number, one in enumerate(self._classes)
            for part in one.segments
        ]  # fmt: skip


def _step(request: Request, chunk: int) -> int:
    return request.chunks[chunk].step if chunk >= 0 else 0


def _phases(part: Segment, prompt: int) -> list[tuple[int, int, str]]:
    parts = ((part.start, min(part.end, prompt), "prefill"), (max(part.start, prompt), part.end, "decode"))
    return [(low, high, phase) for low, high, phase in parts if low < high]


def _ranks_differ(layer: Array, least: Array, most: Array) -> bool:
    """Whether a layer was seen saved to different extents by the ranks that hold a part of it. Layers of
    one rank may differ: that is another cause's."""
    if not len(layer) or least.max() <= most.min():
        return False
    _, place = np.unique(layer, return_inverse=True)
    highest = np.zeros(place.max() + 1, dtype=np.int64)
    lowest = np.full(place.max() + 1, most.max())
    np.maximum.at(highest, place, least)
    np.minimum.at(lowest, place, most)
    return bool((highest > lowest).any())


def _classes(ways: Sequence[PositionsEvidence]) -> tuple[list[tuple[int, int]], Array]:
    """Pairs with the same evidence of a request, with each of its connectors: (how many, one of them) each,
    and the class of each pair."""
    n = len(ways[0].pairs)
    if not n:
        return [], np.empty(0, dtype=np.int64)
    table = np.stack([row for way in ways for row in _differing(way)])
    if (table == table[:, :1]).all():
        return [(n, 0)], np.zeros(n, dtype=np.int64)
    _, first, class_of, counts = np.unique(
        table, axis=1, return_index=True, return_inverse=True, return_counts=True
    )
    return list(zip(counts.tolist(), first.tolist(), strict=True)), class_of.reshape(-1)


def _differing(way: PositionsEvidence) -> list[Array]:
    """All in which the pairs of a way may differ, a number a pair each."""
    request, pairs = way.request, way.pairs
    n = len(pairs)
    differing: list[Array] = [pairs.live.astype(np.int64)]
    stores = dict.fromkeys(entry.step for entry in request.entries)
    reads = pairs.reads.get(way.row, ())
    differing += [pairs.calls[step] for step in stores]
    void = np.array([call.void for call in pairs.kinds], dtype=np.int64)
    differing += [void[pairs.calls[read.step]] for read in reads if read.step in pairs.calls]
    sets = [read.pairs for read in reads] + [back for back, _ in (*way.proved, *way.unequal)]
    sets += [*way.reuse.lost.values(), *pairs.misread.get(way.row, {}).values()]
    for members in dict.fromkeys(sets):
        differing.append(np.array([members >> pair & 1 for pair in range(n)], dtype=np.int64))
    if way.unfinished:
        differing.append(np.array([pairs.spool(pair) in way.unfinished for pair in range(n)], np.int64))
    computing = dict.fromkeys(chunk.step for chunk in request.chunks)
    return differing + [pairs.states[step][pairs.worker].astype(np.int64) for step in computing]
