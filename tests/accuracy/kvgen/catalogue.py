"""The faults that can be planted, each with the findings that are right for it.

``right`` are ids of the catalogue of findings: those that an engineer would call the cause. Where several are
equally right by their definitions, all stand here. ``allow`` restricts what the rest of the plan may be.

What works as its author meant it is no fault: deliberate choices stand in designs.py.

What shows in sizes alone is fewer bytes at rest than were read. From outside a loss, compression and a choice
look alike, so ``store-incomplete`` is right for all of these, whatever its severity; which of them it is, is
verify's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvgen.stores import RAISING, SERVER_KINDS

HOOKS = ("layer", "buffer", "end")
LOADS = ("sync", "layerwise", "threaded", "async")
SYNC = ("sync", "layerwise", "threaded")


@dataclass(frozen=True)
class Fault:
    """Attributes:
    right: ids of which one must be the first finding.
    grade: ``fault`` (the first finding of severity fault counts), ``limit`` (the first finding of all: what
        is planted works as built, and a fault beside it would be a false alarm) or ``any`` (the first finding
        of all, of whatever severity: from outside it may be a choice).
    breaks: properties of ``kvtrace verify`` of which at least one fails; empty where none has to. Only a
        connector that also loads can be judged by what comes back.
    shows: where it shows without opening the store: ``cache`` (slots read and written, fingerprints of loaded
        blocks, what the scheduler is told), ``sizes`` (names, sizes, removals of files), ``exceptions``, or
        ``return-only`` (nowhere but in what comes back). See ``Plan.shows`` for what hangs on the store.
    effect: how the harness proves that it took effect (see harness/truth.py).
    allow: field of the plan -> its possible values.
    work: kinds of workload in which it shows.
    """

    name: str
    title: str
    right: frozenset[str]
    effect: str
    grade: str
    breaks: frozenset[str]
    shows: str
    allow: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    work: tuple[str, ...] = ()

    @property
    def needs_reads(self) -> bool:
        """Whether its sizes tell something only beside the bytes that were read: files that are removed, or
        that hold nothing, tell it alone."""
        return self.shows == "sizes" and self.name not in _SHOWN_BY_FILES_ALONE

    @property
    def needs_computed(self) -> bool:
        """Whether it shows only beside what the same engine computed for the same tokens: every slot is
        written, in order."""
        return self.name in _SHOWN_BY_COMPUTING


_SHOWN_BY_FILES_ALONE = ("cleans-up", "newest-deleted", "wiped", "files-empty", "empty-read")
_SHOWN_BY_COMPUTING = ("load-wrong-layer",)

PROPERTIES = (
    "transfer", "returns-equal", "whole-units", "right-asker", "outputs", "lookups-agree", "workloads",
    "lengths", "restart", "store-conditions", "finishes-told", "step-time", "flat",
)  # fmt: skip
"""What ``kvtrace verify`` proves or not, by its ids."""

PLACES = ("cache", "sizes", "exceptions", "return-only")

# What of verify's properties each fault breaks, and where it shows without verify.
_SIGNS = {
    "unit-above-all": ("", "cache"),
    "unit-above-most": ("", "cache"),
    "empty-prefix": ("", "cache"),
    "key-of-head": ("right-asker", "cache"),
    "key-without-parent": ("right-asker", "cache"),
    "first-step-only": ("whole-units", "cache"),
    "sent-flag": ("whole-units", "cache"),
    "straddling-left-out": ("whole-units", "cache"),
    "remainder-never-offered": ("whole-units", "cache"),
    "never-offered": ("transfer", "cache"),
    "one-per-step": ("whole-units", "cache"),
    "lookup-claims": ("transfer whole-units", "cache"),
    "decode-left-out": ("", "cache"),
    "tail-left-out": ("", "cache"),
    "aborted": ("", "cache"),
    "misspelt-unit": ("", "cache"),
    "misspelt-switch": ("transfer", "cache"),
    "role-consumer": ("", "cache"),  # verify takes the role at its word: a consumer alone has nothing to load
    "disables-itself": ("transfer", "cache"),
    "fails-to-start": ("transfer", "exceptions"),
    "bind-without-super": ("transfer", "cache"),
    "clears-early": ("transfer returns-equal", "cache"),
    "some-layers": ("transfer returns-equal whole-units", "cache"),
    "one-layer": ("transfer returns-equal whole-units", "cache"),
    "takes-nothing": ("transfer returns-equal", "cache"),
    "takes-less": ("transfer returns-equal whole-units", "cache"),
    "hook-raises": ("transfer", "exceptions"),
    "swallowed-in-hook": ("transfer", "exceptions"),
    "put-swallowed": ("transfer whole-units", "exceptions"),
    "put-swallowed-in-thread": ("transfer whole-units", "exceptions"),
    "future-lost": ("transfer whole-units", "exceptions"),
    "exists-in-future": ("transfer whole-units", "exceptions"),
    "every-second-raises": ("transfer whole-units", "exceptions"),
    "thread-dies": ("transfer whole-units", "exceptions"),
    "locked-swallowed": ("transfer", "exceptions"),
    "writer-dies": ("transfer whole-units", "sizes"),
    "server-down": ("transfer", "exceptions"),
    "server-slow": ("transfer", "exceptions"),
    "server-refuses": ("transfer", "return-only"),
    "server-refuses-some": ("transfer whole-units", "return-only"),
    "daemon-refuses": ("transfer whole-units", "return-only"),
    "queue-full": ("transfer whole-units", "sizes"),
    "queue-thrown-away": ("restart whole-units", "sizes"),
    "deque-full": ("transfer whole-units", "sizes"),
    "pending-by-layer": ("transfer whole-units", "sizes"),
    "child-dead": ("", "exceptions"),
    "files-empty": ("transfer returns-equal", "sizes"),
    "empty-read": ("returns-equal outputs", "sizes"),
    "files-cut": ("transfer returns-equal", "sizes"),
    "never-flushed": ("restart transfer returns-equal", "sizes"),
    "never-renamed": ("transfer", "return-only"),
    "never-committed": ("restart transfer", "return-only"),
    "cleans-up": ("transfer whole-units", "sizes"),
    "newest-deleted": ("transfer whole-units", "sizes"),
    "wiped": ("transfer whole-units", "sizes"),
    "ring-wraps": ("returns-equal", "return-only"),
    "key-collides": ("right-asker", "sizes"),
    "leaks-handles": ("flat", "return-only"),
    "salted-hash": ("restart", "return-only"),
    "salt-left-out": ("right-asker", "return-only"),
    "wrong-blocks": ("returns-equal", "cache"),
    "next-block": ("returns-equal", "cache"),
    "shifted": ("returns-equal", "cache"),
    "wrong-layer": ("returns-equal", "cache"),
    "wrong-request": ("returns-equal workloads", "cache"),
    "before-forward": ("returns-equal", "cache"),
    "ahead-of-layer": ("returns-equal", "cache"),
    "rounds-up": ("returns-equal", "cache"),
    "table-appended": ("returns-equal workloads", "cache"),
    "late-read": ("returns-equal workloads", "cache"),
    "thread-reads-late": ("returns-equal workloads", "cache"),
    "half-zeroed": ("returns-equal", "return-only"),
    "heads-flipped": ("returns-equal", "return-only"),
    "wrong-scale": ("returns-equal outputs", "cache"),
    "never-told": ("finishes-told", "cache"),
    "slow-save": ("step-time", "cache"),
    "lookup-off-by-one": ("transfer", "cache"),
    "index-never-filled": ("transfer", "cache"),
    "loads-half": ("returns-equal outputs", "cache"),
    "loads-some-layers": ("returns-equal outputs", "cache"),
    "into-a-copy": ("returns-equal outputs transfer", "cache"),
    "load-fails": ("returns-equal whole-units transfer", "exceptions"),
    "load-error-swallowed": ("returns-equal outputs", "exceptions"),
    "load-too-late": ("returns-equal outputs", "cache"),
    "load-told-early": ("returns-equal outputs", "cache"),
    "hit-by-head": ("right-asker returns-equal outputs", "cache"),
    "load-repeats-block": ("returns-equal outputs", "cache"),
    "load-wrong-layer": ("returns-equal outputs", "cache"),
    "overclaims": ("lookups-agree returns-equal", "cache"),
    "finds-one-unit": ("", "cache"),  # how much a request is given at most may be meant
    "receive-never-told": ("finishes-told transfer", "cache"),
}


def _fault(name: str, title: str, right: str, effect: str, work: str, **allow: tuple[Any, ...]) -> Fault:
    breaks, shows = _SIGNS[name]
    grade = allow.pop("grade", ("any" if shows == "sizes" else "fault",))[0]
    findings = frozenset((*right.split(), *(("store-incomplete",) if shows == "sizes" else ())))
    return Fault(
        name, title, findings, effect, grade, frozenset(breaks.split()), shows, allow, tuple(work.split())
    )


PUSH = {"role": ("producer", "both")}
ONE_WAY = {"role": ("producer",)}
"""Where a lookup by the same wrong key, or of what is not there, would be a second fault."""
LIMIT = {"grade": ("limit",)}
ANY = {"grade": ("any",)}
CONTENT = {"family": ("units", "prefix")}

# fmt: off
_SCHEDULE = (
    _fault("unit-above-all", "no prompt fills the unit; nothing is offered", "below-save-granularity",
           "below-unit", "below", unit_from=("option", "constant", "budget"), **PUSH, **LIMIT),
    _fault("unit-above-most", "most prompts do not fill the unit", "below-save-granularity", "below-unit",
           "mostly-below", unit_from=("option", "constant", "budget"), **PUSH, **LIMIT),
    _fault("empty-prefix", "prompts are rounded to nothing, and the empty prefix is stored once for all",
           "below-save-granularity", "below-unit", "below", family=("prefix",), dedupe=("ask", "index"),
           place=HOOKS, form=("entries", "combined"), tracker=("table", "requests"), decode=(False,),
           unit_from=("option", "constant", "budget"), lazy=(False,),
           store_kind=("npy", "safetensors", "pt", "memory", "sqlite"), copy=("fancy", "index-select"),
           record=("layer",), **ONE_WAY, **ANY),
    _fault("key-of-head", "the key counts the head of the prompt only, so longer ones count as stored",
           "metadata-has-no-store false-already-stored", "lost", "same-head", family=("prefix", "units"),
           chain=("prefix",), dedupe=("ask", "index"), form=("entries", "flat", "blob"),
           decide=("stream", "prompt-end"),
           **ONE_WAY, **ANY),
    _fault("key-without-parent", "a unit's key leaves out what came before it",
           "metadata-has-no-store false-already-stored store-lost-later", "lost", "same-tail",
           family=("units",), chain=("chain",), dedupe=("ask", "index"), start=("zero",),
           form=("entries", "flat", "map"), decide=("stream", "prompt-end"),
           **ONE_WAY, **ANY),
    _fault("first-step-only", "only what a request's first step computes is offered", "first-chunk-only",
           "lost", "chunked", tracker=("table", "requests", "blockstate"), decide=("stream",),
           decode=(False,), form=("entries", "flat", "ragged", "blob", "map"), **PUSH, **ANY),
    _fault("sent-flag", "a flag set with the first chunk keeps later ones from being offered",
           "first-chunk-only", "lost", "chunked", decide=("stream",), decode=(False,),
           family=("units", "request"), tracker=("table", "requests", "manager", "blockstate"),
           form=("entries", "combined", "array"), **PUSH, **ANY),
    _fault("straddling-left-out", "the unit that lies over the border of two chunks is never offered",
           "metadata-has-no-store first-chunk-only slots-short", "lost", "chunked", decide=("stream",),
           decode=(False,), family=("units", "request"), tracker=("table", "requests"), start=("computed",),
           unit_from=("option", "constant", "block"), dedupe=("none",),
           form=("entries", "flat", "array"), **PUSH, **ANY),
    _fault("remainder-never-offered", "after a partial hit the rest of the prompt is never offered",
           "metadata-has-no-store", "lost", "longer", role=("both",), family=("units",), load=SYNC,
           prefix_caching=(False,), decide=("stream", "prompt-end"), decode=(False,), lookup=("ask", "index"),
           form=("entries", "flat", "map", "blob"), **ANY),
    _fault("never-offered", "the condition for a store is never true", "metadata-has-no-store", "nothing",
           "mixed", form=("entries", "flat", "ragged", "map", "blob", "combined", "array"), place=HOOKS,
           **PUSH, **ANY),
    _fault("one-per-step", "one request of a step is offered, the others never", "metadata-has-no-store",
           "lost", "together", unit_from=("option", "constant", "block"), decide=("stream", "prompt-end"),
           tracker=("table", "requests", "manager"), form=("entries", "flat", "blob", "array"), **PUSH,
           **ANY),
    _fault("lookup-claims", "a lookup marks its keys as stored",
           "metadata-has-no-store false-already-stored", "lost", "mixed", family=("units",),
           dedupe=("index",), role=("both",), load=LOADS, lookup=("ask",), **ANY),
    _fault("decode-left-out", "what is generated is never offered", "decode-not-offered", "decode-share",
           "decode", grade=("limit",), decode=(False,), decide=("stream", "prompt-end"), **PUSH),
    _fault("tail-left-out", "what does not fill a unit is left out", "below-save-granularity", "tail-share",
           "tails", grade=("limit",), decode=(False,), unit_blocks=(2, 4), **PUSH),
    _fault("aborted", "requests leave before their prompt is complete", "aborted-before-save", "lost",
           "aborts", grade=("limit",), decide=("prompt-end",), decode=(False,),
           tracker=("table", "requests", "manager"), **PUSH),
)
# fmt: on

# fmt: off
_WIRING = (
    _fault("misspelt-unit", "the unit is configured under a misspelt key: a huge default holds",
           "config-key-unused below-save-granularity", "below-unit", "below", unit_from=("option",),
           **PUSH, **ANY),
    _fault("misspelt-switch", "saving is switched on under a misspelt key",
           "config-key-unused connector-disabled-itself metadata-has-no-store", "nothing", "mixed",
           form=("entries", "flat", "blob"), place=HOOKS, **PUSH, **ANY),
    _fault("role-consumer", "configured as consumer: it stores nothing", "role-does-not-save", "nothing",
           "mixed", grade=("any",), role=("both",), load=("sync", "threaded"), place=HOOKS,
           form=("entries", "flat", "combined")),
    _fault("disables-itself", "it switches itself off at start", "connector-disabled-itself", "nothing",
           "mixed", place=HOOKS, form=("entries", "flat", "map", "blob"), **PUSH, **ANY),
    _fault("fails-to-start", "it raises while it is made", "connector-failed-to-start", "no-start", "mixed",
           place=HOOKS, form=("entries", "flat"), **PUSH),
    _fault("bind-without-super", "it binds its metadata without the base class", "metadata-not-bound",
           "nothing", "mixed", place=("layer",), meta_access=("own",), form=("entries", "flat", "map"),
           **PUSH),
    _fault("clears-early", "it clears its metadata with the first layer",
           "metadata-cleared-early metadata-not-bound", "lost", "mixed", place=("layer",),
           meta_access=("base", "attribute"), structure=("flat",), form=("entries", "flat", "blob"),
           **ONE_WAY),
)
# fmt: on

# fmt: off
_HOOKS = (
    _fault("some-layers", "some layers are left out", "stored-nothing slots-short", "lost", "mixed",
           place=("layer", "end"), record=("layer",), **PUSH),
    _fault("one-layer", "one layer of four is never saved", "stored-nothing slots-short", "lost", "mixed",
           place=("layer", "end"), record=("layer",), **PUSH),
    _fault("takes-nothing", "an entry comes, and no slot is taken", "stored-nothing", "nothing", "mixed",
           place=HOOKS, lazy=(False,), copy=("fancy", "index-select", "slots", "permuted"),
           store_kind=("npy", "raw", "pt", "memory", "container", "safetensors", "sqlite"), **PUSH),
    _fault("takes-less", "fewer blocks are taken than the entry names", "slots-short", "lost", "mixed",
           place=HOOKS, unit_blocks=(2, 4), **PUSH),
    _fault("hook-raises", "the save hook raises", "hook-raised", "dies", "mixed", place=("layer", "end"),
           run=("inline",), **PUSH),
    _fault("swallowed-in-hook", "it raises and swallows its own exception in the hook",
           "exception-swallowed", "nothing", "mixed", place=("layer", "buffer", "end"), run=("inline",),
           **PUSH),
    _fault("put-swallowed", "the store raises, the hook swallows it", "exception-swallowed store-failed",
           "lost", "mixed", place=HOOKS, run=("inline",), store_flaw=tuple(RAISING), **PUSH),
    _fault("put-swallowed-in-thread", "the store raises in a thread that goes on",
           "store-failed exception-swallowed", "lost", "mixed", run=("thread",), store_flaw=tuple(RAISING),
           **PUSH),
    _fault("future-lost", "the store raises into a future that nobody looks at",
           "store-failed exception-swallowed", "lost", "mixed", run=("pool", "aio"), waits=(False,),
           place=HOOKS, store_flaw=tuple(RAISING), **PUSH),
    _fault("exists-in-future", "a folder that exists raises FileExistsError into a future nobody looks at",
           "store-failed exception-swallowed", "lost", "mixed", run=("pool", "aio"), waits=(False,),
           place=HOOKS, store_flaw=("exists",), **PUSH),
    _fault("every-second-raises", "every second save raises in its thread",
           "store-failed exception-swallowed", "lost", "mixed", run=("thread", "pool"), waits=(False,),
           place=HOOKS, store_flaw=("every-second",), guard=("none", "count"), **PUSH),
    _fault("locked-swallowed", "a forgotten transaction locks the database; the error is swallowed",
           "store-failed exception-swallowed", "nothing", "mixed", place=HOOKS, run=("inline",),
           store_flaw=("locked",), dedupe=("none", "index"), **PUSH),
    _fault("writer-dies", "the process that writes dies, and nobody looks",
           "store-failed store-incomplete save-lost", "lost", "mixed", store_flaw=("dies",),
           place=HOOKS, waits=(False,), **PUSH),
    _fault("thread-dies", "the first exception ends the thread; the rest stays in its queue",
           "store-failed hook-raised", "lost", "mixed", run=("thread",), waits=(False,), place=HOOKS,
           store_flaw=("quota",), **PUSH),
    _fault("server-down", "the store's server does not answer; the error is swallowed",
           "store-failed exception-swallowed", "nothing", "mixed", store_kind=SERVER_KINDS,
           dedupe=("none", "index"), **ONE_WAY),
    _fault("server-slow", "the server answers after the client's patience ended",
           "store-failed exception-swallowed", "nothing", "few", store_kind=SERVER_KINDS,
           dedupe=("none", "index"), **ONE_WAY),
    _fault("server-refuses", "the server refuses, and nobody reads its answer",
           "store-failed store-incomplete", "nothing", "mixed", store_kind=SERVER_KINDS,
           dedupe=("none", "index"), **PUSH),
    _fault("server-refuses-some", "the server refuses some puts in between, and nobody reads its answer",
           "store-failed store-incomplete", "lost", "mixed", store_kind=SERVER_KINDS,
           dedupe=("none", "index"), **PUSH),
    _fault("daemon-refuses", "a process that holds the store is full, and nobody asks it",
           "store-failed store-incomplete", "lost", "mixed", store_flaw=("unanswered",),
           dedupe=("none", "index"), **PUSH),
    _fault("queue-full", "a full queue drops what comes", "store-failed save-lost exception-swallowed",
           "lost", "together", run=("thread",), waits=(False,), place=("layer", "end", "buffer"),
           store_flaw=("slow",), lazy=(False,), **PUSH),
    _fault("queue-thrown-away", "what still waits in a queue is thrown away at shutdown",
           "save-lost store-failed store-incomplete", "lost", "together", run=("thread", "pool"),
           waits=(False,), place=("layer", "end", "buffer"), store_flaw=("slow",), lazy=(False,), **PUSH),
    _fault("deque-full", "what is gathered for a step pushes the first out again", "save-lost store-failed",
           "lost", "together", place=("buffer",), **PUSH),
    _fault("pending-by-layer", "what is gathered is kept by layer: the last one stays", "save-lost", "lost",
           "together", place=("buffer",), record=("layer",), **PUSH),
)
# fmt: on

# fmt: off
_CHILDREN = (
    _fault("child-dead", "one of a MultiConnector's two children loses all it is given; the other does not",
           "child-lost store-failed exception-swallowed", "child-dead", "mixed", multi=(True,), place=HOOKS,
           family=("units", "prefix"), unit_from=("option", "constant", "block"), **ONE_WAY),
)

_REST = (
    _fault("files-empty", "files are made and stay empty", "store-incomplete", "nothing", "mixed",
           store_flaw=("empty",), **PUSH),
    _fault("empty-read", "files are made and stay empty, and are read back as KV of zeroes",
           "store-incomplete kv-load-wrong", "answers", "repeats", store_flaw=("empty-read",), role=("both",),
           family=("units",),
           load=SYNC, run=("inline",), prefix_caching=(False,)),
    _fault("files-cut", "a part of each record is written", "store-incomplete", "lost", "mixed",
           store_flaw=("cut",), **PUSH),
    _fault("never-flushed", "what is written stays in a buffer", "store-incomplete", "lost", "mixed",
           store_flaw=("unflushed",), **PUSH),
    _fault("never-renamed", "temporary files are never renamed", "store-incomplete store-failed", "nothing",
           "mixed", store_flaw=("part-stays",), **PUSH),
    _fault("never-committed", "the database's transaction is never committed", "store-incomplete",
           "nothing", "mixed", store_flaw=("no-commit",), dedupe=("none", "index"), **ONE_WAY),
    _fault("cleans-up", "a finished request's records are deleted", "store-lost-later", "lost", "mixed",
           family=("units",), place=HOOKS, decide=("stream", "prompt-end"), decode=(False,),
           store_kind=("npy", "safetensors", "raw", "pt", "memory", "sqlite"), run=("inline",),
           tracker=("table", "requests"), chain=("chain", "prefix"), **ONE_WAY, **ANY),
    _fault("newest-deleted", "a full store deletes the newest record instead of the oldest",
           "store-lost-later", "lost", "mixed", store_flaw=("newest",), run=("inline",), **PUSH, **ANY),
    _fault("wiped", "the store's folder is emptied now and then", "store-lost-later", "lost", "mixed",
           store_flaw=("wipe",), run=("inline",), **PUSH, **ANY),
    _fault("ring-wraps", "a ring of places wraps, and its index still names what lay there before",
           "store-lost-later", "lost", "mixed", store_flaw=("wrap",), **ONE_WAY),
    _fault("key-collides", "different prefixes get the same key; the last one stays",
           "store-lost-later false-already-stored save-lost", "lost", "mixed", **CONTENT, chain=("prefix",),
           dedupe=("none",),
           store_kind=("npy", "safetensors", "raw", "pt", "memory", "sqlite", "http", "frame"), **ONE_WAY),
    _fault("leaks-handles", "every file that is written stays open", "", "intact", "mixed",
           store_flaw=("leaks",), **PUSH),
    _fault("salted-hash", "keys are made by Python's salted hash: another process finds nothing",
           "key-mismatch", "intact", "mixed", **CONTENT, chain=("prefix",), lookup=("ask",),
           dedupe=("none", "ask"),  # an index in memory forgets at a restart anyway: nothing would be broken
           store_kind=("npy", "safetensors", "raw", "pt", "sqlite"), **PUSH),
    _fault("salt-left-out", "keys leave out the salt of the request: another tenant's KV is a hit",
           "wrong-hit", "stolen", "salted", role=("both",), family=("units", "prefix"),
           chain=("chain", "prefix"), load=SYNC, prefix_caching=(False,), run=("inline",)),
)
# fmt: on

# fmt: off
_CONTENTS = (
    _fault("wrong-blocks", "positions in the table are taken for block numbers", "kv-misplaced", "lost",
           "mixed", place=HOOKS, decide=("stream", "prompt-end"), **PUSH),
    _fault("next-block", "the block after the right one is taken", "kv-misplaced", "lost", "mixed",
           place=HOOKS, form=("entries", "flat", "map"), **PUSH),
    _fault("shifted", "slots are shifted by one", "kv-misplaced", "lost", "mixed", copy=("slots",),
           where=("slot-tensor", "slot-list"), place=HOOKS, **PUSH),
    _fault("wrong-layer", "every layer's record gets the last layer's KV", "kv-misplaced", "lost", "mixed",
           place=("end",), record=("layer",), **PUSH),
    _fault("wrong-request", "in a step of several requests each gets the last one's blocks", "kv-misplaced",
           "lost", "together", place=("end",), run=("pool", "thread"), waits=(True,), lazy=(True,),
           record=("layer",), unit_from=("option", "constant", "block"), **PUSH),
    _fault("before-forward", "it copies when the metadata comes, before the forward", "kv-stale", "lost",
           "mixed", place=("end",), caches=("register",), decide=("stream",), **PUSH),
    _fault("ahead-of-layer", "with each layer it copies the next one, not yet computed", "kv-stale", "lost",
           "mixed", place=("layer",), caches=("register",), record=("layer",), lazy=(False,),
           decide=("stream",), **PUSH),
    _fault("rounds-up", "a unit is copied when it begins to fill, and never again", "kv-stale", "lost",
           "chunked", decide=("stream",), decode=(False,), place=HOOKS, tracker=("table",),
           family=("units", "request"), unit_from=("option", "constant", "block"), unit_blocks=(1,),
           form=("entries", "flat", "blob"), **PUSH),
    # What it takes instead are its own first blocks: without the key that is their being stored again.
    _fault("table-appended", "after a preemption a request's new blocks are put behind its old ones",
           "preempted-before-save kv-misplaced", "lost", "resumed", grade=("any",), tracker=("requests",),
           decide=("stream",), block=(32,), decode=(True,), unit_blocks=(1,), place=HOOKS,
           prefix_caching=(False,), unit_from=("option", "constant", "block"), **PUSH),
    _fault("late-read", "blocks are copied after they went to another request", "kv-misplaced kv-stale",
           "lost", "one-size", place=("deferred",), decide=("prompt-end",),
           unit_from=("option", "constant", "block"), **ONE_WAY),
    _fault("thread-reads-late", "a thread reads the blocks after they went to another request",
           "kv-misplaced kv-stale", "lost", "one-size", place=("end",), run=("thread",), waits=(True,),
           lazy=(True,), decide=("prompt-end",), unit_from=("option", "constant", "block"), **ONE_WAY),
    _fault("half-zeroed", "the second half of each slot is zeroes", "kv-altered", "lost", "mixed", **PUSH),
    _fault("heads-flipped", "heads are stored in reverse order", "kv-altered", "lost", "mixed",
           axis=("plain",), copy=("fancy", "index-select", "stack", "clone", "staging"), **PUSH),
    # How far other numbers are off, verify says: a fingerprint only says that they are other ones.
    _fault("wrong-scale", "an eight-bit store keeps a scale that its numbers do not fit",
           "kv-load-wrong kv-altered", "answers", "repeats", role=("both",), load=SYNC, run=("inline",),
           pack=("int8", "int8-rows"), store_flaw=("bad-scale",), prefix_caching=(False,), **ANY),
)
# fmt: on

# fmt: off
_COMPLETION = (
    _fault("never-told", "asynchronous saves finish, and the engine never hears of it",
           "blocks-held save-never-finished", "held", "mixed", place=("held", "deferred"), **PUSH),
    _fault("slow-save", "saving takes most of the step", "save-blocks-step hook-slow", "slow", "exact",
           grade=("any",), place=HOOKS, run=("inline",), store_flaw=("slow",), unit_blocks=(1,), **PUSH),
)
# fmt: on

# fmt: off
_LOAD = (
    _fault("lookup-off-by-one", "lookup and store compute different keys", "key-mismatch", "no-hits",
           "repeats", prefix_caching=(False,), role=("both",), chain=("chain", "prefix"),
           lookup=("ask", "index")),
    _fault("index-never-filled", "lookups ask an index that nobody fills", "key-mismatch lookup-miss",
           "no-hits", "repeats", prefix_caching=(False,), role=("both",), lookup=("index",),
           dedupe=("none", "ask"), start=("computed",)),
    _fault("loads-half", "half of what was accepted is loaded", "loaded-partly load-not-injected",
           "answers", "repeats",
           role=("both", "consumer"), load=SYNC, give=("index-put", "index-copy", "per-block")),
    _fault("loads-some-layers", "one layer is left out of the load", "loaded-partly load-not-injected",
           "answers", "repeats", role=("both", "consumer"), load=("sync", "threaded", "async")),
    _fault("into-a-copy", "the load writes into a copy of the cache", "load-not-injected", "answers",
           "repeats", role=("both", "consumer"), load=LOADS, give=("index-put", "index-copy")),
    _fault("load-fails", "a load fails and is reported", "load-failed", "load-errors", "repeats",
           role=("both", "consumer"), load=("sync", "async"), store_flaw=("get-raises",)),
    _fault("load-error-swallowed", "a load fails and nobody is told",
           "load-failed load-not-injected exception-swallowed loaded-partly", "answers", "repeats",
           role=("both", "consumer"), load=SYNC, store_flaw=("get-raises",)),
    _fault("load-too-late", "a thread loads while the forward already runs", "load-after-use", "answers",
           "repeats", role=("both", "consumer"), load=("threaded",)),
    _fault("load-told-early", "an asynchronous load is reported done before it has begun",
           "load-after-use kv-load-wrong load-not-injected", "answers", "repeats", role=("both", "consumer"),
           load=("async",), waits=(False,), prefix_caching=(False,)),
    _fault("hit-by-head", "the lookup's key leaves out a part of the prompt", "wrong-hit kv-load-wrong",
           "answers", "same-head", role=("both",), family=("units", "prefix"), chain=("prefix",),
           dedupe=("none",), load=LOADS),
    _fault("load-repeats-block", "every block of a load gets the first one's KV", "kv-load-wrong",
           "answers", "repeats", role=("both", "consumer"), unit_blocks=(2, 4), load=LOADS,
           give=("index-put", "index-copy", "per-block")),
    _fault("load-wrong-layer", "each layer gets its neighbour's KV", "kv-load-wrong", "answers", "repeats",
           role=("both", "consumer"), load=("sync", "async"), record=("layer",)),
    _fault("overclaims", "a lookup promises more than is stored", "loaded-partly", "answers", "longer",
           role=("both",), family=("units",), load=SYNC, lookup=("ask", "index")),
    _fault("finds-one-unit", "a lookup looks no further than the first unit", "lookup-miss already-stored",
           "intact", "repeats", role=("both",), family=("units",), load=SYNC, lookup=("ask", "index"),
           prefix_caching=(False,), **ANY),
    _fault("receive-never-told", "an asynchronous load ends, and the engine never hears of it",
           "load-never-finished", "stuck", "repeats", role=("both", "consumer"), load=("async",)),
)
# fmt: on

FAULTS: tuple[Fault, ...] = (
    *_SCHEDULE, *_WIRING, *_HOOKS, *_CHILDREN, *_REST, *_CONTENTS, *_COMPLETION, *_LOAD,
)  # fmt: skip
BY_NAME = {fault.name: fault for fault in FAULTS}

TAKES_ALL = frozenset(
    (
        "put-swallowed", "put-swallowed-in-thread", "future-lost", "thread-dies", "server-down",
        "server-slow", "server-refuses", "queue-full", "deque-full", "pending-by-layer", "child-dead",
        "files-empty", "files-cut", "never-flushed", "never-renamed", "never-committed", "newest-deleted",
        "wiped", "cleans-up", "ring-wraps", "key-collides", "half-zeroed", "heads-flipped", "hit-by-head",
        "exists-in-future", "every-second-raises", "locked-swallowed", "writer-dies", "server-refuses-some",
        "daemon-refuses", "queue-thrown-away",
    )
)  # fmt: skip
"""Faults behind the read: all that is offered is taken from the KV cache, from the right slots and after it
was computed, whatever becomes of it. Of every other fault no more is taken than lies in the store."""

BYTES_REST = frozenset(("half-zeroed", "heads-flipped", "never-renamed", "wrong-scale"))
"""Faults behind the read that leave as many bytes at rest as were read, with other contents or under another
name: that KV was written is true of them, that it comes back is not."""
