"""From a seed to a plan: everything that a generated connector and its workload are made of."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from kvgen.catalogue import BY_NAME, FAULTS, HOOKS, Fault
from kvgen.designs import DESIGN_BY_NAME, DESIGNS, GONE_LATER, LOSSY, Design
from kvgen.keys import ALGORITHMS, ENCODINGS, FORMATS, KeyScheme
from kvgen.shapes import CONTAINERS, ENTRY_NOISE, RECORDS, SPECIAL, STEP_NOISE, WHERE, Shape
from kvgen.stores import (
    COMPRESSING,
    FILE_KINDS,
    FLAWS,
    KINDS,
    LOSSY_PACKS,
    PACKED_KINDS,
    PACKS,
    PUBLISH,
    SEEN_BY_SIZE,
    SERVER_KINDS,
    StoreChoice,
)
from kvgen.workload import Round, draw_rounds

VERSION = 4
"""Goes into every draw: a new version of the generator gives new connectors."""
_WHOLE = frozenset(("whole-units", "workloads", "lengths"))
"""Properties of verify that rest on every whole unit of a prompt coming back."""
_LOST = frozenset(("transfer", "whole-units", "lookups-agree"))
"""Properties of verify of which KV that is lost breaks one; which, hangs on the sizes and on the lookup."""
_OF_SAVES = frozenset(("finishes-told", "step-time", "flat"))
"""Properties of verify that a connector which never loads can break."""

HEALTHY_EVERY = 4
"""One seed of four is healthy; the others go through the faults in turn."""

DESIGN_EVERY = 2
"""One healthy seed of two is a deliberate choice of designs.py, in turn."""

# What a plan can be. Repeating a value makes it more likely.
OPTIONS: dict[str, tuple[Any, ...]] = {
    "role": ("producer", "producer", "both", "both", "consumer"),
    "family": ("units", "units", "units", "prefix", "prefix", "request", "request-whole", "request-exact"),
    "structure": ("flat", "flat", "split", "package"),
    "hma": (False, False, False, True),
    "meta_access": ("base", "attribute", "own"),
    "caches": ("register", "context"),
    "log": ("logging", "vllm", "none"),
    "block": (32, 32, 32, 64, 64, 96, 128),
    "unit_blocks": (1, 1, 2, 2, 4),
    "unit_from": ("option", "constant", "block", "budget"),
    "tracker": ("table", "table", "requests", "manager", "blockstate", "first-step"),
    "decide": ("stream", "stream", "prompt-end", "finish"),
    "decode": (False, False, False, True),
    "dedupe": ("none", "ask", "index"),
    "start": ("zero", "computed"),
    "place": ("layer", "layer", "buffer", "end", "end", "deferred", "held", "held"),
    "run": ("inline", "inline", "pool", "thread", "aio", "behind"),
    "waits": (True, False),
    "lazy": (False, False, True),
    "copy": ("fancy", "index-select", "stack", "clone", "staging", "numpy", "address", "slots", "view"),
    "record": ("layer", "layer", "stack"),
    "axis": ("plain", "plain", "permuted", "slots"),
    "give": ("index-put", "index-copy", "per-block", "numpy", "address", "scatter"),
    "naming": ("folder", "number-first", "number-last", "layer-last"),
    "guard": ("none", "none", "log", "count"),
    "load": ("none", "sync", "layerwise", "threaded", "async"),
    "lookup": ("ask", "index"),
    "chain": ("chain", "chain", "prefix", "vllm"),
    "algorithm": ALGORITHMS,
    "encoding": ENCODINGS,
    "key_form": FORMATS,
    "store_kind": (*KINDS, "npy", "safetensors", "raw"),
    "store_flaw": ("",),
    "publish": (*PUBLISH, "rename", "link"),
    "form": ("entries",) * 8 + SPECIAL,
    "shape_record": RECORDS,
    "container": CONTAINERS,
    "what": ("key", "key", "tokens", "index"),
    "where": ("blocks", "blocks", *WHERE),
    "covers": ("unit", "span", "whole"),
    "rid": (True, False),
    "dataclass_meta": (True, False),
    "prefix_caching": (False, False, True),
    "async_scheduling": (False, False, True),
    "defer": (False, False, True),
    "pack": ("plain", "plain", "plain", *PACKS),
    "multi": (False,) * 11 + (True,),
    "noise": (0, 0, 1, 2),
    "step_noise": (0, 0, 1, 2),
    "work": (
        "mixed", "one-by-one", "together", "chunked", "exact", "decode", "tails", "repeats", "longer",
        "pressure",
    ),
}  # fmt: skip

# Of a connector that only pulls: what is said of saving has no meaning.
NOTHING_SAVED = {
    "place": "end", "run": "inline", "waits": False, "lazy": False, "decide": "stream", "decode": False,
    "dedupe": "none", "start": "computed", "lookup": "ask",
}  # fmt: skip

# A worker that keeps the tables itself is told what was scheduled, and nothing else.
DELTAS = {
    "tracker": "table", "decide": "stream", "dedupe": "none", "decode": False, "meta_access": "own",
    "lookup": "ask", "start": "computed",
}  # fmt: skip

CHILD: dict[str, tuple[Any, ...]] = {
    "role": ("producer",), "multi": (False,), "place": HOOKS, "family": ("units", "prefix"),
    "unit_from": ("option", "constant", "block"), "decode": (False,),
}  # fmt: skip
CHILD_SEED = 500_000_000

SLOTS = ("slot-tensor", "slot-list")
"""Entries that name slots instead of blocks: their worker copies slot by slot."""

WHOLE = ("prefix", "request-whole", "request-exact")
"""Families whose records hold a whole prefix."""

NO_INDEX_OF_ITS_OWN = ("container", "arena", "pwrite", "places", "journal")
BY_ADDRESS = ("numpy", "address")
"""Stores whose index lives in one object: the scheduler's object knows nothing of the worker's."""


@dataclass(frozen=True)
class Plan:
    """A connector, its fault if any, and its workload. The fields are those of OPTIONS, and:

    Attributes:
        unit: tokens of one stored unit.
        budget: ``max_num_batched_tokens`` of the engine.
        blocks: KV blocks of the engine.
        keys: how records are named; None where they carry the request's id.
        rounds: the workload.
        threads: of a pool.
        variant: which of a fault's forms it is (its meaning is the fault's own).
        child: the second child, where a MultiConnector holds two of them.
        design: name of the deliberate choice of a healthy connector; "" for none.
        limit: the number that a design counts by (tokens, units, prompts, records).
        cuda: the KV lies on a GPU: [blocks, K or V, tokens, heads, size], heads before tokens in memory
            (Triton's attention with vLLM's layout HND).
    """

    seed: int
    fault: str
    choice: dict[str, Any]
    unit: int
    budget: int
    blocks: int
    keys: KeyScheme
    shape: Shape
    store: StoreChoice
    rounds: tuple[Round, ...]
    threads: int
    variant: int
    child: Plan | None = None
    design: str = ""
    limit: int = 0
    cuda: bool = False

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["choice"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def planted(self) -> Fault | None:
        return BY_NAME.get(self.fault)

    @property
    def chosen(self) -> Design | None:
        return DESIGN_BY_NAME.get(self.design)

    @property
    def shows(self) -> str:
        """Where the fault shows without opening the store; "" for a healthy one."""
        if self.planted is None:
            return ""
        hidden = self.planted.shows == "sizes" and self.store.kind not in SEEN_BY_SIZE
        reads = self.planted.shows == "cache" or self.planted.needs_reads
        hidden |= reads and self.by_address
        # Of KV that this engine never computed there is nothing to hold it against.
        hidden |= self.role == "consumer" and self.planted.needs_computed
        return "return-only" if hidden else self.planted.shows

    @property
    def by_address(self) -> bool:
        """It copies by the address of all of a KV tensor, as only KV in host memory lets it: nobody sees
        which slots."""
        loads = self.returns and self.choice["give"] in BY_ADDRESS
        return loads or self.choice["copy"] in BY_ADDRESS

    @property
    def returns(self) -> bool:
        """The connector also loads: what it stores can come back."""
        return bool(self.choice["load"] != "none")

    @property
    def breaks(self) -> frozenset[str]:
        """Properties of verify of which the planted fault breaks one, with an empty store at the start: where
        nothing can come back from it, of what is asked of saves alone."""
        if self.planted is None or self.role == "consumer":
            return frozenset()
        found = self.planted.breaks
        if not self.returns:
            return found & _OF_SAVES
        # Of what is lost a lookup finds nothing, or not all, or it offers what is not there: a record that
        # its index knows, a file that a failed write left, what goes away before it is loaded.
        return found | _LOST if found & _LOST else found

    @property
    def filled(self) -> bool:
        """The store holds the first round's prompts before the engine starts."""
        return bool(self.choice["role"] == "consumer" or self.design == "reads-only")

    @property
    def all_units(self) -> bool:
        """Whether a sound connector of this plan takes every whole unit of a prompt, which verify is told."""
        limit = self.planted is not None and self.planted.grade == "limit"
        return not (self.design or limit or self.whole)

    @property
    def unpromised(self) -> frozenset[str]:
        """Properties of verify that a sound connector of this plan does not promise."""
        out = {"store-conditions"}  # an error of the store goes through to the engine
        in_memory = self.store.kind in ("memory", "shm", "daemon", *NO_INDEX_OF_ITS_OWN)
        if in_memory or not self.returns or "index" in (self.choice["dedupe"], self.choice["lookup"]):
            out.add("restart")
        if not self.returns:
            out |= {"transfer", "whole-units"}
        if self.design or (self.planted is not None and self.planted.grade != "fault"):
            out |= {"transfer", "restart"}  # what is taken comes back all the same
        if self.design in GONE_LATER:
            out |= _WHOLE
        if self.whole:  # a prompt of just so many units is stored under a key that asks for one token more
            out |= _WHOLE
        if self.design in LOSSY:
            out.add("outputs")
        if self.choice["run"] == "inline" and self.store.pack in COMPRESSING:
            out.add("step-time")  # it compresses within the hook: that is most of a small model's step
        return frozenset(out)

    @property
    def late(self) -> bool:
        """Writes come to rest some time after the connector has said all that it says of them."""
        return bool(self.choice["run"] == "behind" or self.store.kind == "writer")

    @property
    def whole(self) -> bool:
        """One record holds a whole prefix."""
        return self.choice["covers"] == "whole"

    @property
    def kv_role(self) -> str:
        if self.fault == "role-consumer" or self.design == "reads-only":
            return "kv_consumer"
        if self.design == "writes-only":
            return "kv_producer"
        if self.role == "producer":
            return "kv_producer" if self.seed % 3 else "kv_both"
        return "kv_consumer" if self.role == "consumer" else "kv_both"

    def describe(self) -> str:
        """One line: the choices that matter most."""
        shape = self.shape
        meta = shape.form if shape.form != "entries" else f"{shape.record}/{shape.container}/{shape.where}"
        saves = "-" if self.role == "consumer" else f"{self.place}/{self.run}{'/wait' if self.waits else ''}"
        load = "" if self.load == "none" else f" load={self.load}"
        store = self.store.kind
        if store in FILE_KINDS and self.store.publish != "rename":
            store += f" by {self.store.publish}"
        if self.store.pack != "plain":
            store += f" as {self.store.pack}"
        design = f" choice={self.design}" + (f" {self.limit}" if self.limit else "") if self.design else ""
        return (
            f"{self.role} {self.family} unit={self.unit} of {self.block} save={saves} meta={meta} "
            f"store={store}{load} work={self.work}{design}{' + a second child' if self.child else ''}"
        )


def fault_of(seed: int) -> str:
    """The name of the fault that belongs to a seed; "" for a healthy one."""
    if seed % HEALTHY_EVERY == 0:
        return ""
    number = seed - seed // HEALTHY_EVERY - 1
    lap, place = divmod(number, len(FAULTS))
    order = list(range(len(FAULTS)))
    random.Random(f"lap {lap}").shuffle(order)
    return FAULTS[order[place]].name


def design_of(seed: int) -> str:
    """The name of the deliberate choice of a healthy seed; "" for none."""
    number = seed // HEALTHY_EVERY
    return "" if seed % HEALTHY_EVERY or number % DESIGN_EVERY == 0 else nth_design(number // DESIGN_EVERY)


def nth_design(number: int) -> str:
    """The designs in turn."""
    lap, place = divmod(number, len(DESIGNS))
    order = [design.name for design in DESIGNS]
    random.Random(f"designs {lap}").shuffle(order)
    return order[place]


def draw(seed: int, name: str | None = None) -> Plan:
    """The plan of a seed, with its own fault or design, or the one that is named ("" for none).

    Raises:
        KeyError: no fault and no design of that name.
        RuntimeError: no valid plan was found (an error of the generator).
    """
    if name is None:
        name = fault_of(seed) or design_of(seed)
    asks: Fault | Design | None = None
    if name:
        asks = DESIGN_BY_NAME[name] if name in DESIGN_BY_NAME else BY_NAME[name]
    rng = random.Random(f"connector {VERSION}:{seed}:{name}")
    allowed = _allowed(asks)
    role = rng.choice(allowed["role"])
    for attempt in range(3000):
        if attempt % 500 == 499:
            role = rng.choice(allowed["role"])
        here = _narrowed({**allowed, "role": (role,)}, rng)
        if not all(here.values()):
            continue  # what the fault asks for does not go together with what was drawn first
        for _ in range(60):
            choice = {key: rng.choice(values) for key, values in here.items()}
            if _valid(choice):
                return _finish(seed, name, choice, rng)
    raise RuntimeError(f"seed {seed}: no valid plan with the fault {name or 'none'}")


def _narrowed(allowed: dict[str, tuple[Any, ...]], rng: random.Random) -> dict[str, tuple[Any, ...]]:
    """What matters most is drawn first, and what hangs on it restricted: else rare kinds hardly come."""
    here = dict(allowed)

    def only(field: str, values: tuple[Any, ...]) -> None:
        here[field] = tuple(value for value in here[field] if value in values) or here[field]

    def fix(field: str) -> Any:
        here[field] = (rng.choice(here[field]),)
        return here[field][0]

    role = here["role"][0]
    if here["pack"] != OPTIONS["pack"]:
        only("store_kind", PACKED_KINDS)
    if role == "consumer":
        here.update((field, (value,)) for field, value in NOTHING_SAVED.items())
        only("store_kind", (*FILE_KINDS, "sqlite", *SERVER_KINDS))
    if role != "producer":
        only("family", ("units", "prefix"))
        only("work", ("repeats", "longer"))
    only("load", ("none",) if role == "producer" else ("sync", "layerwise", "threaded", "async"))
    family, form = fix("family"), fix("form")
    only("covers", ("whole",) if family in WHOLE else ("unit", "span"))
    if family == "request-exact":
        only("unit_from", ("block",))
    only("what", ("index",) if family.startswith("request") else ("key", "tokens"))
    if family.startswith("request"):
        for field, value in (("dedupe", "none"), ("lookup", "ask"), ("start", "zero"), ("chain", "chain")):
            only(field, (value,))
        only("work", tuple(work for work in OPTIONS["work"] if work not in ("repeats", "longer")))
    if form == "deltas":
        only("place", HOOKS)
        only("what", ("tokens", "index"))
        for field, value in DELTAS.items():
            only(field, (value,))
    if form == "entries" and not _slots_go(here):
        only("where", tuple(where for where in WHERE if where not in SLOTS))
    for field in ("place", "store_kind", "load", "chain", "where", "decode", "work", "run"):
        fix(field)
    only("decide", ("finish",) if here["place"] == ("held",) else ("stream", "prompt-end"))
    if form == "entries" and here["where"][0] in SLOTS:
        here.update(copy=("slots",), axis=("slots",), give=("scatter",))
    else:
        here.update(
            (field, tuple(v for v in here[field] if v not in ("slots", "scatter")))
            for field in ("copy", "axis", "give")
        )
    return here


def _slots_go(here: dict[str, tuple[Any, ...]]) -> bool:
    """Whether what a fault asks for can be done slot by slot."""
    producer, consumer = here["role"] == ("producer",), here["role"] == ("consumer",)
    return (consumer or "slots" in here["copy"]) and (producer or "scatter" in here["give"])


def _allowed(asks: Fault | Design | None) -> dict[str, tuple[Any, ...]]:
    allowed = dict(OPTIONS)
    if asks is None:
        return allowed
    allowed["multi"] = (False,)
    for key, values in asks.allow.items():
        kept = tuple(value for value in OPTIONS[key] if value in values)
        allowed[key] = kept or tuple(values)
    flaws = allowed["store_flaw"]
    kinds = {kind for flaw in flaws for kind in FLAWS[flaw]}
    allowed["store_kind"] = tuple(kind for kind in allowed["store_kind"] if kind in kinds)
    allowed["work"] = asks.work or OPTIONS["work"]
    return allowed


def _valid(c: dict[str, Any]) -> bool:
    return not any(_conflicts(c))


def _conflicts(c: dict[str, Any]) -> Iterator[bool]:
    """Each is a reason why such a connector would not be one that works."""
    yield from _role_conflicts(c)
    yield from _record_conflicts(c)
    yield from _scheduler_conflicts(c)
    yield from _worker_conflicts(c)
    yield from _workload_conflicts(c)


def _role_conflicts(c: dict[str, Any]) -> Iterator[bool]:
    producer, consumer = c["role"] == "producer", c["role"] == "consumer"
    yield producer != (c["load"] == "none")
    yield c["family"].startswith("request") and not producer
    # what a pull connector loads has to be in its store before it starts
    yield consumer and c["store_kind"] not in (*FILE_KINDS, "sqlite", *SERVER_KINDS)
    yield consumer and (c["chain"] == "vllm" or c["unit_from"] == "budget" or c["form"] == "deltas")


def _record_conflicts(c: dict[str, Any]) -> Iterator[bool]:
    whole = c["covers"] == "whole"
    yield whole != (c["family"] in WHOLE)
    yield c["family"] == "request-exact" and (c["unit_from"] != "block" or c["store_flaw"] != "")
    yield (c["what"] == "index") != c["family"].startswith("request")
    yield c["chain"] == "vllm" and (c["what"] != "key" or c["family"] != "units")
    yield c["chain"] == "vllm" and c["tracker"] not in ("requests", "manager", "blockstate")
    slots = c["form"] == "entries" and c["where"] in SLOTS
    yield slots != (c["copy"] == "slots") and c["role"] != "consumer"
    yield slots != (c["axis"] == "slots")
    yield slots != (c["give"] == "scatter") and c["role"] != "producer"
    yield slots and c["copy"] != "slots"
    yield c["record"] == "stack" and c["place"] == "layer"
    yield c["axis"] == "permuted" and c["copy"] in BY_ADDRESS
    yield c["axis"] == "permuted" and c["give"] in BY_ADDRESS
    needs_rid = c["place"] in ("deferred", "held") or c["load"] == "async"
    if c["form"] == "entries":
        yield needs_rid and not c["rid"] and c["what"] != "index"
    else:
        # one key, one entry: two requests that load the same prefix in one step need two
        yield c["form"] == "map" and (needs_rid or c["load"] != "none")
        yield c["form"] == "combined" and c["what"] == "key"
        yield c["form"] == "deltas" and (c["what"] == "key" or whole)
        yield c["form"] not in ("combined", "deltas") and c["what"] == "tokens"


def _scheduler_conflicts(c: dict[str, Any]) -> Iterator[bool]:
    yield (c["decide"] == "finish") != (c["place"] == "held")
    yield c["family"].startswith("request-") and c["decide"] == "stream"
    yield c["family"] != "units" and c["start"] != "zero" and c["role"] != "consumer"
    yield c["family"].startswith("request") and (c["dedupe"] != "none" or c["lookup"] != "ask")
    # what was loaded is not stored again
    yield c["role"] == "both" and c["dedupe"] == "none" and c["start"] == "zero"
    yield c["store_kind"] in NO_INDEX_OF_ITS_OWN and "ask" in (
        c["dedupe"],
        c["lookup"] * (c["load"] != "none"),
    )
    yield c["tracker"] == "first-step" and (c["decode"] or c["decide"] == "finish" or c["form"] == "deltas")
    yield c["tracker"] == "first-step" and c["unit_from"] == "budget"
    yield c["decode"] and (c["decide"] == "prompt-end" or c["tracker"] in ("table", "first-step"))
    yield c["multi"] and (c["role"] != "producer" or c["place"] not in HOOKS or c["unit_from"] == "budget")
    yield c["multi"] and (c["family"] not in ("units", "prefix") or c["work"] == "pressure")
    yield c["defer"] and c["load"] == "none"
    yield c["async_scheduling"] and (c["decode"] or c["work"] in ("decode", "pressure", "resumed"))
    deltas = c["form"] == "deltas"
    yield deltas and (
        c["tracker"] != "table" or c["decide"] != "stream" or c["dedupe"] != "none" or c["decode"]
    )
    yield deltas and (c["place"] in ("held", "deferred") or (c["load"] != "none" and c["lookup"] == "index"))
    yield deltas and c["meta_access"] != "own"
    # a lookup in the scheduler's own index promises what a write that nobody waits for has not stored yet
    unwaited = c["run"] != "inline" and not c["waits"]
    late = c["place"] == "deferred" or c["store_kind"] == "writer" or unwaited
    yield late and c["load"] != "none" and c["lookup"] == "index"
    yield c["unit_from"] == "block" and c["unit_blocks"] != 1
    yield c["unit_blocks"] * c["block"] > 256


def _worker_conflicts(c: dict[str, Any]) -> Iterator[bool]:
    yield c["run"] == "inline" and (c["waits"] or c["lazy"])
    yield c["lazy"] and c["place"] not in ("layer", "end", "held")
    yield c["lazy"] and not c["waits"] and c["place"] != "held"
    yield c["lazy"] and c["copy"] == "staging"
    yield c["place"] == "held" and c["waits"]
    yield c["place"] == "held" and c["run"] != "inline" and not c["lazy"]
    yield c["place"] == "deferred" and c["run"] != "inline"
    yield c["store_kind"] not in FLAWS[c["store_flaw"]]
    # the last of several threads to write is not known
    yield (
        c["store_kind"] in ("container", "arena", "places", "journal")
        and c["run"] == "pool"
        and c["load"] != "none"
    )
    # places of one size
    yield c["store_kind"] == "arena" and c["covers"] == "whole"
    yield c["pack"] != "plain" and (c["store_kind"] not in PACKED_KINDS or c["store_flaw"] == "cut")
    yield c["pack"] in LOSSY_PACKS and c["family"] == "request-exact"
    # a record of zeroes is read back as numbers
    yield c["store_flaw"] == "empty-read" and c["pack"] != "plain"
    yield c["publish"] == "place" and c["run"] != "inline" and not c["waits"]
    # what writes later is never waited for, and its names show later than the lookup of the next request
    yield c["run"] == "behind" and c["waits"]
    # put and get of a store with an index of its own must be the same object
    yield c["store_kind"] == "memory" and c["role"] == "consumer"


def _workload_conflicts(c: dict[str, Any]) -> Iterator[bool]:
    hits = c["work"] in ("repeats", "longer")
    yield hits and c["family"].startswith("request")
    yield c["work"] == "chunked" and c["tracker"] == "first-step"
    # an engine that finds the prompt in its own cache asks no connector
    yield hits and c["role"] != "producer" and c["prefix_caching"] and c["family"] == "prefix"
    yield c["work"] in ("decode", "pressure") and c["unit_from"] == "budget"
    # a request that was preempted comes back among the cached ones, with all its blocks anew
    yield c["work"] == "pressure" and (c["tracker"] == "first-step" or c["form"] == "deltas")


def _finish(seed: int, name: str, c: dict[str, Any], rng: random.Random) -> Plan:
    design, name = (name, "") if name in DESIGN_BY_NAME else ("", name)
    unit = c["block"] * c["unit_blocks"]
    shape = Shape(
        c["form"], c["shape_record"], c["container"], c["what"], c["where"], c["covers"], c["rid"],
        c["dataclass_meta"], _noise(c, rng),
    )  # fmt: skip
    flaw = {
        "key-of-head": "head", "hit-by-head": "head", "key-without-parent": "orphan",
        "key-collides": "narrow", "salted-hash": "hash",
    }.get(name, "")  # fmt: skip
    keys = KeyScheme(c["chain"], c["algorithm"], c["encoding"], c["key_form"], flaw, c["block"])
    if name in ("unit-above-all", "empty-prefix", "misspelt-unit"):
        unit = c["block"] * rng.choice((8, 12, 16, 20))
    if name == "unit-above-most":
        unit = c["block"] * rng.choice((4, 5, 6))
    unit = min(unit, 1920 // c["block"] * c["block"])
    work = draw_rounds(c["work"], c["block"], unit, rng)
    budget = 2048
    if c["work"] in ("chunked", "aborts"):
        budget = rng.choice((100, 128, 150, 180, 192))
    if c["work"] == "chunked-alone":
        budget = unit + rng.randrange(unit)
    if name in ("rounds-up", "straddling-left-out") and budget % unit == 0:
        budget -= 14  # a step must end within a unit
    if c["unit_from"] == "budget":
        budget = unit
    if c["tracker"] == "first-step":
        # No fault of its own only where each prompt is computed in one step.
        budget = max(budget, *(sum(map(len, one.prompts)) for one in work))
    plan = Plan(
        seed, name, c, unit, budget, rng.choice((96, 160, 256)), keys, shape,
        StoreChoice(c["store_kind"], c["store_flaw"], 0, c["publish"], pack=c["pack"]),
        work, rng.choice((1, 2, 3)), rng.randrange(1000), design=design,
    )  # fmt: skip
    plan = replace(plan, limit=_limit(plan, rng))
    plan = replace(plan, store=_store(plan, rng), blocks=_enough_blocks(plan))
    return replace(plan, child=_child(plan, rng)) if plan.multi else plan


def _limit(plan: Plan, rng: random.Random) -> int:
    """The number that a design counts by."""
    lengths = sorted(len(prompt) for part in plan.rounds for prompt in part.prompts)
    units = sum(length // plan.unit for length in lengths)
    most = max(lengths) // plan.unit
    if plan.design == "quota" and plan.variant % 2:
        return rng.randint(1, len(lengths) - 1)  # prompts
    numbers = {
        "minimum-length": lengths[len(lengths) // 2],
        "quota": rng.randint(1, max(1, units - 1)),
        "head-only": rng.randint(1, max(1, most - 1)),
        "end-left-out": rng.randint(1, max(1, most - 1)),
        "ring": rng.randint(1, max(1, units - 1)),
        "evicts": rng.randint(1, max(1, units - 1)),
        "time-to-live": 1500,  # milliseconds
    }
    return numbers.get(plan.design, 0)


def _child(plan: Plan, rng: random.Random) -> Plan:
    """A second connector for the same workload. What is planted in a MultiConnector is the child's fault."""
    name = rng.choice(("server-down", "put-swallowed")) if plan.fault == "child-dead" else ""
    allowed = _allowed(BY_NAME[name] if name else None)
    same = {
        key: (plan.choice[key],) for key in ("block", "work", "async_scheduling", "prefix_caching", "hma")
    }
    same["unit_blocks"] = tuple(n for n in (1, 2, 4) if n * plan.block <= plan.unit)
    allowed.update(same, **CHILD)
    if name == "put-swallowed":
        allowed["store_flaw"] = ("no-dir", "bad-type")
    for _ in range(3000):
        here = _narrowed(allowed, rng)
        choice = {key: rng.choice(values) for key, values in here.items() if values}
        if len(choice) == len(here) and _valid(choice):
            child = _finish(plan.seed + CHILD_SEED, name, choice, rng)
            return replace(child, rounds=plan.rounds, budget=plan.budget, blocks=plan.blocks)
    raise RuntimeError(f"seed {plan.seed}: no second child")


def _noise(c: dict[str, Any], rng: random.Random) -> tuple[str, ...]:
    entry = rng.sample(sorted(ENTRY_NOISE), c["noise"]) if c["form"] == "entries" else []
    step = rng.sample(sorted(STEP_NOISE), c["step_noise"])
    if "stamp" in entry and "stamp" in step:
        step.remove("stamp")  # one word for one thing
    return (*entry, *(f"step:{name}" for name in step))


def _store(plan: Plan, rng: random.Random) -> StoreChoice:
    """The store with the numbers that its flaw needs."""
    flaw = plan.store.flaw
    layers = 4
    record = plan.unit * 2 * 128 * 4 * (layers if plan.record == "stack" else 1)  # bytes of a unit
    limit = {
        "quota": record * rng.choice((0, 1, 2)),
        "cut": record // 4 + rng.choice((0, 12, 500)),
        "evict": rng.choice((1, 2, 3)) * (1 if plan.record == "stack" else layers),
        "wrap": rng.choice((1, 2)) * (1 if plan.record == "stack" else layers),
        "newest": rng.choice((1, 2, 3)) * (1 if plan.record == "stack" else layers),
        "wipe": rng.choice((2, 3)) * (1 if plan.record == "stack" else layers),
        "unanswered": rng.choice((1, 2, 3)) * (1 if plan.record == "stack" else layers),
        "dies": rng.choice((1, 2, 5)),
        "slow": rng.choice((40, 60)),
    }.get(flaw, 0)
    if plan.fault == "queue-full":
        limit = 80
    if plan.fault == "queue-thrown-away":
        limit = 200
    if plan.fault == "slow-save":
        limit *= 3  # well above the share of a step that verify is told a hook may take
    limit = plan.limit or limit
    choice = replace(plan.store, limit=limit)
    if plan.fault == "server-slow":
        choice = replace(choice, timeout=0.08)
    if plan.fault in ("server-refuses", "server-refuses-some"):
        choice = replace(choice, check=False)
    return choice


def _enough_blocks(plan: Plan) -> int:
    """KV blocks of the engine: all requests of the largest round at once, and some more."""
    most = max(
        sum((len(p) + r.max_tokens) // plan.block + 1 for p in r.prompts)
        if r.together
        else max((len(p) + r.max_tokens) // plan.block + 1 for p in r.prompts)
        for r in plan.rounds
    )
    if plan.fault in ("late-read", "thread-reads-late"):
        return most + 2
    if plan.work in ("pressure", "resumed"):
        longest = max(len(p) + r.max_tokens for r in plan.rounds for p in r.prompts) // plan.block + 3
        return max(longest, most * 3 // 5) + 1
    return max(plan.blocks, most + 16)
