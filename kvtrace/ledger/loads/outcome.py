"""What the ledger of loads knows of each request, for the rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtrace.ledger.ends import LoadEnd
from kvtrace.ledger.intervals import Interval
from kvtrace.terms import Grade

Part = tuple[int, int, LoadEnd]
"""Positions [start, end) of a prompt, and where their way ended."""
Place = tuple[int, str]
"""Rank and layer."""

# Why the scheduler took fewer tokens than the connector offered.
SKIPS_CACHE, FULL_HIT, ROUNDED, SUB_BLOCK, NO_BLOCKS, FROM_ANOTHER, UNEXPLAINED = (
    "skips-cache", "full-hit", "rounded", "sub-block", "no-blocks", "from-another", "unexplained",
)  # fmt: skip


@dataclass(frozen=True)
class AskedLoad:
    """One request's way from the lookup to the accepted load: what the scheduler's side alone tells. Counts
    are tokens (positions)."""

    request: int  # row in Run.requests
    id: str
    engine: int
    prompt: int
    step: int  # of the lookup, 0 without one
    local: int = 0
    answer: int | None = None  # the connector's, None where it never gave one
    accepted: int = 0
    asynchronous: bool = False
    looked_up: bool = False
    clamp: str = ""  # why fewer were taken than offered
    not_taken: Mapping[LoadEnd, int] = field(default_factory=dict)  # tokens that no worker was to load
    t: int = 0  # of the lookup that was answered, 0 without one

    @property
    def offered(self) -> int:
        """What the connector offered of the tokens that this GPU does not have."""
        return min(max(0, self.answer or 0), max(0, self.prompt - self.local))

    @property
    def positions(self) -> Interval:
        """Those that the scheduler accepted."""
        return self.local, self.local + self.accepted


@dataclass(frozen=True)
class Arrived:
    """What of an accepted load got into the layers. Sets of pairs are a bit each: the engine's workers in
    order, each with its KV layers in order."""

    waited_ns: int = -1  # from the lookup until the KV was there (or the request left), -1 unknown
    measured: bool = False  # the slots written were watched in each pair
    begun: bool = False  # when its attention began was seen in each pair, in the step of the load
    lost: Mapping[tuple[Part, ...], int] = field(default_factory=dict)
    """Accepted positions that did not come, or of which that is not known -> the pairs that fared so."""
    proved: int = 0  # token-layers that were loaded with the KV that the same tokens computed to in this run
    reasons: Mapping[LoadEnd, tuple[str, ...]] = field(default_factory=dict)  # what was seen, few
    places: Mapping[LoadEnd, tuple[Place, ...]] = field(default_factory=dict)  # a few pairs that it concerns
    grades: Mapping[LoadEnd, Grade] = field(default_factory=dict)  # how well an end is seen at the least

    @property
    def other_kv(self) -> bool:
        """Whether other KV than its own came, and in time."""
        return any(end in (LoadEnd.WRONG, LoadEnd.ALTERED) for parts in self.lost for _, _, end in parts)

    def grade(self, end: LoadEnd) -> Grade:
        """How well an end is seen, but for what is proved to be loaded."""
        return self.grades.get(end, Grade.DECLARED)


@dataclass(frozen=True)
class Before:
    """What earlier requests of the run had of the same prompt."""

    saved_before: int = 0  # leading tokens that an earlier request with the same prompt had saved
    saved_by: int = -1  # that request's row in Run.requests
    others_between: int = 0  # different prompts saved between that save and this lookup
    alike: int = 0  # leading tokens that an earlier prompt of this run begins with, of its later parts too
    missed: bool = False  # of what it had saved the connector found nothing, for no reason of its own


@dataclass(frozen=True)
class LoadOf(Before, Arrived, AskedLoad):
    """One request's way from the lookup to the KV in the layers."""

    ends: Mapping[LoadEnd, int] = field(default_factory=dict)  # token-layers; they sum to prompt x pairs

    @property
    def shared(self) -> int:
        """Leading tokens of what was looked up that an earlier prompt of this run begins with."""
        return min(self.alike, self.prompt)


class LostResumed(NamedTuple):
    """A load that a request was let in anew for after a preemption, and that did not come. ``tokens``: that
    were accepted; ``ends``: token-layers of them that were seen not to be written."""

    request: int  # row in Run.requests
    engine: int
    step: int
    tokens: int
    ends: Mapping[LoadEnd, int]
    reasons: Mapping[LoadEnd, tuple[str, ...]]
