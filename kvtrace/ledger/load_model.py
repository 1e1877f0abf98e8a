"""What the ledger of loads knows of each request, for the rules."""

from __future__ import annotations

from dataclasses import dataclass, field

NOT_LOADED = "not-loaded:"
"""Prefix of the accounts of tokens that the scheduler accepted and no layer got; the cause's id follows."""

Part = tuple[int, int, str]
"""Positions [start, end) of a prompt, and the account that they are on."""

# Why the scheduler took fewer tokens than the connector offered.
SKIPS_CACHE, FULL_HIT, ROUNDED, SUB_BLOCK, NO_BLOCKS, UNEXPLAINED = (
    "skips-cache", "full-hit", "rounded", "sub-block", "no-blocks", "unexplained",
)  # fmt: skip


@dataclass
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
    saved_by: str = ""
    others_between: int = 0  # different prompts saved between that save and this lookup
    shared: int = 0  # leading tokens that an earlier prompt of this run begins with
    measured: bool = False  # the slots written were watched in each pair
    accounts: dict[str, int] = field(default_factory=dict)  # token-layers; they sum to prompt x pairs
    lost: dict[tuple[Part, ...], int] = field(default_factory=dict)
    """Accepted positions that did not come, or of which that is not known -> the pairs that fared so, a bit
    each: the engine's workers in order, each with its KV layers in order."""
    reasons: dict[str, list[str]] = field(default_factory=dict)  # cause id -> what was seen, few
    places: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    """Cause id -> (rank, layer) of a few pairs that it concerns."""

    @property
    def offered(self) -> int:
        """What the connector offered of the tokens that this GPU does not have."""
        return min(max(0, self.answer or 0), max(0, self.prompt - self.local))

    def add(self, account: str, amount: int) -> None:
        if amount:
            self.accounts[account] = self.accounts.get(account, 0) + amount

    def because(self, cause: str, reason: str, place: tuple[int, str] | None = None) -> None:
        known = self.reasons.setdefault(cause, [])
        if reason not in known and len(known) < 4:
            known.append(reason)
        if place is not None:
            places = self.places.setdefault(cause, [])
            if len(places) < 256:
                places.append(place)
