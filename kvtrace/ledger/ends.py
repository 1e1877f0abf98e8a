"""Where and why a token's way ended: the ledger's own words, without the name of any cause.

The rules in ``kvtrace.causes`` say which cause stands behind an end. Stages are those of
``docs/concepts.md``: 0 wiring, 1 schedule, 2 bind, 3 forward, 4 hook, 5 effect, 6 completion.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from kvtrace.terms import Grade


class SaveEnd(IntEnum):
    """How a token fared on its way into the connector's store. Where a token met several, the least one
    from NO_CONNECTOR on counts. The values are codes in arrays of int8."""

    SAVED = 0
    PENDING = 1
    """Its step had not run yet when the trace ended."""
    NOT_OBSERVED = 2
    NO_CONNECTOR = 3
    """The worker has no connector."""
    NOT_BOUND = 4
    """The forward ran with no metadata bound."""
    CLEARED = 5
    """The metadata was cleared before the layer ran."""
    CONNECTOR_GONE = 6
    """The worker had a connector once, and none when the layer ran."""
    GRAPH_REPLAY = 7
    """The step replayed a FULL CUDA graph."""
    ONLY_CAPTURED = 8
    """The layer's body ran while graphs were captured, and never again."""
    DIRECT_CALL = 9
    """The layer calls its backend past the hooked op."""
    NO_FORWARD = 10
    """The step had nothing to compute."""
    NO_HOOK = 11
    """The layer ran, and its save hook was not called."""
    RAISED = 12
    """The save hook raised."""
    CAUGHT = 13
    """The save hook caught an exception of its own and did less than it should."""
    NOTHING_READ = 14
    """The save hook ran and read no slot."""
    PART_READ = 15
    """The save hook read fewer slots than its metadata names."""
    OVERWRITTEN = 16
    """Written, and then overwritten by another prompt's KV."""
    OVERWRITTEN_BY_RANK = 17
    """Written, and then overwritten by another rank's KV."""
    FAILED = 18
    """An asynchronous save that was reported as failed."""
    NOT_FINISHED = 19
    """An asynchronous save that never came back."""
    NOT_DECLARED = 20
    """No metadata of any step held the token: the scheduler's side did not offer it."""
    STALE = 21
    """Its slot was read before the token was computed, and never after."""
    MISPLACED = 22
    """Other slots than its own were read for it."""
    PUT_FAILED = 23
    """Read, and the store refused it, or an exception ended its way there."""
    NOT_AT_REST = 24
    """Read, and what came to rest of it is empty, cut, or was never there."""
    LOST_LATER = 25
    """At rest once, and gone or overwritten by the end of the run."""
    READ_LATE = 26
    """Its slot was read once another request had the block."""

    @property
    def hook_ran(self) -> bool:
        """Whether the save hook ran to its end, with whatever effect, or nothing asked for it."""
        return self >= SaveEnd.NOTHING_READ


class LoadEnd(IntEnum):
    """How a prompt token fared between the lookup and the KV in the layer."""

    LOADED = 0
    LOCAL_HIT = 1
    """In the GPU's own prefix cache when the connector was asked."""
    PENDING = 2
    NOT_OBSERVED = 3
    NEVER_ASKED = 4
    """The connector was not asked for this request."""
    MISSED = 5
    """The connector did not offer it."""
    MISSED_SAVED = 6
    """The connector did not offer it, though the same prompt had just been saved."""
    CLAMPED = 7
    """Offered, and not taken by the scheduler."""
    NOT_WRITTEN = 8
    """Accepted, and no load hook wrote it into the layer."""
    FAILED = 9
    """Accepted, and the connector raised or reported it as failed."""
    USED_BEFORE = 10
    """Accepted, and the layer's attention ran before its load was waited for."""
    NOT_FINISHED = 11
    """Accepted, and the transfer never came to an end."""
    PARTLY = 12
    """Accepted, and beyond what the load hooks wrote or the metadata names."""
    WRONG = 13
    """Written, with KV that is not what these tokens compute to."""
    ALTERED = 14
    """Written, as other numbers than were computed: no other KV that is known."""


NOT_ARRIVED = (
    LoadEnd.WRONG, LoadEnd.ALTERED, LoadEnd.USED_BEFORE, LoadEnd.NOT_WRITTEN, LoadEnd.PARTLY, LoadEnd.FAILED,
    LoadEnd.NOT_FINISHED,
)  # fmt: skip
"""How accepted tokens may end that did not come, or not as they were computed."""


class Blind(IntEnum):
    """Why something cannot be told, as far as that makes a difference."""

    NO = 0
    UNSEEN = 1
    """It was not watched or not recorded, or which slots, or whose, were read is not known."""
    OUT_OF_SIGHT = 2
    """KV may have been copied where nothing is recorded: in foreign threads or native code, by address."""
    METADATA_UNREAD = 3
    """The step's metadata, or what it stores, is not understood."""


OTHERS_READ = frozenset({SaveEnd.MISPLACED, SaveEnd.READ_LATE})
"""What was read for a token was not its KV."""
NOT_SAVED = "not-saved"
NOT_LOADED = "not-loaded"


@dataclass(frozen=True)
class Outcome:
    """What became of a token: one of :data:`kvtrace.terms.OUTCOMES`, or NOT_SAVED or NOT_LOADED. ``end`` says
    where its way ended: a SaveEnd of NOT_SAVED, or of NOT_OBSERVED where it may have ended there, a LoadEnd
    of NOT_LOADED, else None. ``grade``: how well that is seen. ``sent_to``: the peer, where of what was saved
    nothing but its leaving for one was seen."""

    name: str
    end: SaveEnd | LoadEnd | None = None
    grade: Grade = Grade.DECLARED
    sent_to: str = ""

    @property
    def code(self) -> int:
        """The end as tables hold it, 0 for none."""
        return int(self.end or 0)
