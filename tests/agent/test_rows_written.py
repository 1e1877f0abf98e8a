"""What the agent writes is what the rows say: every kind of record, written by the agent's own code.

Each case drives the agent over stand-ins for vLLM with numbers that are all different, takes one of the
records as they lie in the spool, and holds each of its fields against what was given. Two columns that
change places in a writer (or in ``trace/rows.py``) cannot pass: the last test exchanges every two words of
every record and sees the case fail.
"""

from __future__ import annotations

import inspect
import itertools
import json
import weakref
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from dataclasses import replace as dataclass_replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtrace.agent import ids
from kvtrace.agent.engine import ops, scheduler, worker
from kvtrace.agent.hooks import device as device_module
from kvtrace.agent.hooks.connector import traced
from kvtrace.agent.hooks.device import Device
from kvtrace.agent.prints import print_records
from kvtrace.agent.state import AGENT, clock
from kvtrace.agent.steps import prefixes
from kvtrace.agent.steps.prompts import Filled
from kvtrace.agent.watch import call, states
from kvtrace.agent.watch.operations import READ, Touched
from kvtrace.trace import hooks, rows
from kvtrace.trace import ops as op_table
from kvtrace.trace.facts import ClientIdFact
from kvtrace.trace.format import (
    DETAIL_IS_OP,
    NONE_ANSWER,
    STEP_SHIFT,
    Flag,
    Kind,
    Role,
    Skip,
    Stop,
    Way,
)
from kvtrace.trace.reader import Spool, spool_paths

from . import fakes
from .fake_cuda import Cuda, Stream, on_cuda

pytestmark = pytest.mark.usefixtures("each_recorder")

BLOCK = 16
PROMPT = [1000 + n for n in range(200)]
STEP = 77 << STEP_SHIFT | 5
"""Of the engine's tag and its fifth schedule()."""


# --- stand-ins for vLLM -----------------------------------------------------------------------------


class Scheduler:
    """As far as the wrappers stand in it; ``next`` is what the next schedule() gives."""

    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.block_size = BLOCK
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        self.next: Any = None
        self.kv_cache_manager = SimpleNamespace(get_block_ids=lambda req_id: ([9, 5, 6],))

    def add_request(self, request: Any) -> None:
        self.requests[request.request_id] = request

    def schedule(self) -> Any:
        for req_id, tokens in self.next.num_scheduled_tokens.items():
            if req_id in self.requests:
                self.requests[req_id].num_computed_tokens += tokens
        return self.next

    def _preempt_request(self, request: Any) -> None:
        request.num_preemptions += 1

    def _free_request(self, request: Any) -> None:
        del self.requests[request.request_id]


class WorkerWrapperBase:
    """``body`` is what a step does."""

    def __init__(self, body: Callable[[], Any]) -> None:
        self.body = body

    def execute_model(self, scheduler_output: Any) -> Any:
        self.body()
        return "output"


class Everything(fakes.KVConnectorBase_V1):
    """A connector whose hooks all have something to say."""

    folder = Path()

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        if kv_layer == "bad":
            raise ValueError("no room")
        if kv_layer == "files":
            with open(self.folder / "first", "ab") as file:
                file.write(b"x" * 300)
            (self.folder / "second").write_bytes(b"x" * 33)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[Any, Any]:
        return {"sent a", "sent b", "sent c"}, {"received"}

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        return SimpleNamespace(finished_sending=None, finished_recving=None, failed_recving={"broken"})

    def get_block_ids_with_load_errors(self) -> set[int]:
        return {11, 12, 13}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[Any, bool]:
        return (None if request.request_id == "undecided" else 64), True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        entry = SimpleNamespace(req_id="req", slot_mapping=range(84, 92), num_tokens=50, is_store=True)
        return fakes.WorkMetadata(entry)  # type: ignore[arg-type]

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, Any]:
        return True, None


def request(req_id: str = "req") -> Any:
    return SimpleNamespace(
        request_id=req_id, num_prompt_tokens=len(PROMPT), prompt_token_ids=PROMPT, max_tokens=9,
        num_computed_tokens=0, num_output_tokens=3, num_tokens=len(PROMPT) + 3, num_preemptions=0,
        status=SimpleNamespace(name="FINISHED_STOPPED"),
    )  # fmt: skip


def output(**scheduled: int) -> Any:
    return SimpleNamespace(
        num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values()),
        scheduled_new_reqs=[], finished_req_ids=set(), preempted_req_ids=set(),
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], resumed_req_ids=set(), new_block_ids=[]),
    )  # fmt: skip


# --- drives: what the agent does --------------------------------------------------------------------


def new_scheduler() -> Any:
    cls = type("Scheduler", (), dict(vars(Scheduler)))
    scheduler.wrap_scheduler(SimpleNamespace(Scheduler=cls))  # type: ignore[arg-type]
    made: Any = cls(SimpleNamespace())
    made._kvtrace_state.step = STEP - 1
    return made


def new_connector(role: Role) -> Any:
    connector = Everything()
    connector = traced(connector, role, "Everything")
    return connector


def on_worker() -> Any:
    """A worker's connector in a step with metadata: 7 slots to store in 2 entries, 3 to load in 1."""
    connector = new_connector(Role.WORKER)
    state = AGENT.worker
    state.step, state.mode = STEP, 1
    metadata = [fakes.Work(range(3)), fakes.Work(range(4)), fakes.Work(range(3), is_store=False)]
    connector.bind_connector_metadata(fakes.WorkMetadata(*metadata))
    state.watch_store = state.watch_load = None
    return connector


def on_scheduler() -> Any:
    connector = new_connector(Role.SCHEDULER)
    AGENT.scheduler.step = STEP
    connector.scheduler = new_scheduler()  # which holds the connector, as vLLM's
    AGENT.scheduler.current = weakref.ref(connector.scheduler)
    connector.scheduler.add_request(request())
    return connector


def schedule() -> None:
    engine = new_scheduler()
    engine.add_request(request())
    engine.requests["req"].num_computed_tokens = 32
    engine.next = output(req=64, other=1, third=1)
    tables = ([21, 22, 23], [0, 0, 34, 33, 32])
    engine.next.scheduled_new_reqs = [SimpleNamespace(req_id=name, block_ids=tables) for name in ("req", "b")]
    engine.next.preempted_req_ids = {"p"}
    engine.next.finished_req_ids = {"f", "g", "h", "i"}
    engine.schedule()


def a_session_gets_its_next_part() -> None:
    """The scheduler goes on with the request that there is, as if it were new: 6 tokens were generated."""
    engine = new_scheduler()
    first = SimpleNamespace(**{**vars(request()), "resumable": True})
    engine.add_request(first)
    engine.next = output(req=200)
    engine.next.scheduled_new_reqs = [SimpleNamespace(req_id="req", block_ids=([21],))]
    engine.schedule()
    first.num_computed_tokens, first.num_prompt_tokens = 206, 246
    engine.next = output(req=30)
    engine.next.scheduled_new_reqs = [SimpleNamespace(req_id="req", block_ids=([21, 22],))]
    engine.schedule()


def preempt_and_finish() -> None:
    engine = new_scheduler()
    engine.add_request(request())
    one = engine.requests["req"]
    one.num_computed_tokens = 48
    engine.next = output()
    engine.schedule()
    engine._preempt_request(one)
    one.num_computed_tokens = 202
    engine._free_request(one)


def execute(body: Callable[[], Any] = lambda: None, full: bool = False) -> None:
    cls = type("WorkerWrapperBase", (), dict(vars(WorkerWrapperBase)))
    worker.wrap_worker(SimpleNamespace(WorkerWrapperBase=cls))  # type: ignore[arg-type]
    given = output(a=90, b=6, c=4)
    given._kvtrace_step = STEP
    assert AGENT.recorder is not None
    AGENT.recorder._store.full = full
    cls(body).execute_model(given)


def forward() -> None:
    AGENT.worker.mode, AGENT.worker.padded = 1, 128


def attention() -> None:
    def unified_kv_cache_update(key: Any, layer_name: str) -> None:
        return

    AGENT.worker.step, AGENT.worker.mode = STEP, 1
    body = ops.traced_body(unified_kv_cache_update, calls_hook=False)
    for _ in range(2):  # the first time the layer is new: the general way; then the short one
        body(SimpleNamespace(shape=(24, 8)), "layer.0")


def quiet_step() -> None:
    connector = new_connector(Role.WORKER)

    def body() -> None:
        for layer in ("layer.0", "layer.1"):
            connector.save_kv_layer(layer, None, None)

    # known by then: a step in which a name is new is not summed up by the recorder in C
    AGENT.id("layer.0"), AGENT.id("layer.1")
    execute()  # what is said once of an engine's graphs, in its first step
    execute(body, full=True)


class Seeing:
    """Stands in for ``operations.CopyWatch``: seven slots of the layer were read, and parts of three."""

    unsure = False
    cost = 0

    def __init__(self, caches: Any, named: Any) -> None:
        self.caches = caches
        self.blind: set[str] = set()

    def start(self) -> bool:
        return True

    def stop(self) -> None:
        return

    def copied_some(self, way: str) -> bool:
        return way == READ

    def settled(self) -> bool:
        return True

    def parts_read(self, layer: str) -> list[Any]:
        return []

    def touched(self) -> dict[tuple[str, str], Any]:
        return {("layer.0", "read"): Touched(7, 3, "16+7/40+3", 8)}


def watched_save(patch: pytest.MonkeyPatch) -> None:
    connector = on_worker()
    patch.setattr(call, "CopyWatch", Seeing)
    AGENT.worker.watch_store = True
    Everything.folder = AGENT.config.dir
    (Everything.folder / "first").write_bytes(bytes(50))
    patch.setattr(ids, "_calls", itertools.count(12))
    connector.save_kv_layer("layer.0", "files", None)


def timed_step(patch: pytest.MonkeyPatch) -> None:
    """Three calls with times, one whose times are lost, two that get no pair."""
    cuda = Cuda()
    on_cuda(patch, cuda)
    patch.setattr(device_module, "clock", cuda.clock)
    AGENT.config = dataclass_replace(AGENT.config, device_timing="full")
    device = Device()
    device.open(2)
    device._free = device._free[:4]
    head = device_module._head(hooks.SAVE_LAYER.code, 3)
    first, second = cuda.stream, Stream(99)

    def body() -> None:
        cuda.work(3_000_000)
        cuda.host(1_000_000)
        cuda.stream = second

    device.begin(STEP)
    cuda.work(500_000)
    for at in range(6):
        cuda.stream = first
        device.timed(body if not at else (lambda: None), head, "layer.0")
    lost = device._taken[1]
    patch.setattr(lost.start, "elapsed_time", lambda other: 1 / 0)
    device.finish()
    cuda.host(9_000_000)
    device.begin(STEP + 1)
    device.finish()


# --- cases: which record, and what it must say ------------------------------------------------------


@dataclass(frozen=True)
class Context:
    names: dict[int, str]
    began: int
    ended: int

    def now(self, *times: int) -> bool:
        """Whether these host times are of this test, one after the other."""
        return list(times) == sorted(set(times)) and self.began <= times[0] and times[-1] <= self.ended


@dataclass(frozen=True)
class Case:
    kind: Kind
    drive: Callable[..., Any]
    fields: dict[str, Any]
    """What each field says: a number; NOW; a text, by its name; a tuple, the names of a set; a predicate."""
    head: dict[str, Any]
    code: int | None
    nth: int
    """Which of the records of this kind and code."""
    also: Callable[[Any], bool]
    """Whether fields stand in a relation."""

    def check(self, row: Any, seen: Context) -> None:
        said = {field: value for field, value in row._asdict().items() if field != "head"}
        used = {field for field in said if not field.startswith("spare")}
        assert used == self.fields.keys()
        times = [said[field] for field, expected in self.fields.items() if expected is NOW]
        assert not times or seen.now(*times)
        for field, value in said.items():
            expected = self.fields.get(field, 0)
            if isinstance(expected, str):
                assert seen.names.get(value, "") == expected
            elif isinstance(expected, tuple):
                assert tuple(seen.names[ident] for ident in json.loads(seen.names[value])) == expected
            elif callable(expected):
                assert expected(value, seen)
            else:
                assert expected is NOW or value == expected
        assert self.also(row)
        for part, expected in self.head.items():
            value = getattr(rows, part)(row.head)
            assert expected(value) if callable(expected) else value == expected


NOW = object()
"""A time of this test; several of a record come one after the other."""
CASES: dict[str, Case] = {}


def case(
    name: str, kind: Kind, drive: Callable[..., Any], head: dict[str, Any] | None = None,
    code: int | None = None, nth: int = 0, also: Callable[[Any], bool] = lambda row: True, **fields: Any,
) -> None:  # fmt: skip
    CASES[name] = Case(kind, drive, fields, head or {}, code, nth, also)


def between(low: int, high: int) -> Callable[[int, Context], bool]:
    return lambda value, seen: low < value <= high


def anything(value: int, seen: Context) -> bool:
    return True


def positive(value: int) -> bool:
    return value > 0


def crc(text: bytes) -> dict[str, int]:
    return {"length": len(text), "crc": zlib.crc32(text)}


case("name", Kind.NAME, lambda: AGENT.id("a layer's name"), id="a layer's name", **crc(b"a layer's name"))
PARTS = {f"part{n + 1}": bytes([65 + n]) * 8 for n in range(7)}
case(
    "text", Kind.BYTES, lambda: AGENT.id(b"".join(PARTS.values()).decode()),
    **{part: int.from_bytes(text, "little") for part, text in PARTS.items()},
)  # fmt: skip
case(
    "fact", Kind.FACT, lambda: AGENT.fact(ClientIdFact("mine", "engine-7"), Role.FRONT), {"role": Role.FRONT},
    t=NOW, **crc(b'{"client":"mine","engine":"engine-7"}'),
)  # fmt: skip


# --- calls of hooks


def hook(
    name: str, hook: hooks.Hook, drive: Callable[[], Any], layer: str, slots: int, entries: int, extra: Any,
    role: Role = Role.WORKER, flags: int | None = None, nth: int = 0,
) -> None:  # fmt: skip
    head = {"role": role, "detail": positive, **({} if flags is None else {"flags": flags})}
    says = {"layer": layer, "slots": slots, "entries": entries, "extra": extra}
    case(name, Kind.HOOK, drive, head, hook.code, nth, t0=NOW, t1=NOW, step=STEP, **says)


def save() -> None:
    on_worker().save_kv_layer("layer.0", None, None)


def save_twice() -> None:
    save()
    save()


def raising_save() -> None:
    with pytest.raises(ValueError):
        on_worker().save_kv_layer("layer.0", "bad", None)


def start_load() -> None:
    on_worker().start_load_kv(SimpleNamespace(cudagraph_runtime_mode=2))


def look_up(req_id: str = "req") -> None:
    on_scheduler().get_num_new_matched_tokens(request(req_id), 32)


def allocate() -> None:
    on_scheduler().update_state_after_alloc(request(), None, num_external_tokens=48)


def build_metadata() -> None:
    on_scheduler().build_connector_meta(output(req=8))


hook("a layer's save", hooks.SAVE_LAYER, save, "layer.0", 7, 2, 0)
hook("a layer's save by the short way", hooks.SAVE_LAYER, save_twice, "layer.0", 7, 2, 0, nth=1)
hook(
    "a layer's load", hooks.WAIT_LAYER, lambda: on_worker().wait_for_layer_load("layer.1"), "layer.1", 3, 1, 0
)
hook("the step's save", hooks.WAIT_SAVE, lambda: on_worker().wait_for_save(), "", 7, 2, 0)
hook("the step's load", hooks.START_LOAD, start_load, "", 3, 1, 0)
hook("metadata bound", hooks.BIND_METADATA, on_worker, "", 7, 2, 0)
hook("metadata cleared", hooks.CLEAR_METADATA, lambda: on_worker().clear_connector_metadata(), "", -1, -1, 0)
hook("finished", hooks.GET_FINISHED, lambda: on_worker().get_finished(set()), "", -1, -1, 0)
hook("load errors", hooks.LOAD_ERRORS, lambda: on_worker().get_block_ids_with_load_errors(), "", -1, -1, 3)
hook("a hook that raised", hooks.SAVE_LAYER, raising_save, "layer.0", -1, -1, "ValueError", flags=Flag.RAISED)
hook("a lookup's hook", hooks.LOOKUP, look_up, "", 64, 1, 0, Role.SCHEDULER, Flag.ASYNC)
hook("an allocation's hook", hooks.ALLOCATED, allocate, "", 48, 1, 0, Role.SCHEDULER)
hook("the metadata's hook", hooks.BUILD_METADATA, build_metadata, "", 8, 1, 0, Role.SCHEDULER)

# --- ops, steps, requests

OP: dict[str, Any] = {
    "t0": NOW, "t1": NOW, "step": STEP, "layer": "layer.0", "mode": 1,
    "skip": Skip.NOT_A_HOOK_SITE, "code": op_table.KV_CACHE_UPDATE.code,
}  # fmt: skip
case("an op", Kind.OP, attention, **OP)
case("an op by the short way", Kind.OP, attention, nth=1, **OP)
case(
    "a step", Kind.STEP, schedule, t0=NOW, t1=NOW, step=STEP, tokens=66, requests=3, new_requests=2,
    gone=1 << 32 | 4,
)  # fmt: skip

REQ: dict[str, Any] = {"t": NOW, "request": "req", "step": STEP}
TIMES: dict[str, Any] = {"t0": NOW, "t1": NOW, "step": STEP}
DIGESTS = prefixes.digests(PROMPT, BLOCK, b"k" * 16)
FIRST = {"flags": Flag.FIRST}
case("blocks given", Kind.BLOCKS, schedule, FIRST, group=0, first=0, block=21, count=3, **REQ)
case(
    "blocks given in a later group",
    Kind.BLOCKS,
    schedule,
    nth=1,
    group=1,
    first=2,
    block=34,
    count=-3,
    **REQ,
)
case("a chunk", Kind.CHUNK, schedule, start=32, tokens=64, prompt=len(PROMPT), block=BLOCK, **REQ)
case(
    "an arrival", Kind.REQUEST, schedule, t=NOW, request="req", salt=0, prompt=200, digest=DIGESTS.prompt,
    prefix=DIGESTS.aligned, max_tokens=9,
)  # fmt: skip
case(
    "prefix digests", Kind.PREFIX, schedule, nth=1, request="req", first=5 * BLOCK, stride=BLOCK,
    **{f"digest{n}": digest for n, digest in enumerate(DIGESTS.prefixes[4:8])},
)  # fmt: skip
case("a lookup", Kind.LOOKUP, look_up, request="req", local=32, external=64, **TIMES)
case(
    "a lookup without an answer", Kind.LOOKUP, lambda: look_up("undecided"), request="undecided", local=32,
    external=NONE_ANSWER, **TIMES,
)  # fmt: skip
case("an allocation", Kind.ALLOC, allocate, request="req", external=48, **TIMES)
# block 5 is the request's second, and slot 84 its fifth
STORED = {"flags": Flag.STORE}
case("a metadata entry", Kind.META, build_metadata, STORED, slots=8, tokens=50, start=BLOCK + 4, **REQ)
NEXT = {**REQ, "step": STEP + 1}
case("a growth", Kind.GROWN, a_session_gets_its_next_part, start=206, prompt=246, **NEXT)
case(
    "a chunk of a next part", Kind.CHUNK, a_session_gets_its_next_part, nth=1, start=206, tokens=30,
    prompt=246, block=BLOCK, **NEXT,
)  # fmt: skip
case("a preemption", Kind.PREEMPT, preempt_and_finish, computed=48, **REQ)
case(
    "a finish", Kind.FINISH, preempt_and_finish, computed=202, output=3, preemptions=1,
    status_name="FINISHED_STOPPED", **REQ,
)  # fmt: skip
case("an execution", Kind.EXEC, lambda: execute(forward), tokens=100, requests=3, mode=1, padded=128, **TIMES)
case(
    "quiet calls", Kind.QUIET, quiet_step, {"detail": lambda detail: not detail & DETAIL_IS_OP},
    hooks.SAVE_LAYER.code, t0=NOW, step=STEP, count=2, layer_set=("layer.0", "layer.1"),
    total_ns=anything, least_ns=anything, most_ns=anything,
    also=lambda row: 0 < row.least_ns < row.most_ns and row.total_ns == row.least_ns + row.most_ns,
)  # fmt: skip


def close_with_losses() -> None:
    assert AGENT.recorder is not None
    AGENT.recorder._store.lost = 5
    AGENT.recorder.stop(Stop.CLEAN)


case("a trailer", Kind.TRAILER, close_with_losses, code=int(Stop.CLEAN), t=NOW, lost=5)
case("a seal", Kind.SEAL, schedule, number=0, records=between(0, 255), crc=between(-1, (1 << 32) - 1))

# --- what a watched call did


def of_first(value: int, seen: Context) -> bool:
    return value == prefixes.digest_of(str(Everything.folder / "first"), b"k" * 16)


def first(value: int, seen: Context) -> bool:
    return seen.names[value].endswith("/first")


def a_state_read(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(states.STATES.parts, "layer.0#1", states.StatePart("layer.0", 1, 2))
    seen = {("layer.0#1", READ): Touched(2, 0, "4+2", 2)}
    watch: Any = SimpleNamespace(settled=lambda: True, touched=lambda: seen, unsure=False)
    states.TouchingStates(watch, hooks.WAIT_SAVE.code, 3, STEP, clock(), AGENT.thread(), 12).write()


SAVING: dict[str, Any] = {"head": {"flags": Flag.STORE, "detail": positive}, "code": hooks.SAVE_LAYER.code}
OF_LAYER: dict[str, Any] = {"t": NOW, "layer": "layer.0", "step": STEP}
case(
    "an effect", Kind.EFFECT, watched_save, slots=8, bytes=333, files=2, target=of_first, **SAVING, **OF_LAYER
)
case(
    "slots touched", Kind.SLOTS, watched_save, slot_set="16+7/40+3", slots=7, partly=3, call=12, **SAVING,
    **OF_LAYER,
)  # fmt: skip
case(
    "states touched", Kind.STATES, a_state_read, {"flags": Flag.STORE, "detail": 3}, hooks.WAIT_SAVE.code,
    blocks="4+2", part=1, parts=2, call=12, **OF_LAYER,
)  # fmt: skip
case(
    "what was written", Kind.OUTSIDE, watched_save, {"flags": 0, "detail": positive}, Way.FILE, t=NOW,
    step=STEP, call=12, target=first, bytes=300, size=350, errors=0,
)  # fmt: skip

# --- fingerprints


def write_prints(*values: int, kind: Kind = Kind.PRINTS) -> None:
    blocks = [8, 9, 0, 7, 6][: len(values)]
    print_records.write_prints(STEP, [Filled("req", 3, 5, blocks)], [*values], kind)


def numbers_of_layers() -> None:
    torch = pytest.importorskip("torch")
    top = 64 - rows.NUMBER_BITS
    sums = torch.tensor([[3 << top, 1], [0, 11 << top], [9 << top, 9 << top], [-1, 7 << top]])
    layers = ["layer.0", "layer.1"]
    print_records.write_layers(STEP, Filled("req", 3, 5, [8, 9, 0, 7]), layers, sums)


OF_BLOCKS: dict[str, Any] = {"head": {"detail": 3}, "request": "req", "step": STEP, "first": 5}
# without their lowest bit, which tells least; the null block has none
PRINTS = {"print0": 6, "print1": (1 << 63) - 2, "print2": 0, "print3": 8}
case("fingerprints", Kind.PRINTS, lambda: write_prints(12, -4, 6, 16, 20), **PRINTS, **OF_BLOCKS)
case(
    "fingerprints once more", Kind.REPRINTS, lambda: write_prints(12, kind=Kind.REPRINTS), print0=6, print1=0,
    print2=0, print3=0, **OF_BLOCKS,
)  # fmt: skip
SKETCH = {"print0": 6, "print1": 0, "print2": 0, "print3": 0}
case("sketches", Kind.SKETCHES, lambda: write_prints(12, kind=Kind.SKETCHES), **SKETCH, **OF_BLOCKS)
BITS = rows.NUMBER_BITS
# block 8; block 9, whose first layer holds zeroes; the null block; block 7; the ninth is not used
case(
    "fingerprints of layers", Kind.LAYERS, numbers_of_layers, layer_set=("layer.0", "layer.1"),
    numbers0=3 | 1 << BITS, numbers1=11, numbers2=(1 << BITS) - 1 | 7 << BITS, **OF_BLOCKS,
)  # fmt: skip

# --- transfers, times of the device

case("a transfer's begin", Kind.OPEN, lambda: on_scheduler().request_finished(request(), [9]), STORED, **REQ)
case(
    "a transfer's end", Kind.DONE, lambda: on_worker().get_transfer_results(set()), {"flags": Flag.LOAD},
    failed=1, **{**REQ, "request": "broken"},
)  # fmt: skip
# the fake's clock, once the pool is made; half a millisecond was queued when the call began; it ends on an
# empty stream, a millisecond later
case(
    "a timed call", Kind.DEVICE, timed_step, {"detail": 3, "flags": Flag.STREAMS | Flag.CAUGHT_UP},
    hooks.SAVE_LAYER.code, step=STEP, layer="layer.0", t0=between(1_100_000, 1_199_999),
    before_ns=between(490_000, 500_000), device_ns=between(500_000, 509_999),
    host_ns=between(1_000_000, 1_099_999),
)  # fmt: skip
case(
    "a timed step", Kind.TIMED, timed_step, step=STEP, t=between(10_000_000, 19_999_999), calls=3, untimed=2,
    lost=1, own_ns=between(1_000, 1_000_000), busy_ns=between(1_000_000, 1_999_999),
)  # fmt: skip


# --- the tests --------------------------------------------------------------------------------------


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as made:
        yield made


def written(one: Case, patch: pytest.MonkeyPatch, run_dir: Path) -> tuple[list[int], Context]:
    """The record of a case, as it lies in the file."""
    assert AGENT.recorder is not None
    AGENT.recorder._next_name = 501  # no id of a name is one of the small numbers below
    began = clock()
    one.drive(**({"patch": patch} if "patch" in inspect.signature(one.drive).parameters else {}))
    AGENT.flush()
    (path,) = spool_paths(run_dir)
    spool = Spool(path)
    list(spool.chunks())
    table = np.frombuffer(path.read_bytes()[spool._data_start :], dtype="<i8").reshape(-1, 8)
    fitting = [
        words
        for words in table.tolist()
        if rows.kind(words[0]) == one.kind and one.code in (None, rows.code(words[0]))
    ]
    return fitting[one.nth], Context(spool.names, began, clock())


def test_every_kind_of_record_has_a_case() -> None:
    assert {one.kind for one in CASES.values()} == set(rows.ROWS)


@pytest.mark.parametrize("one", CASES.values(), ids=CASES)
def test_each_field_says_what_its_name_promises(one: Case, trace: Any, patch: pytest.MonkeyPatch) -> None:
    words, seen = written(one, patch, trace.run_dir)
    row = rows.decode(words)
    assert type(row) is rows.ROWS[one.kind]
    one.check(row, seen)
    assert trace.read()[0].info().end in ("open", "trailer")
    assert AGENT._failures == 0


@pytest.mark.parametrize("one", CASES.values(), ids=CASES)
def test_two_words_that_change_places_are_seen(one: Case, trace: Any, patch: pytest.MonkeyPatch) -> None:
    words, seen = written(one, patch, trace.run_dir)
    for first, second in itertools.combinations(range(1, 8), 2):
        if words[first] == words[second]:
            assert words[first] in (0, -1)  # both unused, or two counts that are unknown
            continue
        swapped = list(words)
        swapped[first], swapped[second] = words[second], words[first]
        with pytest.raises((AssertionError, KeyError, ValueError, OverflowError)):
            one.check(rows.decode(swapped), seen)
