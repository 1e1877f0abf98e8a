"""What the agent writes is what the rows say: every kind of record, written by the agent's own code.

Each case drives the agent over stand-ins for vLLM with numbers that are all different, takes one of the
records as they lie in the spool, and holds each of its fields against what was given. Two columns that
change places in a writer (or in ``trace/rows.py``) cannot pass: the last test exchanges every two words of
every record and sees the case fail.
"""

from __future__ import annotations

import itertools
import json
import sys
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
from kvtrace.agent.watch import call, policy, states
from kvtrace.agent.watch.operations import READ, Touched
from kvtrace.trace import hooks, rows
from kvtrace.trace import ops as op_table
from kvtrace.trace.facts import ClientId
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
from .fake_cuda import Cuda, Stream

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
    connector.scheduler = AGENT.scheduler.current = new_scheduler()  # which holds the connector, as vLLM's
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
    execute(body, full=True)


class Seeing:
    """Stands in for ``operations.CopyWatch``: seven slots of the layer were read."""

    unsure = False
    cost = 0
    looks = None

    def __init__(self, caches: Any, named: Any, block_size: int) -> None:
        self.caches = caches
        self.blind: set[str] = set()

    def start(self) -> bool:
        return True

    def stop(self) -> None:
        return

    def slots(self, written: bool, block_size: int) -> dict[str, int]:
        return {} if written else {"layer.0": 7}

    def settled(self) -> bool:
        return True

    def kept(self, layer: str) -> bool:
        return True

    def touched(self) -> dict[tuple[str, str], Any]:
        return {("layer.0", "read"): Touched(7, 3, "16+7/40+3")}


def watched_save(patch: pytest.MonkeyPatch) -> None:
    connector = on_worker()
    patch.setattr(call, "CopyWatch", Seeing)
    AGENT.worker.watch_store = policy.WatchedWay(policy._Samples(32), True)
    Everything.folder = AGENT.config.dir if AGENT.config else Path()
    (Everything.folder / "first").write_bytes(bytes(50))
    patch.setattr(ids, "_calls", itertools.count(12))
    connector.save_kv_layer("layer.0", "files", None)


def timed_step(patch: pytest.MonkeyPatch) -> None:
    """Three calls with times, one whose times are lost, two that get no pair."""
    cuda = Cuda()
    patch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, __version__="2.11"))
    platform = SimpleNamespace(device_type="cuda", opaque_attention_op=lambda: True)
    patch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    patch.setattr(device_module, "clock", cuda.clock)
    assert AGENT.config is not None
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


Check = Callable[[Any, Context], None]


@dataclass(frozen=True)
class Case:
    kind: Kind
    drive: Callable[..., None]
    check: Check
    code: int | None = None
    number: int = 0
    """Which of the records of this kind and code."""
    patched: bool = False


CASES: dict[str, Case] = {}


def case(kind: Kind, drive: Callable[..., Any], **rest: Any) -> Callable[[Check], Check]:
    def add(check: Check) -> Check:
        CASES[check.__name__] = Case(kind, drive, check, **rest)
        return check

    return add


@case(Kind.NAME, lambda: AGENT.id("a layer's name"))
def name(row: rows.Name, seen: Context) -> None:
    assert seen.names[row.id] == "a layer's name"
    assert (row.length, row.crc) == (14, zlib.crc32(b"a layer's name"))
    assert spares(row) == [0, 0, 0, 0]


@case(Kind.BYTES, lambda: AGENT.id("".join(chr(65 + n) * 8 for n in range(7))))
def text(row: rows.Bytes, seen: Context) -> None:
    assert b"".join(int(word).to_bytes(8, "little") for word in row[1:]) == b"".join(
        bytes([65 + n]) * 8 for n in range(7)
    )


@case(Kind.FACT, lambda: AGENT.fact(ClientId("mine", "engine-7"), Role.FRONT))
def fact(row: rows.Document, seen: Context) -> None:
    body = b'{"client":"mine","engine":"engine-7"}'
    assert seen.now(row.t) and (row.length, row.crc) == (len(body), zlib.crc32(body))
    assert rows.role(row.head) == Role.FRONT and spares(row) == [0, 0, 0, 0]


def hook_case(hook: hooks.Hook, drive: Callable[[], Any], **rest: Any) -> Callable[[Check], Check]:
    return case(Kind.HOOK, drive, code=hook.code, **rest)


def hook_call(row: rows.HookCall, seen: Context, *says: object, role: Role = Role.WORKER) -> None:
    """``says``: layer, slots, entries, extra."""
    assert seen.now(row.t0, row.t1) and row.step == STEP
    assert (seen.names.get(row.layer, ""), row.slots, row.entries, row.extra) == says
    assert rows.role(row.head) == role and rows.detail(row.head) > 0


@hook_case(hooks.SAVE_LAYER, lambda: on_worker().save_kv_layer("layer.0", None, None))
def a_layer_s_save(row: rows.HookCall, seen: Context) -> None:
    hook_call(row, seen, "layer.0", 7, 2, 0)


def save_twice() -> None:
    for _ in range(2):
        on_worker().save_kv_layer("layer.0", None, None)


@hook_case(hooks.SAVE_LAYER, save_twice, number=1)
def a_layer_s_save_by_the_short_way(row: rows.HookCall, seen: Context) -> None:
    hook_call(row, seen, "layer.0", 7, 2, 0)


@hook_case(hooks.WAIT_LAYER, lambda: on_worker().wait_for_layer_load("layer.1"))
def a_layer_s_load(row: rows.HookCall, seen: Context) -> None:
    hook_call(row, seen, "layer.1", 3, 1, 0)


@hook_case(hooks.WAIT_SAVE, lambda: on_worker().wait_for_save())
def the_step_s_save(row: rows.HookCall, seen: Context) -> None:
    hook_call(row, seen, "", 7, 2, 0)


@hook_case(hooks.START_LOAD, lambda: on_worker().start_load_kv(SimpleNamespace(cudagraph_runtime_mode=2)))
def the_step_s_load(row: rows.HookCall, seen: Context) -> None:
    hook_call(row, seen, "", 3, 1, 2)


@hook_case(hooks.BIND_METADATA, on_worker)
def metadata_bound(row: rows.HookCall, seen: Context) -> None:
    hook_call(row, seen, "", 7, 2, 3)


@hook_case(hooks.CLEAR_METADATA, lambda: on_worker().clear_connector_metadata())
def metadata_cleared(row: rows.HookCall, seen: Context) -> None:
    hook_call(row, seen, "", -1, -1, 0)


@hook_case(hooks.GET_FINISHED, lambda: on_worker().get_finished(set()))
def finished(row: rows.HookCall, seen: Context) -> None:
    hook_call(row, seen, "", -1, -1, 3 << 32 | 1)


@hook_case(hooks.LOAD_ERRORS, lambda: on_worker().get_block_ids_with_load_errors())
def load_errors(row: rows.HookCall, seen: Context) -> None:
    hook_call(row, seen, "", -1, -1, 3)


def raising_save() -> None:
    with pytest.raises(ValueError):
        on_worker().save_kv_layer("layer.0", "bad", None)


@hook_case(hooks.SAVE_LAYER, raising_save)
def a_hook_that_raised(row: rows.HookCall, seen: Context) -> None:
    hook_call(row, seen, "layer.0", -1, -1, row.extra)
    assert seen.names[row.extra] == "ValueError" and rows.flags(row.head) == Flag.RAISED


@hook_case(hooks.LOOKUP, lambda: on_scheduler().get_num_new_matched_tokens(request(), 32))
def a_lookup_s_hook(row: rows.HookCall, seen: Context) -> None:
    hook_call(row, seen, "", 64, 1, 0, role=Role.SCHEDULER)
    assert rows.flags(row.head) == Flag.ASYNC


@hook_case(hooks.ALLOCATED, lambda: on_scheduler().update_state_after_alloc(request(), None, 48))
def an_allocation_s_hook(row: rows.HookCall, seen: Context) -> None:
    hook_call(row, seen, "", 48, 1, 0, role=Role.SCHEDULER)


@hook_case(hooks.BUILD_METADATA, lambda: on_scheduler().build_connector_meta(output(req=8)))
def the_metadata_s_hook(row: rows.HookCall, seen: Context) -> None:
    hook_call(row, seen, "", 8, 1, 0, role=Role.SCHEDULER)


@case(Kind.OP, attention, code=op_table.KV_CACHE_UPDATE.code)
def an_op(row: rows.OpCall, seen: Context) -> None:
    assert seen.now(row.t0, row.t1) and row.step == STEP and seen.names[row.layer] == "layer.0"
    assert (row.tokens, row.mode, row.skip) == (24, 1, Skip.NOT_A_HOOK_SITE)


@case(Kind.OP, attention, code=op_table.KV_CACHE_UPDATE.code, number=1)
def an_op_by_the_short_way(row: rows.OpCall, seen: Context) -> None:
    an_op(row, seen)


@case(Kind.STEP, schedule)
def a_step(row: rows.Step, seen: Context) -> None:
    assert seen.now(row.t0, row.t1) and row.step == STEP
    assert (row.tokens, row.requests, row.new_requests, row.gone) == (66, 3, 2, 1 << 32 | 4)


@case(Kind.BLOCKS, schedule)
def blocks_given(row: rows.BlocksGiven, seen: Context) -> None:
    assert seen.now(row.t) and seen.names[row.request] == "req" and row.step == STEP
    assert (row.group, row.first, row.block, row.count) == (0, 0, 21, 3)
    assert rows.flags(row.head) == Flag.FIRST


@case(Kind.BLOCKS, schedule, number=1)
def blocks_given_in_a_later_group(row: rows.BlocksGiven, seen: Context) -> None:
    assert seen.now(row.t) and seen.names[row.request] == "req" and row.step == STEP
    assert (row.group, row.first, row.block, row.count) == (1, 2, 34, -3)


@case(Kind.CHUNK, schedule)
def a_chunk(row: rows.Chunk, seen: Context) -> None:
    assert seen.now(row.t) and seen.names[row.request] == "req" and row.step == STEP
    assert (row.start, row.tokens, row.prompt, row.block) == (32, 64, len(PROMPT), BLOCK)


@case(Kind.REQUEST, schedule)
def an_arrival(row: rows.Arrival, seen: Context) -> None:
    found = prefixes.digests(PROMPT, BLOCK, b"k" * 16)
    assert seen.now(row.t) and seen.names[row.request] == "req" and row.salt == 0
    assert (row.prompt, row.digest, row.prefix, row.max_tokens) == (200, found.prompt, found.aligned, 9)


@case(Kind.PREFIX, schedule, number=1)
def prefix_digests(row: rows.Prefixes, seen: Context) -> None:
    found = prefixes.digests(PROMPT, BLOCK, b"k" * 16)
    assert seen.names[row.request] == "req" and (row.first, row.stride) == (5 * BLOCK, BLOCK)
    assert [row.digest0, row.digest1, row.digest2, row.digest3] == found.prefixes[4:8]


@case(Kind.LOOKUP, lambda: on_scheduler().get_num_new_matched_tokens(request(), 32))
def a_lookup(row: rows.Lookup, seen: Context) -> None:
    assert seen.now(row.t0, row.t1) and row.step == STEP and seen.names[row.request] == "req"
    assert (row.local, row.external) == (32, 64) and spares(row) == [0]


@case(Kind.LOOKUP, lambda: on_scheduler().get_num_new_matched_tokens(request("undecided"), 32))
def a_lookup_without_an_answer(row: rows.Lookup, seen: Context) -> None:
    assert (row.local, row.external) == (32, NONE_ANSWER) and seen.now(row.t0, row.t1)
    assert row.step == STEP and seen.names[row.request] == "undecided" and spares(row) == [0]


@case(Kind.ALLOC, lambda: on_scheduler().update_state_after_alloc(request(), None, num_external_tokens=48))
def an_allocation(row: rows.Allocation, seen: Context) -> None:
    assert seen.now(row.t0, row.t1) and row.step == STEP and seen.names[row.request] == "req"
    assert (row.external, row.blocks) == (48, -1) and spares(row) == [0]


@case(Kind.META, lambda: on_scheduler().build_connector_meta(output(req=8)))
def a_metadata_entry(row: rows.MetadataEntry, seen: Context) -> None:
    assert seen.now(row.t) and seen.names[row.request] == "req" and row.step == STEP
    # block 5 is the request's second, and slot 84 its fifth
    assert (row.slots, row.tokens, row.start) == (8, 50, BLOCK + 4) and spares(row) == [0]
    assert rows.flags(row.head) == Flag.STORE


@case(Kind.GROWN, a_session_gets_its_next_part)
def a_growth(row: rows.Growth, seen: Context) -> None:
    assert seen.now(row.t) and seen.names[row.request] == "req" and row.step == STEP + 1
    assert (row.start, row.prompt) == (206, 246) and spares(row) == [0, 0]


@case(Kind.CHUNK, a_session_gets_its_next_part, number=1)
def a_chunk_of_a_next_part(row: rows.Chunk, seen: Context) -> None:
    assert seen.names[row.request] == "req" and row.step == STEP + 1
    assert (row.start, row.tokens, row.prompt, row.block) == (206, 30, 246, BLOCK)


@case(Kind.PREEMPT, preempt_and_finish)
def a_preemption(row: rows.Preemption, seen: Context) -> None:
    assert seen.now(row.t) and seen.names[row.request] == "req" and row.step == STEP
    assert row.computed == 48 and spares(row) == [0, 0, 0]


@case(Kind.FINISH, preempt_and_finish)
def a_finish(row: rows.Finish, seen: Context) -> None:
    assert seen.now(row.t) and seen.names[row.request] == "req" and row.step == STEP
    assert (row.computed, row.output, row.preemptions) == (202, 3, 1)
    assert seen.names[row.status_name] == "FINISHED_STOPPED"


@case(Kind.EXEC, lambda: execute(forward))
def an_execution(row: rows.Execution, seen: Context) -> None:
    assert seen.now(row.t0, row.t1) and row.step == STEP
    assert (row.tokens, row.requests, row.mode, row.padded) == (100, 3, 1, 128)


@case(Kind.QUIET, quiet_step, code=hooks.SAVE_LAYER.code)
def quiet_calls(row: rows.QuietCalls, seen: Context) -> None:
    assert seen.now(row.t0) and row.step == STEP and row.count == 2
    layers = [seen.names[ident] for ident in json.loads(seen.names[row.layer_set])]
    assert layers == ["layer.0", "layer.1"] and not rows.detail(row.head) & DETAIL_IS_OP
    assert 0 < row.least_ns < row.most_ns and row.total_ns == row.least_ns + row.most_ns


def close_with_losses() -> None:
    assert AGENT.recorder is not None
    AGENT.recorder._store.lost = 5
    AGENT.recorder.stop(Stop.CLEAN)


@case(Kind.TRAILER, close_with_losses, code=int(Stop.CLEAN))
def a_trailer(row: rows.Trailer, seen: Context) -> None:
    assert seen.now(row.t) and row.lost == 5 and spares(row) == [0] * 5


@case(Kind.SEAL, schedule)
def a_seal(row: rows.Seal, seen: Context) -> None:
    assert row.number == 0 and 0 < row.records < 256 and 0 <= row.crc < 1 << 32 and spares(row) == [0] * 4


@case(Kind.EFFECT, watched_save, code=hooks.SAVE_LAYER.code, patched=True)
def an_effect(row: rows.Effect, seen: Context) -> None:
    assert seen.now(row.t) and seen.names[row.layer] == "layer.0" and row.step == STEP
    assert (row.slots, row.bytes, row.files) == (7, 333, 2)
    assert row.target == prefixes.digest_of(str(Everything.folder / "first"), b"k" * 16)
    assert rows.flags(row.head) == Flag.STORE and rows.detail(row.head) > 0


@case(Kind.SLOTS, watched_save, code=hooks.SAVE_LAYER.code, patched=True)
def slots_touched(row: rows.SlotsTouched, seen: Context) -> None:
    assert seen.now(row.t) and seen.names[row.layer] == "layer.0" and row.step == STEP
    assert seen.names[row.slot_set] == "16+7/40+3" and (row.slots, row.partly, row.call) == (7, 3, 12)
    assert rows.flags(row.head) == Flag.STORE and rows.detail(row.head) > 0


def a_state_read(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(states.STATES.parts, "layer.0#1", states.StatePart("layer.0", 1, 2))
    seen = {("layer.0#1", READ): Touched(2, 0, "4+2")}
    watch: Any = SimpleNamespace(settled=lambda: True, touched=lambda: seen, unsure=False)
    states.TouchingStates(watch, hooks.WAIT_SAVE.code, 3, STEP, clock(), AGENT.thread(), 12).write()


@case(Kind.STATES, a_state_read, code=hooks.WAIT_SAVE.code, patched=True)
def states_touched(row: rows.StatesTouched, seen: Context) -> None:
    assert seen.now(row.t) and seen.names[row.layer] == "layer.0" and row.step == STEP
    assert seen.names[row.blocks] == "4+2" and (row.part, row.parts, row.call) == (1, 2, 12)
    assert rows.flags(row.head) == Flag.STORE and rows.detail(row.head) == 3


@case(Kind.OUTSIDE, watched_save, code=Way.FILE, patched=True)
def what_was_written(row: rows.Outside, seen: Context) -> None:
    assert seen.now(row.t) and row.step == STEP and row.call == 12
    assert seen.names[row.target].endswith("/first") and (row.bytes, row.size, row.errors) == (300, 350, 0)
    assert rows.flags(row.head) == 0 and rows.detail(row.head) > 0


@case(
    Kind.PRINTS,
    lambda: print_records.write_prints(STEP, [Filled("req", 3, 5, [8, 9, 0, 7, 6])], [12, -4, 6, 16, 20]),
)
def fingerprints(row: rows.BlockPrints, seen: Context) -> None:
    assert seen.names[row.request] == "req" and row.step == STEP and row.first == 5
    # without their lowest bit, which tells least; the null block has none
    assert (row.print0, row.print1, row.print2, row.print3) == (6, (1 << 63) - 2, 0, 8)
    assert rows.detail(row.head) == 3


@case(
    Kind.REPRINTS, lambda: print_records.write_prints(STEP, [Filled("req", 3, 5, [8])], [12], Kind.REPRINTS)
)
def fingerprints_once_more(row: rows.BlockPrintsAgain, seen: Context) -> None:
    assert seen.names[row.request] == "req" and row.step == STEP and row.first == 5
    assert (row.print0, row.print1, row.print2, row.print3) == (6, 0, 0, 0) and rows.detail(row.head) == 3


def numbers_of_layers() -> None:
    torch = pytest.importorskip("torch")
    top = 64 - rows.NUMBER_BITS
    sums = torch.tensor([[3 << top, 1], [0, 11 << top], [9 << top, 9 << top], [-1, 7 << top]])
    layers = ["layer.0", "layer.1"]
    print_records.write_layers(torch, STEP, Filled("req", 3, 5, [8, 9, 0, 7]), layers, sums)


@case(Kind.LAYERS, numbers_of_layers)
def fingerprints_of_layers(row: rows.LayerPrints, seen: Context) -> None:
    assert seen.names[row.request] == "req" and row.step == STEP and row.first == 5
    assert [seen.names[layer] for layer in json.loads(seen.names[row.layer_set])] == ["layer.0", "layer.1"]
    # block 8; block 9, whose first layer holds zeroes; the null block; block 7; the ninth is not used
    bits = rows.NUMBER_BITS
    assert row.numbers0 == 3 | 1 << bits and row.numbers1 == 11
    assert row.numbers2 == (1 << bits) - 1 | 7 << bits
    assert rows.detail(row.head) == 3


@case(Kind.OPEN, lambda: on_scheduler().request_finished(request(), [9]))
def a_transfer_s_begin(row: rows.TransferBegun, seen: Context) -> None:
    assert seen.now(row.t) and seen.names[row.request] == "req" and row.step == STEP
    assert rows.flags(row.head) == Flag.STORE and spares(row) == [0] * 4


@case(Kind.DONE, lambda: on_worker().get_transfer_results(set()))
def a_transfer_s_end(row: rows.TransferDone, seen: Context) -> None:
    assert seen.now(row.t) and seen.names[row.request] == "broken" and row.step == STEP
    assert row.failed == 1 and rows.flags(row.head) == Flag.LOAD and spares(row) == [0] * 3


@case(Kind.DEVICE, timed_step, code=hooks.SAVE_LAYER.code, patched=True)
def a_timed_call(row: rows.DeviceCall, seen: Context) -> None:
    assert 1_100_000 < row.t0 < 1_200_000  # the fake's clock, once the pool is made
    assert row.step == STEP and seen.names[row.layer] == "layer.0" and row.streams == 1
    # half a millisecond was queued when the call began; it ends on an empty stream, a millisecond later
    assert 490_000 < row.before_ns <= 500_000 < row.device_ns < 510_000
    assert 1_000_000 < row.host_ns < 1_100_000 and rows.detail(row.head) == 3


@case(Kind.TIMED, timed_step, patched=True)
def a_timed_step(row: rows.TimedStep, seen: Context) -> None:
    assert row.step == STEP and 10_000_000 < row.t < 20_000_000
    assert (row.calls, row.untimed, row.lost) == (3, 2, 1)
    assert 1_000 < row.own_ns < row.busy_ns < 2_000_000 and row.busy_ns > 1_000_000


# --- the tests --------------------------------------------------------------------------------------


def spares(row: Any) -> list[int]:
    return [word for field, word in row._asdict().items() if field.startswith("spare")]


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as made:
        yield made


def written(one: Case, patch: pytest.MonkeyPatch, run_dir: Path) -> tuple[list[int], Context]:
    """The record of a case, as it lies in the file."""
    assert AGENT.recorder is not None
    AGENT.recorder._next_name = 501  # no id of a name is one of the small numbers below
    began = clock()
    one.drive(*([patch] if one.patched else []))
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
    return fitting[one.number], Context(spool.names, began, clock())


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
