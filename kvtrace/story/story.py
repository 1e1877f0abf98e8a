"""The story of one request: plain dataclasses, in the order in which things happened.

Times ``*_ns`` are nanoseconds; ``at_ns`` counts from the request's first record on the
scheduler's host. Steps are numbers within the engine (``schedule()`` calls from 1), 0 for none.
Positions are half-open ranges ``[start, end)`` of the request's tokens.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from kvtrace.trace import hooks

SCHEMA = "kvtrace.story/1"


@dataclass(frozen=True)
class Pair:
    """One KV-owning layer on one rank; ``rank`` -1 and ``layer`` "" where no worker's layers are known."""

    rank: int
    layer: str


@dataclass(frozen=True)
class Entry:
    """What the connector's metadata declared for this request in one step; -1 where it does not say.

    Not ``declared``: no metadata says how much, it is what was measured on the workers in that step.
    """

    direction: str  # store | load
    slots: int
    start: int
    asynchronous: bool = False
    declared: bool = True
    available: int = -1
    """Of a store: positions that had KV by the end of that step."""

    def end(self, prompt: int) -> int:
        """Slots behind the prompt that held no KV yet are no positions: metadata names whole blocks."""
        return min(max(0, self.start) + self.slots, max(prompt, self.available))


@dataclass
class HookCalls:
    """The calls of one hook or op body for one layer ("" for hooks that run once a step)."""

    name: str
    kind: str  # hook | op
    layer: str
    calls: int
    at_ns: int
    total_ns: int
    slots: int = -1  # hooks: slots of this direction in the whole step's metadata
    raised: bool = False
    no_metadata: bool = False
    summed: bool = False  # collapsed past the spool's size limit: times are of all layers together
    direct: bool = False
    skip: str = ""  # ops: why the connector's hooks did not run around this body, HOOKED where they did
    measured_slots: int = -1
    measured_bytes: int = -1
    measured_files: int = -1


@dataclass
class RankStep:
    """One step on one worker."""

    rank: int
    state: str  # ran | no-forward | not-recorded
    mode: str
    total_ns: int
    calls: list[HookCalls] = field(default_factory=list)

    @property
    def bound(self) -> bool:
        return any(call.name == hooks.BIND_METADATA.name and not call.raised for call in self.calls)


@dataclass
class Moment:
    """One thing that happened. ``facts`` are its numbers, by kind:

    - arrival: prompt, max_tokens
    - grown (the next part of a streaming session): prompt, start
    - lookup: local, external (None: the connector asked for patience), asynchronous
    - allocation: external
    - chunk: number, of, start, end, resumed
    - metadata (a step without a prefill chunk)
    - preempted: computed
    - transfer-opened; transfer-done: direction, failed, side
    - trouble: hook, layer, type, message, where
    - finish: status, output, computed
    """

    kind: str
    at_ns: int
    step: int
    facts: dict[str, Any] = field(default_factory=dict)
    entries: list[Entry] = field(default_factory=list)
    ranks: list[RankStep] = field(default_factory=list)


@dataclass
class Range:
    """Where positions [start, end) ended up, in some of the pairs (indices into Story.pairs)."""

    start: int
    end: int
    account: str  # as in the ledger of saves: saved, loaded, local-hit, pending, not-saved:<cause>, ...
    stage: int | None
    pairs: list[int]
    grade: str = ""
    """How well that is seen: proved, written, read, declared, not observed."""
    sent_to: str = ""
    """The peer, where of what is saved nothing but its leaving for one was seen."""


@dataclass
class Story:
    id: str
    client: str
    prompt: int
    computed: int
    output: int
    status: str
    finished: bool
    preemptions: int
    pairs: list[Pair]
    moments: list[Moment]
    ranges: list[Range]
    loaded: list[str] = field(default_factory=list)
    """What was seen of tokens that were to be loaded and are not what they should be."""
    notes: list[str] = field(default_factory=list)
    token: int | None = None
    layer: str | None = None

    def document(self) -> dict[str, Any]:
        """As JSON: ``kvtrace.story/1``."""
        return {"schema": SCHEMA, **asdict(self)}

    @property
    def accounts(self) -> dict[str, int]:
        """Token-layers by account."""
        found: dict[str, int] = {}
        for part in self.ranges:
            found[part.account] = found.get(part.account, 0) + (part.end - part.start) * len(part.pairs)
        return found

    def tokens(self, account: str) -> int:
        """How many tokens ended up there in at least one pair."""
        own = [range(part.start, part.end) for part in self.ranges if part.account == account]
        return len(set().union(*own))
