"""What is known of runs that were merged: plain dataclasses, as they stand in the merged directory.

``merged.json`` (``kvtrace.merged/1``) holds :class:`Merged`, ``requests.jsonl`` one :class:`Joined` or
:class:`Alone` a line. Times ``*_ns`` are nanoseconds; ``at_ns`` is on the wall clock that all runs were put
on.
Counts are tokens of a prompt unless they say something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvtrace.trace.facts import Document

SCHEMA = "kvtrace.merged/1"
REQUESTS_FILE = "requests.jsonl"


@dataclass(frozen=True)
class Clock(Document):
    """One host's clock. ``shift_ns``: what is added to its times to have wall time; ``spread_ns``: by how
    much the anchors of its processes differ, as somebody set the wall clock. ``boot`` "": nobody kept it."""

    boot: str = ""
    hosts: tuple[str, ...] = ()
    shift_ns: int = 0
    spread_ns: int = 0


@dataclass(frozen=True)
class EngineOf(Document):
    """One engine of one run, and its plain numbers. ``missing``: ranks of it that left no trace there.

    ``prompt``, ``reused``, ``accepted``: prompt tokens; reused from its prefix cache; accepted from its
    connector. ``saved``: tokens, prompt and decode, at ``grade``."""

    run: int = 0  # index in Merged.runs
    tag: int = 0
    id: str = ""  # kv_transfer_config.engine_id
    role: str = ""
    clock: int = 0  # index in Merged.clocks
    ranks: tuple[int, ...] = ()
    missing: int = 0
    requests: int = 0
    prompt: int = 0
    reused: int = 0
    accepted: int = 0
    saved: float = 0.0
    grade: str = ""


@dataclass(frozen=True)
class RunOf(Document):
    """One run. ``path``: relative to the merged directory. ``name``: of its directory: two runs of one
    command have the same name. ``verdict``: of its own report."""

    path: str = ""
    name: str = ""
    hosts: tuple[str, ...] = ()
    kvtrace: tuple[str, ...] = ()
    running: bool = False
    requests: int = 0
    verdict: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Tokens(Document):
    """Tokens of joined requests; as in :class:`Joined`."""

    prompt: int = 0
    computed: int = 0
    reused: int = 0
    sent_by: Mapping[str, int] = field(default_factory=dict)
    partly: int = 0
    unseen: int = 0
    received_by: Mapping[str, int] = field(default_factory=dict)
    lost: int = 0
    local: int = 0
    again: int = 0
    again_by: Mapping[str, int] = field(default_factory=dict)
    last: int = 0
    unsent: int = 0
    computed_here: int = 0

    @property
    def sent(self) -> int:
        return sum(self.sent_by.values())

    @property
    def received(self) -> int:
        return sum(self.received_by.values())


@dataclass(frozen=True)
class Sums(_Tokens):
    """Over all joined requests."""

    joined: int = 0


@dataclass(frozen=True)
class Merged(Document):
    """``uncertainty_ns``: between hosts with clocks of their own. ``joins``: how requests were joined -> how
    many; ``alone``: why they were not -> how many."""

    schema: str = ""
    uncertainty_ns: int = 0
    runs: tuple[RunOf, ...] = ()
    engines: tuple[EngineOf, ...] = ()
    clocks: tuple[Clock, ...] = ()
    joins: Mapping[str, int] = field(default_factory=dict)
    alone: Mapping[str, int] = field(default_factory=dict)
    sums: Sums = field(default_factory=Sums)
    notes: tuple[str, ...] = ()

    def named(self, end: End, ident: str = "") -> str:
        """``2:cmpl-90``: the run, from 1, and the id there, or (of one that is there once) `ident` for it."""
        run = self.engines[end.engine].run + 1 if end.engine >= 0 else 0
        return f"{run}:{end.id}#{end.number + 1}" if end.number else f"{run}:{ident or end.id}"


@dataclass(frozen=True)
class End(Document):
    """A request in one engine. ``engine``: index in Merged.engines; ``number``: which one of its id there;
    ``at_ns``: its arrival."""

    engine: int = 0
    id: str = ""
    client: str = ""
    number: int = 0
    prompt: int = 0
    at_ns: int = 0


@dataclass(frozen=True)
class Joined(_Tokens):
    """A request that one engine (``there``) computed for another one (``here``).

    Attributes:
        how: one of :data:`HOW`; ``key``, ``value``: the id that says so.
        prompt: positions that are compared: of the shorter prompt.
        computed, reused: there: computed, in its own prefix cache.
        sent_by: grade -> positions that are saved there, in every layer on every rank; ``partly``: in some
            of them; ``unseen``: of which that is not known (those reused there are not in the ledger).
        offered, accepted: what the connector here offered, and what was taken.
        received_by: grade -> positions that were loaded here; ``lost``: accepted, and not loaded.
        local: in the prefix cache here. ``here``: computed here; ``again``: of these, sent there.
        again_by: why -> of these: what the connector here did not offer, ...; without ``last``.
        last: 1 where the prompt's last token is among those again: vLLM always computes that one.
        unsent: received here, and not seen to be sent there.
        after_ns: from the arrival there to that here.
        sure: whether that is more than the clocks may be off.
    """

    there: End = field(default_factory=End)
    here: End = field(default_factory=End)
    how: str = ""
    key: str = ""
    value: str = ""
    offered: int = -1
    accepted: int = 0
    after_ns: int = 0
    sure: bool = True

    @property
    def ends(self) -> tuple[End, ...]:
        return self.there, self.here


@dataclass(frozen=True)
class Alone(Document):
    """A request that was joined with no other, and why."""

    alone: End = field(default_factory=End)
    why: str = ""

    @property
    def ends(self) -> tuple[End, ...]:
        return (self.alone,)


NEVER_ASKED = "the connector here was not asked"
NOT_OFFERED = "the connector here did not offer them"
NOT_ACCEPTED = "the scheduler here did not accept them"
LOADED_AND_LOST = "accepted here, and then computed"
"""Why tokens that had been sent were computed again."""

RETURNED, NAMED, TRANSFER, SHARED = "returned", "named", "transfer", "shared"
HOW: Mapping[str, str] = {
    RETURNED: "an id that the connector returned there came with the request here",
    NAMED: "the request here brought the id of the one there",
    TRANSFER: "both brought the same id of a transfer",
    SHARED: "both have the same id from the client",
}
"""How requests are joined, the surest first."""
