"""The metadata of real connectors, in look-alikes of their shapes: the entries that they mean."""

from __future__ import annotations

import ast
import enum
from collections import defaultdict, namedtuple
from dataclasses import field, make_dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvtrace.agent.metadata import StepRequests, read
from kvtrace.trace.format import UNKNOWN, Flag

from .fakes import KVConnectorMetadata
from .holding import BLOCK, Req, rows, slots, step

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


def shape(name: str, *fields: str, bases: tuple[type, ...] = ()) -> Any:
    """A class of records with these fields: ``name``, or ``name=what it is if not given``."""
    own: list[Any] = []
    for one, _, text in (given.partition("=") for given in " ".join(fields).split()):
        default = field(default_factory=partial(ast.literal_eval, text)) if text else field()
        own.append((one, Any, default))
    return make_dataclass(name, own, bases=bases)


def metadata(name: str, *fields: str) -> Any:
    return shape(name, *fields, bases=(KVConnectorMetadata,))


# --- vLLM 0.32.0 ----------------------------------------------------------------------------------


ExampleReq = shape("ExampleReq", "token_ids slot_mapping is_store mm_hashes=[]")
ExampleConnectorMetadata = metadata("ExampleConnectorMetadata", "requests=[]")


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


PendingSave = shape("PendingSave", "req_id filename token_ids block_ids")
ExampleHiddenStatesConnectorMetadata = metadata(
    "ExampleHiddenStatesConnectorMetadata",
    "pending_saves=[] new_req_filenames={}",
)


def test_example_hidden_states_connector():
    requests = one_step()
    meta = ExampleHiddenStatesConnectorMetadata(
        [PendingSave(C, "/tmp/c", torch.tensor(requests[C].tokens[:42]), [31, 32, 33])], {A: "/tmp/a"}
    )
    assert said(meta, step(requests)) == [(C, STORE, 0, 42)]
    assert said(ExampleHiddenStatesConnectorMetadata([], {A: "/tmp/a"})) == []


SimpleCPUOffloadMetadata = metadata(
    "SimpleCPUOffloadMetadata",
    "load_event=-1 load_gpu_blocks=[] load_cpu_blocks=[] load_event_to_reqs={} store_event=-1",
    "store_gpu_blocks=[] store_cpu_blocks=[] need_flush=False",
)


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


TransferJob = shape("TransferJob", "req_id src_spec dst_spec")
OffloadingConnectorMetadata = metadata(
    "OffloadingConnectorMetadata",
    "load_jobs store_jobs jobs_to_flush=None",
)


def test_offloading_connector():
    meta = OffloadingConnectorMetadata(
        load_jobs={3: TransferJob(B, CPULoadStoreSpec([21]), GPULoadStoreSpec([21, 22, 23], [3], [0]))},
        store_jobs={4: TransferJob(A, GPULoadStoreSpec([13, 14], [2], [2]), CPULoadStoreSpec([13, 14]))},
        jobs_to_flush={11, 12},
    )
    assert said(meta) == [(A, STORE, 32, 32), (B, LOAD, 0, 48)]
    assert said(OffloadingConnectorMetadata({}, {}, {11})) == []


OlderOffloadingMetadata = metadata(
    "OffloadingConnectorMetadata", "reqs_to_load reqs_to_store reqs_to_flush=None"
)


def test_blocks_of_the_host_are_not_taken_for_the_gpu_s():
    """Their numbers may be those of other blocks of the request."""
    here, there = GPULoadStoreSpec([13, 14], [2], [2]), CPULoadStoreSpec([11, 12])
    assert said(OlderOffloadingMetadata({}, {A: (here, there)})) == [(A, STORE, 32, 32)]
    job = TransferJob(A, GPULoadStoreSpec([13, 14], [2], [2]), CPULoadStoreSpec([11, 12]))
    assert said(OffloadingConnectorMetadata({}, {4: job})) == [(A, STORE, 32, 32)]
    back = (CPULoadStoreSpec([22, 23]), GPULoadStoreSpec([21, 22], [2], [0]))
    assert said(OlderOffloadingMetadata({B: back}, {}, {C})) == [(B, LOAD, 0, 32)]


def test_offloading_connector_with_groups_of_other_block_sizes():
    requests = {A: Req(([11, 12, 13, 14], [5]), prompt=64, now=64)}
    meta = OffloadingConnectorMetadata(
        {}, {4: TransferJob(A, GPULoadStoreSpec([11, 12, 13, 14, 5], [4, 1], [0, 0]), CPULoadStoreSpec([1]))}
    )
    assert said(meta, step(requests, (16, 528))) == [(A, STORE, 0, 64)]


PullReqMeta = shape(
    "PullReqMeta",
    "d_req_id transfer_id local_block_ids remote_engine_id remote_bootstrap_addr expire_time=1e999",
    "pull_tasks_count=0 failed=False",
)
MooncakeConnectorMetadata = metadata(
    "MooncakeConnectorMetadata",
    "reqs_to_recv={} reqs_to_send={} reqs_not_processed=set()",
)


def test_mooncake_connector():
    pull = PullReqMeta(B, "t-1", [[21, 22, 23, 24]], "engine", "tcp://host:1")
    to_recv = defaultdict(dict, {"engine": {B: pull}})
    meta = MooncakeConnectorMetadata(to_recv, {C: ("t-2", [[31, 32, 33]])}, {"t-3"})
    assert said(meta) == [(B, LOAD, 0, 64), (C, STORE, 0, 48)]


StoreLoadSpec = shape(
    "StoreLoadSpec",
    "vllm_cached_tokens kvpool_cached_tokens can_load token_len=0 tail_key_boundaries=()",
)


StoreReq = shape(
    "StoreReq",
    "req_id token_len_chunk block_ids block_hashes can_save=None load_spec=None current_event=None",
    "token_ids=None token_ids_start=0 num_prompt_tokens=None prefill_end_tokens=None store_job_id=None",
    "boundary_puts=None completed_token_len=None publish_partial_tail=False",
)
MooncakeStoreConnectorMetadata = metadata(
    "MooncakeStoreConnectorMetadata",
    "requests unfinished_request_ids preempted_req_ids",
)


def test_mooncake_store_connector():
    requests = one_step()
    requests[A].before, requests[A].now = 64, 36
    work = [
        StoreReq(
            A, 96, ([11, 12, 13, 14, 15, 16, 17],), [b"h"] * 6, True, token_ids_start=64,
            num_prompt_tokens=100, prefill_end_tokens=100, store_job_id=12, completed_token_len=100,
        ),
        StoreReq(
            B, 0, ([21, 22, 23, 24, 25],), [b"h"] * 5, False, StoreLoadSpec(0, 60, True),
            num_prompt_tokens=80, prefill_end_tokens=80, completed_token_len=80,
        ),
    ]  # fmt: skip
    meta = MooncakeStoreConnectorMetadata(work, {A, B, C}, set())
    assert said(meta, step(requests)) == [(A, STORE, 64, 32), (B, LOAD, 0, 60)]
    assert said(MooncakeStoreConnectorMetadata([], {A, B, C}, {B})) == []


RemoteMeta = shape(
    "RemoteMeta",
    "block_ids host port engine_id request_id blocks_expiry_time=None num_tokens=None",
)
NixlReq = shape(
    "NixlReq",
    "local_block_ids local_physical_block_ids tp_size dcp_size=1 local_num_computed_blocks=()",
    "remote=None remote_block_size=None pp_size=1 awaiting_kvs=False region_blocks_to_zero=None",
)
HeartbeatInfo = shape("HeartbeatInfo", "req_ids host port tp_size dcp_size=1")
NixlConnectorMetadata = metadata(
    "NixlConnectorMetadata",
    "reqs_to_recv={} reqs_to_save={} reqs_to_send={} scheduler_clock=12.5 reqs_in_batch=set()",
    "reqs_not_processed=set() heartbeat_by_engine={} push_registrations={} push_finished_blocks={}",
)


def nixl(**more: Any) -> Any:
    heartbeat = {"e": HeartbeatInfo({A, B}, "host", 8, 2)}
    return NixlConnectorMetadata(reqs_in_batch={A, B, C}, heartbeat_by_engine=heartbeat, **more)


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


LoadBlockInfo = shape("LoadBlockInfo", "num_computed_blocks num_blocks_to_load need_fetch_block_ids")
SaveBlockInfo = shape("SaveBlockInfo", "skip_leading_blocks")
HF3FSRequestMetadata = shape(
    "HF3FSRequestMetadata",
    "request_id token_ids block_ids load_block_op=None save_block_op=None",
)
HF3FSConnectorMetadata = metadata("HF3FSConnectorMetadata", "requests")


def test_hf3fs_connector():
    requests = one_step()
    work = [
        HF3FSRequestMetadata(A, requests[A].tokens[:100], [*requests[A].tables[0]], None, SaveBlockInfo(2)),
        HF3FSRequestMetadata(B, requests[B].tokens[:60], [21, 22, 23], LoadBlockInfo(0, 3, [21, 22, 23])),
    ]
    # It saves whole blocks: what token ids are over is left out.
    assert said(HF3FSConnectorMetadata(work), step(requests)) == [(A, STORE, 32, 64), (B, LOAD, 0, 48)]


MoRIIOReq = shape(
    "MoRIIOReq",
    "transfer_id local_block_ids remote_block_ids remote_host remote_port remote_handshake_port",
    "remote_notify_port remote_engine_id tp_size remote_dp_size remote_dp_rank=0 multi_pod_hosts=[]",
    "remote_dp_size_local=0",
)
MoRIIOConnectorMetadata = metadata(
    "MoRIIOConnectorMetadata",
    "reqs_to_recv={} reqs_to_save={} reqs_to_send={} transfer_id_to_request_id={}",
)


def test_moriio_connector():
    store = MoRIIOReq("t", [11, 12], [21, 22], "h", 1, 2, 3, "e", 1, 1, 0, ["h"])
    meta = MoRIIOConnectorMetadata(reqs_to_save={A: store}, transfer_id_to_request_id={"t": A})
    assert said(meta) == [(A, STORE, 0, 32)]


DecodeBenchConnectorMetadata = metadata("DecodeBenchConnectorMetadata", "reqs_to_fill")


def test_decode_bench_connector():
    meta = DecodeBenchConnectorMetadata({B: (([21, 22, 23, 24],), 60)})
    assert said(meta) == [(B, LOAD, 0, 60)]


MultiKVConnectorMetadata = metadata("MultiKVConnectorMetadata", "metadata extra_async_saves=None")


def test_multi_connector():
    store = SimpleCPUOffloadMetadata(store_event=1, store_gpu_blocks=[11], store_cpu_blocks=[1])
    meta = MultiKVConnectorMetadata((store, nixl(reqs_to_save={C: NixlReq(([31],), ([31],), 1)})))
    assert said(meta) == [(A, STORE, 0, 16), (C, STORE, 0, 16)]
    assert said(MultiKVConnectorMetadata((SimpleCPUOffloadMetadata(), nixl()), {C: 1})) == []


PageTransfer = shape(
    "PageTransfer",
    "transfer_id host_block_id resident_block_ids after_forward restore=False",
)
Command = shape("Command", "page_transfers")


BlockCopy = namedtuple("BlockCopy", "src_block_id dst_block_id")
HiSparseConnectorMetadata = metadata(
    "HiSparseConnectorMetadata",
    "command host_block_copies=() source_block_ids=() row_mirrors={} all_context_pages_resident=False",
    "residency_updates={}",
)


def test_hisparse_connector_is_never_read_as_something_else():
    meta = HiSparseConnectorMetadata(Command([PageTransfer(1, 2, (11,), True)]), (BlockCopy(11, 12),), (11,))
    declared = read(meta, step(one_step()))
    assert not declared.readable or rows(declared) == [(A, STORE, 0, 16)]
    assert said(HiSparseConnectorMetadata(None)) == []


# --- LMCache --------------------------------------------------------------


LoadSpec = shape("LoadSpec", "vllm_cached_tokens lmcache_cached_tokens can_load")
SaveSpec = shape("SaveSpec", "skip_leading_tokens can_save")
DisaggSpec = shape(
    "DisaggSpec",
    "req_id receiver_id receiver_host receiver_init_port receiver_alloc_port is_last_prefill=False",
    "num_transferred_tokens=0 total_chunks=0",
)
LMCacheReq = shape(
    "LMCacheReq",
    "req_id token_ids slot_mapping is_last_prefill=False save_spec=None load_spec=None disagg_spec=None",
    "request_configs=None",
)
LMCacheConnectorMetadata = metadata("LMCacheConnectorMetadata", "requests=[] lookup_requests_in_step=[]")


def lmcache(requests: dict[str, Req], name: str, tokens: int, **specs: Any) -> Any:
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


LoadStoreOp = shape("LoadStoreOp", "token_ids block_ids start=0 end=0 skip_first_n_tokens=0")
LMCacheMPRequestMetadata = shape(
    "LMCacheMPRequestMetadata",
    "request_id direction op cache_salt='' request_configs=None",
)
LMCacheMPConnectorMetadata = metadata(
    "LMCacheMPConnectorMetadata",
    "requests need_flush_before_forward=False",
)


@pytest.mark.parametrize("nested", [False, True])
def test_lmcache_multi_process_connector(nested: bool):
    requests = one_step()
    held = [13, 14, 15, 16]
    store = LoadStoreOp(requests[A].tokens, [held] if nested else held, 32, 96)
    load = LoadStoreOp(requests[B].tokens, [[21, 22, 23]] if nested else [21, 22, 23], 0, 48, 16)
    work = [LMCacheMPRequestMetadata(A, "STORE", store), LMCacheMPRequestMetadata(B, "RETRIEVE", load)]
    meta = LMCacheMPConnectorMetadata(work)
    assert said(meta, step(requests)) == [(A, STORE, 32, 64), (B, LOAD, 16, 32)]


# --- the registry --------------------------------------------------------------


KvbReqMeta = shape(
    "KvbReqMeta",
    "req_id token_ids cache_salt mm_ids lora_name block_ids load_start_block num_load_blocks",
    "store_start_block store_end_block",
)
KvblockdConnectorMetadata = metadata("KvblockdConnectorMetadata", "requests=[]")


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


PendingLoad = shape(
    "PendingLoad",
    "request_id donor_id token_count materialization_kind namespace block_ids=None donor_start=None",
    "target_start=None pieces=()",
)
PendingStore = shape("PendingStore", "request_id token_ids token_count namespace block_ids=None final=False")
SemBlendConnectorMetadata = metadata("SemBlendConnectorMetadata", "loads=[] stores=[] finalize=[]")


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


VuaReq = shape("VuaReq", "token_ids existing_token_ids slot_mapping is_store")
VuaMetadata = metadata("VuaMetadata", "requests=[]")


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


KeyedMetadata = metadata("KeyedMetadata", "stores running")


def test_entries_beside_a_list_of_who_runs_of_the_same_length():
    assert said(KeyedMetadata(((["7f3a"], [11, 12]),), [C])) == [(A, STORE, 0, 32)]
