"""What the rules yield (findings, rule-outs, things not observed), and the diagnosis made of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias, TypedDict

from kvtrace.ledger.run import Ledger, RunRequest
from kvtrace.terms import Grade, Stage


@dataclass(frozen=True)
class Event:
    """One concrete moment. ``request`` is the engine's id, ``step`` as in the trace (tag << 32 | n)."""

    request: str
    step: int
    text: str
    rank: int | None = None
    layer: str | None = None


@dataclass
class Finding:
    """A cause that was found. The texts that end in no full stop are clauses: evidence, remedy, headline."""

    id: str
    severity: str
    stage: Stage | None
    title: str
    tokens: float = 0.0
    """Token-layers divided by the pairs of their engine."""
    share: float = 0.0
    """Of all tokens of the ledger that it concerns."""
    requests: int = 0
    evidence: list[str] = field(default_factory=list)
    """Numbers of this run, the most telling first."""
    events: list[Event] = field(default_factory=list)
    remedy: list[str] = field(default_factory=list)
    """The connector's own fix first, then settings of the engine with what they cost."""
    versions: str = ""
    grade: Grade | None = None
    """How well it is seen what became of these tokens: the least of them; None where it concerns none."""
    headline: str = ""
    """What the verdict says after "512 were not saved:", "" for a finding that is no reason."""
    in_files: float = 0.0
    """Tokens that it may concern, by the bytes of files alone: they order it, and are in no ledger."""
    pattern: str = ""
    """What all its requests have in common, and none of those that fared well: ``preempted``."""
    connector: str = ""
    """Whose it is, of several connectors inside one; its tokens and share are those of that one's books."""


class Fields(TypedDict, total=False):
    """Fields of a finding that a rule gives; all others follow from the ledger and the catalogue."""

    severity: str
    tokens: float
    share: float
    requests: int
    evidence: list[str]
    events: list[Event]
    remedy: list[str]
    headline: str
    grade: Grade | None
    in_files: float


@dataclass(frozen=True)
class RuledOut:
    id: str
    evidence: str


@dataclass(frozen=True)
class NotObserved:
    id: str
    why: str


Result: TypeAlias = Finding | RuledOut | NotObserved

Results = Iterator[Result]
"""What a rule yields; nothing where there was nothing to look at."""


@dataclass(frozen=True)
class StageRow:
    """Prompt tokens into and out of a stage (sums over pairs, divided by pairs, rounded)."""

    stage: Stage
    into: int
    out: int
    note: str


@dataclass(frozen=True)
class OfRequest:
    """Tokens of one request. ``caught``: of the unseen ones, those that were read where an exception was
    caught."""

    saved: int = 0
    sent: int = 0
    lost: int = 0
    unseen: int = 0
    caught: int = 0


class JudgedRequest(NamedTuple):
    """A row of Run.requests, and what became of it. ``verdict``: "saved", "loaded", "local-hit", a cause's
    id, ...; ``grade``: of the saved tokens, "" where there are none."""

    request: RunRequest
    verdict: str
    grade: str
    tokens: OfRequest


@dataclass(frozen=True)
class Whole:
    """``tokens``, ``prompts``: outcome -> tokens, and of these the prompts'; ``saved``, ``sent``: prompt
    tokens that were saved by grade, and by peer those only seen leaving for one; ``requests``: by row."""

    tokens: Mapping[str, int] = field(default_factory=dict)
    prompts: Mapping[str, int] = field(default_factory=dict)
    saved: Mapping[Grade, int] = field(default_factory=dict)
    sent: Mapping[str, int] = field(default_factory=dict)
    requests: Mapping[int, OfRequest] = field(default_factory=dict)


@dataclass
class Diagnosis:
    """``parts``: of several connectors inside one, each one's name and its own diagnosis."""

    verdict: str
    findings: list[Finding]
    ruled_out: list[RuledOut]
    not_observed: list[NotObserved]
    saves: Ledger[str]
    loads: Ledger[str]
    stages: list[StageRow]
    requests: Sequence[JudgedRequest]
    """Worst first."""
    parts: Sequence[tuple[str, Diagnosis]] = ()
