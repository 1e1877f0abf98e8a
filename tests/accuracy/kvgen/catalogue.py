"""The faults that can be planted, each with the findings that are right for it.

``right`` are ids of the catalogue of findings: those that an engineer would call the cause. Where several are
equally right by their definitions, all stand here. ``allow`` restricts what the rest of the plan may be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvgen.stores import RAISING, SERVER_KINDS, SILENT

HOOKS = ("layer", "buffer", "end")
LOADS = ("sync", "layerwise", "threaded", "async")
SYNC = ("sync", "layerwise", "threaded")
ENTRIES = ("entries",)


@dataclass(frozen=True)
class Fault:
    """Attributes:
    right: ids of which one must be the first finding.
    grade: ``fault`` (the first finding of severity fault counts) or ``limit`` (the first finding of all:
        what is planted works as built, and a fault beside it would be a false alarm).
    effect: how the harness proves that it took effect (see harness/truth.py).
    allow: field of the plan -> its possible values.
    work: kinds of workload in which it shows.
    """

    name: str
    title: str
    right: frozenset[str]
    effect: str
    grade: str = "fault"
    allow: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    work: tuple[str, ...] = ()


def _fault(name: str, title: str, right: str, effect: str, work: str, **allow: tuple[Any, ...]) -> Fault:
    grade = allow.pop("grade", ("fault",))[0]
    return Fault(name, title, frozenset(right.split()), effect, grade, allow, tuple(work.split()))


PUSH = {"role": ("producer",)}
CONTENT = {"family": ("units", "prefix")}

# fmt: off
_SCHEDULE = (
    _fault("unit-above-all", "no prompt fills the unit; nothing is offered", "below-save-granularity",
           "below-unit", "below", unit_from=("option", "constant", "budget"), **PUSH),
    _fault("unit-above-most", "most prompts do not fill the unit", "below-save-granularity", "below-unit",
           "mostly-below", unit_from=("option", "constant", "budget"), **PUSH),
    _fault("empty-prefix", "prompts are rounded to nothing, and the empty prefix is stored once for all",
           "below-save-granularity", "below-unit", "below", family=("prefix",), dedupe=("ask", "index"),
           place=HOOKS, form=("entries", "combined"), tracker=("table", "requests"), decode=(False,),
           unit_from=("option", "constant", "budget"), lazy=(False,),
           store_kind=("npy", "safetensors", "pt", "memory", "sqlite"), copy=("fancy", "index-select"),
           record=("layer",), **PUSH),
    _fault("minimum-length", "prompts below a minimum length are skipped",
           "below-save-granularity metadata-has-no-store", "lost", "mixed", decide=("stream", "prompt-end"),
           form=("entries", "flat", "ragged", "blob"), **PUSH),
    _fault("key-of-head", "the key counts the head of the prompt only, so longer ones count as stored",
           "false-already-stored", "lost", "same-head", family=("prefix", "units"), chain=("prefix",),
           dedupe=("ask", "index"), form=("entries", "flat", "blob"), **PUSH),
    _fault("key-without-parent", "a unit's key leaves out what came before it",
           "false-already-stored store-lost-later", "lost", "same-tail", family=("units",),
           chain=("chain",), dedupe=("ask", "index"), start=("zero",),
           form=("entries", "flat", "map"), **PUSH),
    _fault("first-step-only", "only what a request's first step computes is offered", "first-chunk-only",
           "lost", "chunked", tracker=("table", "requests", "blockstate"), decide=("stream",),
           decode=(False,), form=("entries", "flat", "ragged", "blob", "map"), **PUSH),
    _fault("sent-flag", "a flag set with the first chunk keeps later ones from being offered",
           "first-chunk-only", "lost", "chunked", decide=("stream",), decode=(False,),
           family=("units", "request"), tracker=("table", "requests", "manager", "blockstate"),
           form=("entries", "combined", "array"), **PUSH),
    _fault("never-offered", "the condition for a store is never true", "metadata-has-no-store", "nothing",
           "mixed", form=("entries", "flat", "ragged", "map", "blob", "combined", "array"), place=HOOKS,
           **PUSH),
    _fault("one-per-step", "one request of a step is offered, the others never", "metadata-has-no-store",
           "lost", "together", unit_from=("option", "constant", "block"), decide=("stream", "prompt-end"),
           tracker=("table", "requests", "manager"), form=("entries", "flat", "blob", "array"), **PUSH),
    _fault("store-budget", "after some units in all nothing more is offered", "metadata-has-no-store",
           "lost", "mixed", family=("units", "request"), decide=("stream", "prompt-end"),
           form=("entries", "flat", "map"), covers=("unit",), **PUSH),
    _fault("lookup-claims", "a lookup marks its keys as stored",
           "metadata-has-no-store false-already-stored", "lost", "mixed", family=("units",),
           dedupe=("index",), role=("both",), load=LOADS, lookup=("ask",)),
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
           **PUSH),
    _fault("misspelt-switch", "saving is switched on under a misspelt key",
           "config-key-unused connector-disabled-itself metadata-has-no-store", "nothing", "mixed",
           form=("entries", "flat", "blob"), place=HOOKS, **PUSH),
    _fault("role-consumer", "configured as consumer: it stores nothing", "role-does-not-save", "nothing",
           "mixed", grade=("any",), role=("both",), load=("sync", "threaded"), place=HOOKS,
           form=("entries", "flat", "combined")),
    _fault("disables-itself", "it switches itself off at start", "connector-disabled-itself", "nothing",
           "mixed", place=HOOKS, form=("entries", "flat", "map", "blob"), **PUSH),
    _fault("fails-to-start", "it raises while it is made", "connector-failed-to-start", "no-start", "mixed",
           place=HOOKS, form=("entries", "flat"), **PUSH),
    _fault("bind-without-super", "it binds its metadata without the base class", "metadata-not-bound",
           "nothing", "mixed", place=("layer",), meta_access=("own",), form=("entries", "flat", "map"),
           **PUSH),
    _fault("clears-early", "it clears its metadata with the first layer",
           "metadata-cleared-early metadata-not-bound", "lost", "mixed", place=("layer",),
           meta_access=("base", "attribute"), structure=("flat",), form=("entries", "flat", "blob"),
           **PUSH),
)
# fmt: on

# fmt: off
_HOOKS = (
    _fault("some-layers", "some layers are left out", "stored-nothing slots-short", "lost", "mixed",
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
    _fault("thread-dies", "the first exception ends the thread; the rest stays in its queue",
           "store-failed hook-raised", "lost", "mixed", run=("thread",), waits=(False,), place=HOOKS,
           store_flaw=("quota",), **PUSH),
    _fault("server-down", "the store's server does not answer; the error is swallowed",
           "store-failed exception-swallowed", "nothing", "mixed", store_kind=SERVER_KINDS,
           dedupe=("none", "index"), **PUSH),
    _fault("server-slow", "the server answers after the client's patience ended",
           "store-failed exception-swallowed", "nothing", "few", store_kind=SERVER_KINDS,
           dedupe=("none", "index"), **PUSH),
    _fault("server-refuses", "the server refuses, and nobody reads its answer",
           "store-failed store-incomplete", "nothing", "mixed", store_kind=SERVER_KINDS,
           dedupe=("none", "index"), **PUSH),
    _fault("queue-full", "a full queue drops what comes", "store-failed save-lost exception-swallowed",
           "lost", "together", run=("thread",), waits=(False,), place=("layer", "end", "buffer"),
           store_flaw=("slow",), lazy=(False,), **PUSH),
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
           family=("units", "prefix"), unit_from=("option", "constant", "block"), **PUSH),
)

_REST = (
    _fault("files-empty", "files are made and stay empty", "store-incomplete", "nothing", "mixed",
           store_flaw=("empty",), **PUSH),
    _fault("files-cut", "a part of each record is written", "store-incomplete", "lost", "mixed",
           store_flaw=("cut",), **PUSH),
    _fault("never-flushed", "what is written stays in a buffer", "store-incomplete", "lost", "mixed",
           store_flaw=("unflushed",), **PUSH),
    _fault("never-renamed", "temporary files are never renamed", "store-incomplete store-failed", "nothing",
           "mixed", store_flaw=("part-stays",), **PUSH),
    _fault("never-committed", "the database's transaction is never committed", "store-incomplete",
           "nothing", "mixed", store_flaw=("no-commit",), **PUSH),
    _fault("evicts", "a small store evicts before anyone asks", "store-lost-later", "lost", "mixed",
           store_flaw=("evict",), **PUSH),
    _fault("cleans-up", "a finished request's records are deleted", "store-lost-later", "lost", "mixed",
           family=("units",), place=HOOKS, decide=("stream", "prompt-end"), decode=(False,),
           store_kind=("npy", "safetensors", "raw", "pt", "memory", "sqlite"), run=("inline",),
           tracker=("table", "requests"), chain=("chain", "prefix"), **PUSH),
    _fault("ring-wraps", "a ring of places wraps over what it holds", "store-lost-later", "lost", "mixed",
           store_flaw=("wrap",), **PUSH),
    _fault("key-collides", "different prefixes get the same key; the last one stays",
           "store-lost-later false-already-stored", "lost", "mixed", **CONTENT, chain=("prefix",),
           dedupe=("none",),
           store_kind=("npy", "safetensors", "raw", "pt", "memory", "sqlite", "http", "frame"), **PUSH),
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
    _fault("late-read", "blocks are copied after they went to another request", "kv-misplaced kv-stale",
           "lost", "one-size", place=("deferred",), decide=("prompt-end",),
           unit_from=("option", "constant", "block"), **PUSH),
    _fault("half-precision", "copies go through half precision and back", "kv-altered", "lost", "mixed",
           axis=("plain", "permuted"), **PUSH),
    _fault("quantised", "copies go through eight bits and back", "kv-altered", "lost", "mixed", **PUSH),
    _fault("half-zeroed", "the second half of each slot is zeroes", "kv-altered", "lost", "mixed", **PUSH),
    _fault("heads-flipped", "heads are stored in reverse order", "kv-altered", "lost", "mixed",
           axis=("plain",), copy=("fancy", "index-select", "stack", "clone", "staging"), **PUSH),
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
    _fault("receive-never-told", "an asynchronous load ends, and the engine never hears of it",
           "load-never-finished", "stuck", "repeats", role=("both", "consumer"), load=("async",)),
)
# fmt: on

FAULTS: tuple[Fault, ...] = (
    *_SCHEDULE, *_WIRING, *_HOOKS, *_CHILDREN, *_REST, *_CONTENTS, *_COMPLETION, *_LOAD,
)  # fmt: skip
BY_NAME = {fault.name: fault for fault in FAULTS}
ALL_SILENT = tuple(SILENT)

TAKES_ALL = frozenset(
    (
        "put-swallowed", "put-swallowed-in-thread", "future-lost", "thread-dies", "server-down",
        "server-slow", "server-refuses", "queue-full", "deque-full", "pending-by-layer", "child-dead",
        "files-empty", "files-cut", "never-flushed", "never-renamed", "never-committed", "evicts",
        "cleans-up", "ring-wraps", "key-collides", "half-precision", "quantised", "half-zeroed",
        "heads-flipped", "hit-by-head",
    )
)  # fmt: skip
"""Faults behind the read: all that is offered is taken from the KV cache, from the right slots and after it
was computed, whatever becomes of it. Of every other fault no more is taken than lies in the store."""
