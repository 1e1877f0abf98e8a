"""What the ledger of loads knows of each request, for the rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtrace.ledger.ends import LoadEnd
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
class LoadOf:
    """One request's way from the lookup to the KV in the layers. Counts are tokens (positions) unless
    they say token-layers; times are nanoseconds."""

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
    waited_ns: int = -1  # from the lookup until the KV was there (or the request left), -1 unknown
    saved_before: int = 0  # leading tokens that an earlier request with the same prompt had saved
    saved_by: str = ""  # id of that request
    saved_by_row: int = -1
    others_between: int = 0  # different prompts saved between that save and this lookup
    alike: int = 0  # leading tokens that an earlier prompt of this run begins with, of its later parts too
    untouched: bool = False  # its blocks were seen to hold what they held before
    measured: bool = False  # the slots written were watched in each pair
    begun: bool = False  # when its attention began was seen in each pair, in the step of the load
    ends: Mapping[LoadEnd, int] = field(default_factory=dict)  # token-layers; they sum to prompt x pairs
    lost: Mapping[tuple[Part, ...], int] = field(default_factory=dict)
    """Accepted positions that did not come, or of which that is not known -> the pairs that fared so, a bit
    each: the engine's workers in order, each with its KV layers in order."""
    proved: int = 0  # token-layers that were loaded with the KV that the same tokens computed to in this run
    reasons: Mapping[LoadEnd, tuple[str, ...]] = field(default_factory=dict)  # what was seen, few
    places: Mapping[LoadEnd, tuple[Place, ...]] = field(default_factory=dict)  # a few pairs that it concerns

    def grade(self, end: LoadEnd) -> Grade:
        """How well an end is seen: what the scheduler decided is; what came of it on the workers only where
        they were watched."""
        if end == LoadEnd.NOT_OBSERVED:
            return Grade.NOT_OBSERVED
        if end in (LoadEnd.WRONG, LoadEnd.ALTERED) or (
            end in (LoadEnd.NOT_WRITTEN, LoadEnd.PARTLY) and self.untouched
        ):
            return Grade.PROVED
        by_scheduler = end not in (LoadEnd.LOADED, LoadEnd.PARTLY, LoadEnd.NOT_WRITTEN)
        return Grade.READ if by_scheduler or self.measured else Grade.DECLARED

    @property
    def shared(self) -> int:
        """Leading tokens of what was looked up that an earlier prompt of this run begins with."""
        return min(self.alike, self.prompt)

    @property
    def offered(self) -> int:
        """What the connector offered of the tokens that this GPU does not have."""
        return min(max(0, self.answer or 0), max(0, self.prompt - self.local))
