"""What the properties judge: each request as it was asked, what came back, what its engine's spools say."""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from kvtrace.verify.engine import Reply
from kvtrace.verify.evidence import Evidence, RequestSeen
from kvtrace.verify.workload import MODEL, STORE_ACTS, Prompt


class Question(NamedTuple):
    """What decides about an answer."""

    tokens: tuple[int, ...]
    generate: int


@dataclass(frozen=True)
class Asked:
    """One request.

    Attributes:
        job: whose workload it belongs to, and the text of that workload.
        round: its number there; act: what happened before it.
        life: of the engine: each restart begins a new one.
        batch: a number for all that were asked together, growing with time.
    """

    number: int
    job: str
    case: str
    round: int
    act: str
    life: int
    batch: int
    prompt: Prompt
    tokens: Sequence[int]
    reply: Reply
    seen: RequestSeen | None = None
    stored: int = 0
    """Leading tokens that a request had before the last rest, of the same asker, that was answered, in the
    same life of the engine: what was asked just now may still be written, and what outlasts a restart is a
    property of its own."""
    taken: int = 0
    """As many of these as it took, of prompts that are no longer: what it leaves out is its choice."""
    known: int = 0
    """The same of any request made by then, with what it generated: nobody else's tokens may be given. Of one
    with an image in whole blocks."""

    @property
    def id(self) -> str:
        return f"kvverify-{self.number}"

    @property
    def held(self) -> int:
        """Its leading tokens that the connector took, but for the last one: the engine computes that."""
        return min(self.stored, self.taken, len(self.tokens) - 1)

    @property
    def answered(self) -> bool:
        return not self.reply.error and len(self.reply.tokens) > 0

    @property
    def question(self) -> Question:
        return Question(tuple(self.tokens), self.prompt.generate)

    def shared_with(self, other: Asked) -> int:
        """Tokens of whole blocks with which both begin, images and all."""
        mine, theirs = (one.seen.beginnings if one.seen else {} for one in (self, other))
        return max((tokens for digest, tokens in mine.items() if digest in theirs), default=0)

    @property
    def given(self) -> int:
        """Tokens that the connector gave, as far as the scheduler took them."""
        return self.seen.accepted if self.seen is not None else 0

    @property
    def offered_to(self) -> int:
        """How many leading tokens the lookup says are there, with those that the GPU has."""
        return self.seen.local + (self.seen.offered or 0) if self.seen is not None else 0

    @property
    def back(self) -> int:
        """Leading tokens that were there without computing."""
        return self.seen.local + self.seen.accepted if self.seen is not None else 0


@dataclass(frozen=True)
class Death:
    """The engine ended, or was not healthy any more. ``number``: of the last request before that."""

    job: str
    why: str
    number: int


@dataclass(frozen=True)
class EngineFacts:
    """Of the engine, as far as they decide about the workload. 0: not known."""

    block: int
    budget: int
    longest: int
    seqs: int
    unit: int
    blocks: int = 0
    role: str = ""
    looks_up: bool = True
    """Whether its lookup may answer anything but "nothing"."""
    store: bool = False
    """Whether the user named the connector's directory."""
    met: frozenset[str] = frozenset()
    """Of STORE_ACTS what the store was to the connector."""
    adapters: int = 0
    """LoRA adapters that it serves."""
    images: bool = False
    """Whether its model takes more than text."""
    other_model: bool = False
    """Whether it can be started with another model of the same shape."""


@dataclass(frozen=True)
class Settings:
    """What the user states.

    Attributes:
        error: how far KV that comes back may be from what was computed, on the mean of a layer; a single
            number so many times as far as MOST_APART says.
        share: of a step's time that one hook may take.
        all_units: it is said to take every whole unit of a prompt: what it leaves out is no choice.
    """

    error: float = 0.1
    share: float = 0.0
    all_units: bool = False


MOST_APART = 5.0


_LENGTHS = 4
"""Of prompts that came back, at least, for what does not to be below a least size: more than one case has."""

STOPPED = "kvtrace verify was stopped"
"""Why an engine is asked no more that could be."""


@dataclass(frozen=True)
class Arm:
    """What an engine without the connector answered to one prompt: each of several times."""

    replies: tuple[Reply, ...]

    @property
    def steady(self) -> bool:
        """Whether it gave one answer: where that depends on what it reuses of its own prefix cache (vLLM's
        CPU_MLA, 0.32.0) it is no measure of a connector's."""
        return len({reply.tokens for reply in self.replies}) == 1


@dataclass(frozen=True)
class Observed:
    """All of it.

    Attributes:
        died: why the engine could not be asked any more.
        held: rests after which blocks were not given back in time.
        reference: the answers without connector.
        samples: of the processes over many requests: memory, descriptors, threads.
    """

    asked: Sequence[Asked]
    evidence: Evidence
    facts: EngineFacts
    settings: Settings = field(default_factory=Settings)
    died: str = ""
    deaths: Sequence[Death] = ()
    held: Sequence[int] = ()
    resets: int = 0
    resets_known: bool = True
    reference: Mapping[Question, Arm] = field(default_factory=dict)
    patience: float = 0.0
    samples: Sequence[Mapping[str, float]] = ()

    @property
    def stopped(self) -> bool:
        """Before all was asked, in the middle of a batch."""
        return self.died == STOPPED

    def of(self, job: str) -> list[Asked]:
        return [one for one in self.asked if one.job == job]

    @cached_property
    def plain(self) -> list[Asked]:
        """Requests to a store that nobody has damaged yet. Not of workloads with a LoRA adapter, an image or
        another model: what is wrong there alone is a property of its own."""
        adapted = {one.job for one in self.asked if one.prompt.adapter or one.prompt.image}
        whole = (one for one in self.asked if one.number < self.damaged and one.act != MODEL)
        return [one for one in whole if one.job not in adapted]

    @cached_property
    def damaged(self) -> int:
        """Number of the first request to a damaged store; of all it is above, where none was."""
        return min((one.number for one in self.asked if one.act in STORE_ACTS), default=sys.maxsize)

    @cached_property
    def loads(self) -> list[Asked]:
        """Requests for which the scheduler took tokens from the connector. Not those without an answer that
        were asked together with the one in which the engine ended: that is told of their own workload."""
        last = {death.number for death in self.deaths}
        ended = {one.batch for one in self.asked if one.number in last}
        return [one for one in self.plain if one.given > 0 and (one.answered or one.batch not in ended)]

    @cached_property
    def unit(self) -> int:
        """Tokens of which what came back is always a multiple; 0 where nothing did."""
        return math.gcd(self.facts.unit, unit_of(self.loads))

    @cached_property
    def limit(self) -> int:
        """Tokens that a request is given at most: so many, and no more, were given to prompts of several
        lengths of which it has more. 0: there is no such number, or it is as much as a step computes: then
        what later steps saved is not found."""
        most, unit = max((one.given for one in self.loads), default=0), self.unit
        cut = [
            one
            for one in self.loads
            if one.given == most and min(one.taken, len(one.tokens) - 1) >= most + unit
        ]
        lengths = {len(one.tokens) // unit for one in cut}
        return most if len(lengths) > 1 and most != self.facts.budget // unit * unit else 0

    @cached_property
    def least(self) -> int:
        """Tokens that a request must have at least for something to come back: of none that has less anything
        ever did. 0: no such number, too few lengths did to say so, or it is more than a step computes."""
        least = min((max(one.held, one.back) for one in self.loads), default=0)
        told = len({len(one.tokens) for one in self.loads}) >= _LENGTHS
        return least if told and least <= self.facts.budget else 0


def unit_of(loads: Iterable[Asked]) -> int:
    """Tokens of which what came back is always a multiple. The last token of a prompt is computed anyway:
    where all others came back, it may have been there, too."""
    backs = [(one.back, len(one.tokens)) for one in loads]
    sure = math.gcd(*(back for back, prompt in backs if back < prompt - 1))
    return sure or math.gcd(*(prompt for _, prompt in backs))


def taken_unit(asked: Iterable[Asked]) -> int:
    """Tokens of which what the connector takes is always a multiple: of one from which nothing comes back."""
    return math.gcd(*(one.seen.saved // max(1, one.seen.pairs) for one in asked if one.seen))


def with_stored(asked: Sequence[Asked], pair: bool = False) -> list[Asked]:
    """The requests, with ``stored``, ``taken`` and ``known``. Of a pair the first server has just saved each
    prompt."""
    found = []
    held: dict[int, int] = {}  # number of a request -> its leading tokens that the connector has, after it
    beginning = defaultdict(list)  # with this token
    for one in asked:
        beginning[tuple(one.tokens[:1])].append(one)
    for one in sorted(asked, key=lambda one: one.batch):
        whole = one.seen.prompt if one.seen is not None else len(one.tokens)
        stored = known = taken = whole if pair and one.answered else 0
        for other in asked if one.prompt.image else beginning[tuple(one.tokens[:1])]:
            if other is one or other.batch > one.batch:
                continue
            if one.prompt.image:
                known = max(known, one.shared_with(other))
            if one.prompt.image or other.prompt.asker != one.prompt.asker:
                continue
            known = max(known, common(one.tokens, [*other.tokens, *other.reply.tokens]))
            before = other.batch < one.batch and (other.job, other.round) != (one.job, one.round)
            if before and other.life == one.life and other.answered and not other.prompt.leaves:
                same = common(one.tokens, other.tokens)
                # What is taken of a longer prompt may lie in one piece with what this one has not.
                own = held[other.number] if len(other.tokens) <= same else 0
                stored, taken = max(stored, same), max(taken, own)
        # What the GPU's own cache gave, the connector need not have.
        known_back = one.given > 0 or one.back <= taken
        more = one.back + one.seen.taken if one.seen is not None and known_back else 0
        held[one.number] = max(taken, min(more, len(one.tokens)))
        found.append(replace(one, stored=stored, taken=taken, known=known))
    return sorted(found, key=lambda one: one.number)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
