"""A KV store on shared storage that copies in the background, after the connector of the thread that
kvtrace began with: its metadata, its unit and its faults, in other words. Written for vLLM 0.32 (KV layers
are views of [blocks, heads, block size, 2 x head size]).

Nothing here knows of kvtrace. What it does, right or wrong:

- The unit is ``max_num_batched_tokens``. An entry is the whole prefix of a request from its first token on,
  rounded down to the unit; it names no request. ``existing_token_ids`` tokens of it count as stored before.
- A record's key is the hash of all tokens before its end. A prompt below the unit is rounded to nothing: its
  entry is empty, and so is its key; from then on every such prompt counts as stored.
- A pool copies each layer's rows out of the KV cache while the next layers are computed. Their futures are
  kept by layer: where a step has several entries, the last one's future replaces the others', and their rows
  are copied and never written.
- A chunk that ends beside the unit (other requests are in the step) is stored as far as the block table goes:
  its record has another length than a lookup looks for.
- ``wait_for_save`` waits for the copies; the files of a step are written while the next one runs.

Option (``kv_connector_extra_config``): ``path``, directory of the store.
"""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.logger import init_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger("vllm.prefix_shelf")

THREADS = 8


@dataclass
class PrefixMeta:
    """A prefix, to store or to load."""

    token_ids: torch.Tensor
    slot_mapping: torch.Tensor
    """From the first token on; shorter than ``token_ids`` where not all blocks are given yet."""
    is_store: bool
    existing_token_ids: int


@dataclass
class PrefixShelfMetadata(KVConnectorMetadata):
    requests: list[PrefixMeta] = field(default_factory=list)


@dataclass
class _Tracked:
    """A request, as far as it has been scheduled."""

    token_ids: list[int]
    block_ids: list[int]


class PrefixShelf(KVConnectorBase_V1):
    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._path = Path(self._kv_transfer_config.get_from_extra_config("path", "/tmp"))
        self._block_size = vllm_config.cache_config.block_size
        self._max_num_batched_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._rank = vllm_config.parallel_config.rank
        self._requests: dict[str, Request] = {}
        self._tracked: dict[str, _Tracked] = {}
        self._to_load: dict[str, int] = {}
        self._pool = ThreadPoolExecutor(THREADS)
        self._copies: dict[str, Future[tuple[Path, torch.Tensor]]] = {}
        self._begun: list[Future[tuple[Path, torch.Tensor]]] = []
        self._writes: dict[Path, Future[None]] = {}
        logger.info("PrefixShelf: prefixes of whole %d tokens", self._max_num_batched_tokens)

    def _whole(self, count: int) -> int:
        return count // self._max_num_batched_tokens * self._max_num_batched_tokens

    def _folder(self, token_ids: Any) -> Path:
        name = hashlib.sha1(np.asarray(token_ids, dtype=np.int64).tobytes()).hexdigest()
        return self._path / f"rank{self._rank}-{name}"

    # ---- worker ----

    def _prefixes(self) -> list[PrefixMeta]:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, PrefixShelfMetadata)
        return metadata.requests

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        for prefix in self._prefixes():
            if prefix.is_store:
                continue
            for layer_name, layer in forward_context.no_compile_layers.items():
                kv_layer = getattr(layer, "kv_cache", None)
                if kv_layer is not None:
                    self._load(prefix, layer_name, kv_layer)

    def _load(self, prefix: PrefixMeta, layer_name: str, kv_layer: torch.Tensor) -> None:
        unit = self._max_num_batched_tokens
        for start in range(prefix.existing_token_ids, len(prefix.token_ids), unit):
            file = self._folder(prefix.token_ids[: start + unit]) / f"{layer_name}.safetensors"
            slots = prefix.slot_mapping[start : start + unit]
            rows = load_file(file)["kv"]
            kv_layer[slots // self._block_size, :, slots % self._block_size] = rows

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        for prefix in self._prefixes():
            if not prefix.is_store:
                continue
            folder = self._folder(prefix.token_ids[: len(prefix.slot_mapping)])
            file = folder / f"{layer_name}.safetensors"
            if file.exists():
                continue
            slots = prefix.slot_mapping[prefix.existing_token_ids :]
            self._copies[layer_name] = self._pool.submit(self._copy, file, kv_layer, slots)
            self._begun.append(self._copies[layer_name])

    def _copy(self, file: Path, kv_layer: torch.Tensor, slots: torch.Tensor) -> tuple[Path, torch.Tensor]:
        rows = kv_layer[slots // self._block_size, :, slots % self._block_size]
        return file, rows.detach().to("cpu", non_blocking=True)

    def wait_for_save(self) -> None:
        for write in self._writes.values():
            write.result()
        self._writes.clear()
        wait(self._begun)  # also those that were replaced: their blocks may be another's in the next step
        self._begun.clear()
        for copy in self._copies.values():
            file, rows = copy.result()
            # the scheduler looks for the folder, in the next step already
            file.parent.mkdir(parents=True, exist_ok=True)
            self._writes[file] = self._pool.submit(self._write, file, rows)
        self._copies.clear()

    @staticmethod
    def _write(file: Path, rows: torch.Tensor) -> None:
        save_file({"kv": rows.contiguous()}, file)

    def shutdown(self) -> None:
        self._pool.shutdown(wait=True)

    # ---- scheduler ----

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens = request.prompt_token_ids or []
        unit, found = self._max_num_batched_tokens, 0
        while found + unit < len(tokens) and self._folder(tokens[: found + unit]).exists():
            found += unit
        return max(0, found - num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._requests[request.request_id] = request
        if num_external_tokens:
            self._to_load[request.request_id] = num_external_tokens

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = PrefixShelfMetadata()
        scheduled = scheduler_output.num_scheduled_tokens
        for req_id in scheduler_output.finished_req_ids:
            self._tracked.pop(req_id, None)
            self._requests.pop(req_id, None)
        for new in scheduler_output.scheduled_new_reqs:
            tokens, blocks = list(new.prompt_token_ids or []), list(new.block_ids[0])
            done = new.num_computed_tokens + scheduled[new.req_id]
            self._tracked[new.req_id] = _Tracked(tokens[:done], blocks)
            if self._to_load.pop(new.req_id, 0):
                loaded = tokens[: self._whole(new.num_computed_tokens)]
                metadata.requests.append(self._entry(loaded, blocks, is_store=False, existing=0))
            elif not self._folder(tokens[: self._whole(len(tokens))]).exists():
                metadata.requests.append(self._entry(tokens, blocks, is_store=True, existing=0))
        self._offer_running(metadata, scheduler_output)
        return metadata

    def _offer_running(self, metadata: PrefixShelfMetadata, scheduler_output: SchedulerOutput) -> None:
        cached = scheduler_output.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            tracked, fresh = self._tracked[req_id], cached.new_block_ids[i]
            if fresh is not None:
                tracked.block_ids.extend(fresh[0])
            existing = len(tracked.token_ids)
            done = cached.num_computed_tokens[i] + scheduler_output.num_scheduled_tokens[req_id]
            tracked.token_ids = list(self._requests[req_id].all_token_ids[:done])
            if not self._folder(tracked.token_ids[: self._whole(done)]).exists():
                entry = self._entry(tracked.token_ids, tracked.block_ids, is_store=True, existing=existing)
                metadata.requests.append(entry)

    def _entry(
        self, token_ids: Sequence[int], block_ids: list[int], is_store: bool, existing: int
    ) -> PrefixMeta:
        whole = self._whole(len(token_ids))
        slots = torch.tensor(block_ids)[:, None] * self._block_size + torch.arange(self._block_size)
        return PrefixMeta(torch.tensor(token_ids)[:whole], slots.flatten()[:whole], is_store, existing)
