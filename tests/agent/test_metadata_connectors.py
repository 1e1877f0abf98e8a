"""The metadata of real connectors, in look-alikes of their shapes: the entries that they mean."""

from __future__ import annotations

import enum
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest

from kvtrace.agent.metadata import Declared, StepRequests, read
from kvtrace.trace.format import UNKNOWN, Flag

from .fakes import KVConnectorMetadata
from .holding import BLOCK, Req, slots, step

torch = pytest.importorskip("torch")

STORE, LOAD = int(Flag.STORE), int(Flag.LOAD)
A, B, C = "req-a", "req-b", "req-c"


def one_step() -> dict[str, Req]:
    """a: a new prompt of 100 tokens, computed now. b: 60 of 80 tokens are to come. c: decodes."""
    return {
        A: Req(([11, 12, 13, 14, 15, 16, 17],), prompt=100, now=100),
        B: Req(([21, 22, 23, 24, 25],), prompt=80, before=60, now=20, awaited=60),
        C: Req(([31, 32, 33],), prompt=40, before=42, now=1, output=3),
    }


def said(meta: Any, holdings: StepRequests | None = None) -> list[tuple[Any, ...]]:
    """(request, direction, start, size) of each entry of a step that is understood."""
    declared = read(meta, holdings or step(one_step()))
    assert declared.readable, declared.problems
    return rows(declared)


def rows(declared: Declared) -> list[tuple[Any, ...]]:
    return sorted(
        (one.req_id or "", int(one.direction), one.start, one.slots if one.slots >= 0 else one.tokens)
        for one in declared.entries
        if one.direction
    )


# --- vLLM 0.32.0 ----------------------------------------------------------------------------------


@dataclass
class ExampleReq:
    token_ids: Any
    slot_mapping: Any
    is_store: bool
    mm_hashes: list[str] = field(default_factory=list)


@dataclass
class ExampleConnectorMetadata(KVConnectorMetadata):
    requests: list[Any] = field(default_factory=list)


def test_example_connector():
    requests = one_step()
    tokens = requests[A].tokens
    meta = ExampleConnectorMetadata(
        [
            ExampleReq(torch.tensor(tokens)[:96], torch.tensor(slots(requests[A].tables[0], 0, 96)), True),
            ExampleReq(
                torch.tensor(requests[B].tokens)[:80], torch.tensor(slots(requests[B].tables[0])), False
            ),
        ]
    )
    assert said(meta, step(requests)) == [(A, STORE, 0, 96), (B, LOAD, 0, 80)]


@dataclass
class PendingSave:
    req_id: str
    filename: str
    token_ids: Any
    block_ids: list[int]


@dataclass
class ExampleHiddenStatesConnectorMetadata(KVConnectorMetadata):
    pending_saves: list[PendingSave] = field(default_factory=list)
    new_req_filenames: dict[str, str] = field(default_factory=dict)


def test_example_hidden_states_connector():
    requests = one_step()
    meta = ExampleHiddenStatesConnectorMetadata(
        [PendingSave(C, "/tmp/c", torch.tensor(requests[C].tokens[:42]), [31, 32, 33])], {A: "/tmp/a"}
    )
    assert said(meta, step(requests)) == [(C, STORE, 0, 42)]
    assert said(ExampleHiddenStatesConnectorMetadata([], {A: "/tmp/a"})) == []


@dataclass
class SimpleCPUOffloadMetadata(KVConnectorMetadata):
    load_event: int = -1
    load_gpu_blocks: list[int] = field(default_factory=list)
    load_cpu_blocks: list[int] = field(default_factory=list)
    load_event_to_reqs: dict[int, list[str]] = field(default_factory=dict)
    store_event: int = -1
    store_gpu_blocks: list[int] = field(default_factory=list)
    store_cpu_blocks: list[int] = field(default_factory=list)
    need_flush: bool = False


def test_simple_cpu_offload_and_marconi_offload():
    meta = SimpleCPUOffloadMetadata(
        load_event=4,
        load_gpu_blocks=[21, 22, 23],
        load_cpu_blocks=[11, 12, 13],
        load_event_to_reqs={4: [B]},
        store_event=7,
        store_gpu_blocks=[11, 12, 13, 31, 32],
        store_cpu_blocks=[31, 32, 5, 6, 7],
    )
    assert said(meta) == [(A, STORE, 0, 48), (B, LOAD, 0, 48), (C, STORE, 0, 32)]
    assert said(SimpleCPUOffloadMetadata(load_event_to_reqs={4: [B]})) == []


def test_simple_cpu_offload_of_a_block_that_requests_share():
    """The one that computed it, not the one that found it in the prefix cache."""
    requests = {
        A: Req(([11, 12, 13],), prompt=48, before=48, now=0),
        B: Req(([11, 12, 22],), prompt=48, before=48, now=0, local=32),
    }
    meta = SimpleCPUOffloadMetadata(store_event=1, store_gpu_blocks=[11, 12, 22], store_cpu_blocks=[1, 2, 3])
    holdings = step(requests)
    assert said(meta, holdings) in ([(A, STORE, 0, 32), (B, STORE, 32, 16)], [(B, STORE, 0, 48)])


def test_simple_cpu_offload_of_blocks_of_requests_long_gone():
    meta = SimpleCPUOffloadMetadata(store_event=1, store_gpu_blocks=[91, 92], store_cpu_blocks=[1, 2])
    declared = read(meta, step(one_step()))
    assert not declared.readable and declared.problems[0].field == "store_gpu_blocks"


class LoadStoreSpec:
    pass


class GPULoadStoreSpec(LoadStoreSpec):
    def __init__(self, block_ids: list[int], group_sizes: list[int], block_indices: list[int]) -> None:
        self.block_ids = np.array(block_ids, dtype=np.int32)
        self.group_sizes = group_sizes
        self.block_indices = block_indices


class CPULoadStoreSpec(LoadStoreSpec):
    def __init__(self, block_ids: list[int]) -> None:
        self.block_ids = np.array(block_ids, dtype=np.int32)


@dataclass
class TransferJob:
    req_id: str
    src_spec: LoadStoreSpec
    dst_spec: LoadStoreSpec


@dataclass
class OffloadingConnectorMetadata(KVConnectorMetadata):
    load_jobs: dict[int, TransferJob]
    store_jobs: dict[int, TransferJob]
    jobs_to_flush: set[int] | None = None


def test_offloading_connector():
    meta = OffloadingConnectorMetadata(
        load_jobs={3: TransferJob(B, CPULoadStoreSpec([21]), GPULoadStoreSpec([21, 22, 23], [3], [0]))},
        store_jobs={4: TransferJob(A, GPULoadStoreSpec([13, 14], [2], [2]), CPULoadStoreSpec([13, 14]))},
        jobs_to_flush={11, 12},
    )
    assert said(meta) == [(A, STORE, 32, 32), (B, LOAD, 0, 48)]
    assert said(OffloadingConnectorMetadata({}, {}, {11})) == []


def test_offloading_connector_with_groups_of_other_block_sizes():
    requests = {A: Req(([11, 12, 13, 14], [5]), prompt=64, now=64)}
    meta = OffloadingConnectorMetadata(
        {}, {4: TransferJob(A, GPULoadStoreSpec([11, 12, 13, 14, 5], [4, 1], [0, 0]), CPULoadStoreSpec([1]))}
    )
    assert said(meta, step(requests, (16, 528))) == [(A, STORE, 0, 64)]


@dataclass
class PullReqMeta:
    d_req_id: str
    transfer_id: str
    local_block_ids: list[list[int]]
    remote_engine_id: str
    remote_bootstrap_addr: str
    expire_time: float = float("inf")
    pull_tasks_count: int = 0
    failed: bool = False


class MooncakeConnectorMetadata(KVConnectorMetadata):
    def __init__(self) -> None:
        self.reqs_to_recv: dict[str, dict[str, PullReqMeta]] = defaultdict(dict)
        self.reqs_to_send: dict[str, tuple[str, list[list[int]]]] = {}
        self.reqs_not_processed: set[str] = set()


def test_mooncake_connector():
    meta = MooncakeConnectorMetadata()
    meta.reqs_to_recv["engine"][B] = PullReqMeta(B, "t-1", [[21, 22, 23, 24]], "engine", "tcp://host:1")
    meta.reqs_to_send[C] = ("t-2", [[31, 32, 33]])
    meta.reqs_not_processed = {"t-3"}
    assert said(meta) == [(B, LOAD, 0, 64), (C, STORE, 0, 48)]


@dataclass
class StoreLoadSpec:
    vllm_cached_tokens: int
    kvpool_cached_tokens: int
    can_load: bool
    token_len: int = 0
    tail_key_boundaries: tuple[Any, ...] = ()


class BoundaryPut(NamedTuple):
    group_id: int
    block_id: int
    num_tokens: int


@dataclass
class StoreReq:
    req_id: str
    token_len_chunk: int
    block_ids: tuple[list[int], ...]
    block_hashes: list[bytes]
    can_save: bool | None = None
    load_spec: StoreLoadSpec | None = None
    current_event: Any = None
    token_ids: list[int] | None = None
    token_ids_start: int = 0
    num_prompt_tokens: int | None = None
    prefill_end_tokens: int | None = None
    store_job_id: int | None = None
    boundary_puts: list[BoundaryPut] | None = None
    completed_token_len: int | None = None
    publish_partial_tail: bool = False


class MooncakeStoreConnectorMetadata(KVConnectorMetadata):
    def __init__(self, unfinished: set[str], preempted: set[str]) -> None:
        self.requests: list[StoreReq] = []
        self.unfinished_request_ids = unfinished
        self.preempted_req_ids = preempted


def test_mooncake_store_connector():
    requests = one_step()
    requests[A].before, requests[A].now = 64, 36
    meta = MooncakeStoreConnectorMetadata({A, B, C}, set())
    meta.requests = [
        StoreReq(
            A, 96, ([11, 12, 13, 14, 15, 16, 17],), [b"h"] * 6, True, token_ids_start=64,
            num_prompt_tokens=100, prefill_end_tokens=100, store_job_id=12, completed_token_len=100,
        ),
        StoreReq(
            B, 0, ([21, 22, 23, 24, 25],), [b"h"] * 5, False, StoreLoadSpec(0, 60, True),
            num_prompt_tokens=80, prefill_end_tokens=80, completed_token_len=80,
        ),
    ]  # fmt: skip
    assert said(meta, step(requests)) == [(A, STORE, 64, 32), (B, LOAD, 0, 60)]
    assert said(MooncakeStoreConnectorMetadata({A, B, C}, {B})) == []


@dataclass
class RemoteMeta:
    block_ids: Any
    host: str
    port: int
    engine_id: str
    request_id: str
    blocks_expiry_time: float | None = None
    num_tokens: int | None = None


@dataclass
class NixlReq:
    local_block_ids: Any
    local_physical_block_ids: Any
    tp_size: int
    dcp_size: int = 1
    local_num_computed_blocks: tuple[int, ...] = ()
    remote: RemoteMeta | None = None
    remote_block_size: int | None = None
    pp_size: int = 1
    awaiting_kvs: bool = False
    region_blocks_to_zero: Any = None


@dataclass
class HeartbeatInfo:
    req_ids: set[str]
    host: str
    port: int
    tp_size: int
    dcp_size: int = 1


class NixlConnectorMetadata(KVConnectorMetadata):
    def __init__(self) -> None:
        self.reqs_to_recv: dict[str, NixlReq] = {}
        self.reqs_to_save: dict[str, NixlReq] = {}
        self.reqs_to_send: dict[str, float] = {}
        self.scheduler_clock = 12.5
        self.reqs_in_batch: set[str] = set()
        self.reqs_not_processed: set[str] = set()
        self.heartbeat_by_engine: dict[str, HeartbeatInfo] = {}
        self.push_registrations: dict[str, dict[str, Any]] = {}
        self.push_finished_blocks: dict[str, Any] = {}


def nixl(**more: Any) -> NixlConnectorMetadata:
    meta = NixlConnectorMetadata()
    meta.reqs_in_batch = {A, B, C}
    meta.heartbeat_by_engine = {"e": HeartbeatInfo({A, B}, "host", 8, 2)}
    for name, value in more.items():
        setattr(meta, name, value)
    return meta


def test_nixl_connector():
    remote = RemoteMeta(([11, 12, 13, 14],), "host", 5600, "engine", A, 3.5, 60)
    meta = nixl(
        reqs_to_recv={
            B: NixlReq(([21, 22, 23, 24],), ([21, 22, 23, 24],), 2, 1, (3,), remote, awaiting_kvs=True)
        },
        reqs_to_save={A: NixlReq(([11, 12, 13],), ([11, 12, 13],), 1)},
        reqs_to_send={C: 17.25},
    )
    assert said(meta) == [(A, STORE, 0, 48), (B, LOAD, 0, 64)]
    assert said(nixl(reqs_to_send={C: 17.25})) == []


def test_nixl_push_connector():
    """A registration asks the other side to push: nothing of it is stored here."""
    registration = {
        "request_id": B, "decode_engine_id": "e", "decode_host": "h", "decode_port": 1, "decode_tp_size": 1,
        "local_block_ids": ([21, 22, 23, 24],), "remote_host": "h", "remote_port": 2,
    }  # fmt: skip
    requests = one_step()
    requests[B].now = requests[C].now = 0
    assert said(nixl(push_finished_blocks={C: ([31, 32, 33],)}), step(requests)) == [(C, STORE, 0, 48)]
    assert rows(read(nixl(push_registrations={B: registration}), step(requests))) == []


@dataclass
class LoadBlockInfo:
    num_computed_blocks: int
    num_blocks_to_load: int
    need_fetch_block_ids: list[int]


@dataclass
class SaveBlockInfo:
    skip_leading_blocks: int


@dataclass
class HF3FSRequestMetadata:
    request_id: str
    token_ids: list[int]
    block_ids: list[int]
    load_block_op: LoadBlockInfo | None = None
    save_block_op: SaveBlockInfo | None = None


class HF3FSConnectorMetadata(KVConnectorMetadata):
    def __init__(self, *requests: HF3FSRequestMetadata) -> None:
        self.requests = list(requests)


def test_hf3fs_connector():
    requests = one_step()
    meta = HF3FSConnectorMetadata(
        HF3FSRequestMetadata(A, requests[A].tokens[:100], [*requests[A].tables[0]], None, SaveBlockInfo(2)),
        HF3FSRequestMetadata(B, requests[B].tokens[:60], [21, 22, 23], LoadBlockInfo(0, 3, [21, 22, 23])),
    )
    # It saves whole blocks: what token ids are over is left out.
    assert said(meta, step(requests)) == [(A, STORE, 32, 64), (B, LOAD, 0, 48)]


@dataclass
class MoRIIOReq:
    transfer_id: str
    local_block_ids: Any
    remote_block_ids: Any
    remote_host: str
    remote_port: int
    remote_handshake_port: int
    remote_notify_port: int
    remote_engine_id: str
    tp_size: int
    remote_dp_size: int
    remote_dp_rank: int = 0
    multi_pod_hosts: list[str] = field(default_factory=list)
    remote_dp_size_local: int = 0


class MoRIIOConnectorMetadata(KVConnectorMetadata):
    def __init__(self) -> None:
        self.reqs_to_recv: dict[str, MoRIIOReq] = {}
        self.reqs_to_save: dict[str, MoRIIOReq] = {}
        self.reqs_to_send: dict[str, float] = {}
        self.transfer_id_to_request_id: dict[str, str] = {}


def test_moriio_connector():
    meta = MoRIIOConnectorMetadata()
    meta.reqs_to_save[A] = MoRIIOReq("t", [11, 12], [21, 22], "h", 1, 2, 3, "e", 1, 1, 0, ["h"])
    meta.transfer_id_to_request_id = {"t": A}
    assert said(meta) == [(A, STORE, 0, 32)]


@dataclass
class DecodeBenchConnectorMetadata(KVConnectorMetadata):
    reqs_to_fill: dict[str, tuple[tuple[list[int], ...], int]]


def test_decode_bench_connector():
    meta = DecodeBenchConnectorMetadata({B: (([21, 22, 23, 24],), 60)})
    assert said(meta) == [(B, LOAD, 0, 60)]


class MultiKVConnectorMetadata(KVConnectorMetadata):
    def __init__(self, *metadata: Any) -> None:
        self.metadata = metadata
        self.extra_async_saves: dict[str, int] | None = None


def test_multi_connector():
    store = SimpleCPUOffloadMetadata(store_event=1, store_gpu_blocks=[11], store_cpu_blocks=[1])
    meta = MultiKVConnectorMetadata(store, nixl(reqs_to_save={C: NixlReq(([31],), ([31],), 1)}))
    assert said(meta) == [(A, STORE, 0, 16), (C, STORE, 0, 16)]
    meta = MultiKVConnectorMetadata(SimpleCPUOffloadMetadata(), nixl())
    meta.extra_async_saves = {C: 1}
    assert said(meta) == []


@dataclass
class PageTransfer:
    transfer_id: int
    host_block_id: int
    resident_block_ids: tuple[int, ...]
    after_forward: bool
    restore: bool = False


@dataclass
class Command:
    page_transfers: list[PageTransfer]


class BlockCopy(NamedTuple):
    src_block_id: int
    dst_block_id: int


@dataclass
class HiSparseConnectorMetadata(KVConnectorMetadata):
    command: Command | None
    host_block_copies: tuple[BlockCopy, ...] = ()
    source_block_ids: tuple[int, ...] = ()
    row_mirrors: dict[str, Any] = field(default_factory=dict)
    all_context_pages_resident: bool = False
    residency_updates: dict[str, Any] = field(default_factory=dict)


def test_hisparse_connector_is_never_read_as_something_else():
    meta = HiSparseConnectorMetadata(Command([PageTransfer(1, 2, (11,), True)]), (BlockCopy(11, 12),), (11,))
    declared = read(meta, step(one_step()))
    assert not declared.readable or rows(declared) == [(A, STORE, 0, 16)]
    assert said(HiSparseConnectorMetadata(None)) == []


# --- LMCache --------------------------------------------------------------


@dataclass
class LoadSpec:
    vllm_cached_tokens: int
    lmcache_cached_tokens: int
    can_load: bool


@dataclass
class SaveSpec:
    skip_leading_tokens: int
    can_save: bool


@dataclass
class DisaggSpec:
    req_id: str
    receiver_id: str
    receiver_host: str
    receiver_init_port: int
    receiver_alloc_port: int
    is_last_prefill: bool = False
    num_transferred_tokens: int = 0
    total_chunks: int = 0


@dataclass
class LMCacheReq:
    req_id: str
    token_ids: list[int]
    slot_mapping: Any
    is_last_prefill: bool = False
    save_spec: SaveSpec | None = None
    load_spec: LoadSpec | None = None
    disagg_spec: DisaggSpec | None = None
    request_configs: dict[str, Any] | None = None


@dataclass
class LMCacheConnectorMetadata(KVConnectorMetadata):
    requests: list[LMCacheReq] = field(default_factory=list)
    lookup_requests_in_step: list[str] = field(default_factory=list)


def lmcache(requests: dict[str, Req], name: str, tokens: int, **specs: Any) -> LMCacheReq:
    mapping = torch.tensor(slots(requests[name].tables[0], 0, tokens))
    return LMCacheReq(name, requests[name].tokens[:tokens], mapping, **specs)


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        ({"save_spec": SaveSpec(16, True)}, [(B, STORE, 16, 64)]),
        ({"save_spec": SaveSpec(16, False)}, []),
        ({"save_spec": SaveSpec(16, False), "load_spec": LoadSpec(0, 60, True)}, [(B, LOAD, 0, 60)]),
        (
            {"save_spec": SaveSpec(64, True), "load_spec": LoadSpec(0, 60, True)},
            [(B, STORE, 64, 16), (B, LOAD, 0, 60)],
        ),
        ({"save_spec": SaveSpec(64, True), "load_spec": LoadSpec(0, 60, False)}, [(B, STORE, 64, 16)]),
        ({"save_spec": SaveSpec(80, True)}, [(B, STORE, UNKNOWN, 0)]),
        (
            {"save_spec": SaveSpec(0, True), "disagg_spec": DisaggSpec(B, "r", "host", 7, 8, True, 16, 2)},
            [(B, STORE, 0, 80)],
        ),
        ({"save_spec": SaveSpec(0, True), "request_configs": {"lmcache.tag": 3}}, [(B, STORE, 0, 80)]),
    ],
)
def test_lmcache_connector(specs: dict[str, Any], expected: list[Any]):
    requests = one_step()
    meta = LMCacheConnectorMetadata([lmcache(requests, B, 80, **specs)], [A, C])
    assert said(meta, step(requests)) == expected


@dataclass
class LoadStoreOp:
    token_ids: list[int] | None
    block_ids: Any
    start: int = 0
    end: int = 0
    skip_first_n_tokens: int = 0


@dataclass
class LMCacheMPRequestMetadata:
    request_id: str
    direction: str
    op: LoadStoreOp
    cache_salt: str = ""
    request_configs: dict[str, Any] | None = None


class LMCacheMPConnectorMetadata(KVConnectorMetadata):
    def __init__(self, *requests: LMCacheMPRequestMetadata) -> None:
        self.requests = list(requests)
        self.need_flush_before_forward = False


@pytest.mark.parametrize("nested", [False, True])
def test_lmcache_multi_process_connector(nested: bool):
    requests = one_step()
    held = [13, 14, 15, 16]
    store = LoadStoreOp(requests[A].tokens, [held] if nested else held, 32, 96)
    load = LoadStoreOp(requests[B].tokens, [[21, 22, 23]] if nested else [21, 22, 23], 0, 48, 16)
    meta = LMCacheMPConnectorMetadata(
        LMCacheMPRequestMetadata(A, "STORE", store), LMCacheMPRequestMetadata(B, "RETRIEVE", load)
    )
    assert said(meta, step(requests)) == [(A, STORE, 32, 64), (B, LOAD, 16, 32)]


# --- the registry --------------------------------------------------------------


@dataclass
class KvbReqMeta:
    req_id: str
    token_ids: list[int]
    cache_salt: str | None
    mm_ids: list[str]
    lora_name: str
    block_ids: list[int]
    load_start_block: int
    num_load_blocks: int
    store_start_block: int
    store_end_block: int


@dataclass
class KvblockdConnectorMetadata(KVConnectorMetadata):
    requests: list[KvbReqMeta] = field(default_factory=list)


@pytest.mark.parametrize(
    ("name", "numbers", "expected"),
    [
        (A, (0, 0, 0, 6), [(A, STORE, 0, 96)]),
        (A, (0, 0, 2, 4), [(A, STORE, 32, 32)]),
        (B, (0, 3, 3, 5), [(B, STORE, 48, 32), (B, LOAD, 0, 48)]),
        (B, (0, 3, 3, 3), [(B, LOAD, 0, 48)]),
        (A, (0, 0, 0, 0), []),
    ],
)
def test_kvblockd(name: str, numbers: tuple[int, ...], expected: list[Any]):
    requests = one_step()
    req = requests[name]
    aligned = len(req.tokens) // BLOCK * BLOCK
    meta = KvblockdConnectorMetadata(
        [KvbReqMeta(name, req.tokens[:aligned], None, [], "", list(req.tables[0]), *numbers)]
    )
    assert said(meta, step(requests)) == expected


class Materialization(enum.Enum):
    EXACT_PREFIX = "exact"


@dataclass(frozen=True)
class PendingLoad:
    request_id: str
    donor_id: str
    token_count: int
    materialization_kind: Materialization
    namespace: str
    block_ids: tuple[list[int], ...] | None = None
    donor_start: int | None = None
    target_start: int | None = None
    pieces: tuple[Any, ...] = ()


@dataclass(frozen=True)
class PendingStore:
    request_id: str
    token_ids: Any
    token_count: int
    namespace: str
    block_ids: tuple[list[int], ...] | None = None
    final: bool = False


@dataclass
class SemBlendConnectorMetadata(KVConnectorMetadata):
    loads: list[PendingLoad] = field(default_factory=list)
    stores: list[PendingStore] = field(default_factory=list)
    finalize: list[str] = field(default_factory=list)


def test_semblend():
    requests = one_step()
    meta = SemBlendConnectorMetadata(
        loads=[
            PendingLoad(B, C, 32, Materialization.EXACT_PREFIX, "ns", (requests[B].tables[0],), 5, 16),
        ],
        stores=[PendingStore(A, requests[A].tokens, 96, "ns", (requests[A].tables[0],), True)],
        finalize=["an older one", C],
    )
    assert said(meta, step(requests)) == [(A, STORE, 0, 96), (B, LOAD, 16, 32)]
    assert said(SemBlendConnectorMetadata(finalize=[C])) == []


@dataclass
class VuaReq:
    token_ids: Any
    existing_token_ids: Any
    slot_mapping: Any
    is_store: bool


@dataclass
class VuaMetadata(KVConnectorMetadata):
    requests: list[VuaReq] = field(default_factory=list)


def test_the_whole_prefix_without_a_request_id():
    """Entries of a chunked prompt: all its slots so far, no id, and the request is no new one."""
    requests = one_step()
    requests[A].before, requests[A].now = 64, 36
    tokens = torch.tensor(requests[A].tokens)
    meta = VuaMetadata(
        [VuaReq(tokens[:96], tokens[:64], torch.tensor(slots(requests[A].tables[0], 0, 96)), True)]
    )
    assert said(meta, step(requests)) == [(A, STORE, 0, 96)]


# --- shapes seen in stores of other projects -------------------------------------------------------


@dataclass
class KeyedMetadata(KVConnectorMetadata):
    stores: Any
    running: list[str]


def test_entries_beside_a_list_of_who_runs_of_the_same_length():
    assert said(KeyedMetadata(((["7f3a"], [11, 12]),), [C])) == [(A, STORE, 0, 32)]
