"""A small KV store on disk, as teams write them outside vLLM: whole units only.

Each prompt is rounded down to whole units of ``unit`` tokens; a unit is a directory named by
the hash of all tokens up to its end, with one file per layer and rank in it.

Nothing here knows of kvtrace. Options (``kv_connector_extra_config``):

- ``path``: directory of the store (required)
- ``unit``: tokens per unit; without it ``max_num_batched_tokens``, as the connector of the
  thread that kvtrace began with
- ``save_decode``: also store units that fill up while tokens are generated
- ``admit_every``: n stores only every n-th prompt that the connector meets, 0 none
- ``empty_entries``: false leaves prompts below one unit out of the metadata (default: they
  are in it, with nothing to store)
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger("vllm.chunk_store")


@dataclass
class Transfer:
    """Tokens [start, start + num_tokens) of one request, to store or to load."""

    req_id: str
    start: int
    num_tokens: int
    slot_mapping: torch.Tensor
    keys: list[str]
    """One per unit that the tokens touch, the first one the unit of ``start``."""
    is_store: bool


@dataclass
class ChunkStoreMetadata(KVConnectorMetadata):
    requests: list[Transfer] = field(default_factory=list)


@dataclass
class _Live:
    """What the scheduler side keeps of a request between its steps."""

    request: Request
    admitted: bool
    block_ids: list[int] = field(default_factory=list)
    offered: int | None = None
    """Tokens offered for storing so far; None until the prompt's turn has come."""


def by_block(kv_layer: Any) -> torch.Tensor:
    """A view of a layer's KV as [blocks, heads, block size, ...].

    vLLM's CPU builds since 0.27 have it so. Older ones have [2, blocks, heads, block size, head size]; up to
    0.17 a layer keeps a list, one for each pipeline stage.
    """
    kv: torch.Tensor = kv_layer[0] if isinstance(kv_layer, list) else kv_layer
    return kv.permute(1, 2, 3, 0, 4) if kv.dim() == 5 else kv


class ChunkStore(KVConnectorBase_V1):
    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        option = self._kv_transfer_config.get_from_extra_config
        self.path = Path(option("path", None) or "")
        if not self.path.is_absolute():
            raise ValueError('ChunkStore: kv_connector_extra_config["path"] must be an absolute path')
        self.block_size = vllm_config.cache_config.block_size
        self.unit = int(option("unit", None) or vllm_config.scheduler_config.max_num_batched_tokens)
        self.save_decode = bool(option("save_decode", False))
        self.admit_every = int(option("admit_every", 1))
        self.empty_entries = bool(option("empty_entries", True))
        # a producer only writes, a consumer only reads, "kv_both" is both
        self.stores = self._kv_transfer_config.is_kv_producer
        self.loads = self._kv_transfer_config.is_kv_consumer
        self.ranks = vllm_config.parallel_config.tensor_parallel_size
        self.last_layer = kv_cache_config.kv_cache_groups[0].layer_names[-1]
        self._live: dict[str, _Live] = {}
        self._to_load: dict[str, int] = {}
        """Tokens that the scheduler accepted from the store, until the step's metadata is built."""
        self._met = 0
        if role == KVConnectorRole.WORKER:
            self.rank = get_tensor_model_parallel_rank()
            self.path.mkdir(parents=True, exist_ok=True)
        logger.info("ChunkStore: units of %d tokens under %s", self.unit, self.path)

    # ---- worker ----

    def plan(self) -> ChunkStoreMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ChunkStoreMetadata)
        return metadata

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        loads = [transfer for transfer in self.plan().requests if not transfer.is_store]
        for transfer in loads:
            for layer_name, layer in forward_context.no_compile_layers.items():
                kv_layer = getattr(layer, "kv_cache", None)
                if kv_layer is None:
                    continue
                kv_layer = by_block(kv_layer)
                rows = torch.cat([load_file(self._file(key, layer_name))["kv"] for key in transfer.keys])
                first = transfer.start % self.unit
                blocks, offsets = self._where(transfer.slot_mapping, kv_layer)
                kv_layer[blocks, :, offsets] = rows[first : first + transfer.num_tokens].to(kv_layer.device)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        for transfer in self.plan().requests:
            if not transfer.is_store:
                continue
            blocks, offsets = self._where(transfer.slot_mapping, kv_layer)
            rows = by_block(kv_layer)[blocks, :, offsets].detach().cpu()
            for i, key in enumerate(transfer.keys):
                part = rows[i * self.unit : (i + 1) * self.unit]
                self._write(self._file(key, layer_name), part.contiguous())

    def wait_for_save(self) -> None:
        return

    def _where(self, slot_mapping: torch.Tensor, kv_layer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slots = slot_mapping.to(kv_layer.device)
        return slots // self.block_size, slots % self.block_size

    def _file(self, key: str, layer_name: str, rank: int | None = None) -> Path:
        return self.path / key / f"{layer_name}.rank{self.rank if rank is None else rank}.safetensors"

    @staticmethod
    def _write(path: Path, rows: torch.Tensor) -> None:
        path.parent.mkdir(exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        save_file({"kv": rows}, part)
        part.replace(path)

    # ---- scheduler ----

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if not self.loads:
            return 0, False
        tokens = self.tokens(request)[: len(request.prompt_token_ids or [])]
        hit = self._stored(self._keys(tokens, 0, len(tokens) // self.unit * self.unit)) * self.unit
        # the last prompt token is always computed: its logits give the first new token
        return max(0, min(hit, len(tokens) - 1) - num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if request.request_id not in self._live:
            self._met += 1
            admitted = self.admit_every > 0 and self._met % self.admit_every == 0
            self._live[request.request_id] = _Live(request, admitted)
        if num_external_tokens > 0:
            self._to_load[request.request_id] = num_external_tokens

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = ChunkStoreMetadata()
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            live = self._live[new.req_id]
            live.block_ids = list(new.block_ids[0])
            self._offer(metadata, live, new.num_computed_tokens, scheduled[new.req_id])
        cached = scheduler_output.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            live = self._live[req_id]
            new_blocks = cached.new_block_ids[i]
            if req_id in cached.resumed_req_ids:
                live.block_ids = []
            if new_blocks is not None:
                live.block_ids.extend(new_blocks[0])
            self._offer(metadata, live, cached.num_computed_tokens[i], scheduled[req_id])
        self._to_load.clear()
        return metadata

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._live.pop(request.request_id, None)
        return False, None

    def _offer(self, metadata: ChunkStoreMetadata, live: _Live, computed: int, scheduled: int) -> None:
        """What this step shall load and store of one request."""
        request = live.request
        load = self._to_load.get(request.request_id, 0)
        if load:
            # they stand right before the scheduled ones: what is loaded counts as computed
            metadata.requests.append(self._transfer(live, computed - load, computed, is_store=False))
        if not self.stores or not live.admitted:
            return
        done = computed + scheduled
        prompt = len(request.prompt_token_ids or [])
        whole = prompt // self.unit * self.unit
        if done >= whole and (live.offered is None or live.offered < whole):
            # the rounded prompt is complete with this step, or again: streaming input adds parts to it
            held = self._stored(self._keys(self.tokens(request), 0, whole)) * self.unit
            live.offered = whole
            if held < whole or (whole == 0 and self.empty_entries):
                metadata.requests.append(self._transfer(live, held, whole, is_store=True))
        if live.offered is not None and self.save_decode:
            whole = min(done, len(request.all_token_ids)) // self.unit * self.unit
            if whole > live.offered:
                metadata.requests.append(self._transfer(live, live.offered, whole, is_store=True))
                live.offered = whole

    def _transfer(self, live: _Live, start: int, end: int, is_store: bool) -> Transfer:
        blocks = torch.tensor(live.block_ids)
        slots = blocks[:, None] * self.block_size + torch.arange(self.block_size)[None, :]
        return Transfer(
            req_id=live.request.request_id,
            start=start,
            num_tokens=end - start,
            slot_mapping=slots.flatten()[start:end],
            keys=self._keys(self.tokens(live.request), start, end),
            is_store=is_store,
        )

    def tokens(self, request: Request) -> Sequence[int]:
        """What the keys of a request are made of."""
        return request.all_token_ids

    def _keys(self, token_ids: Any, start: int, end: int) -> list[str]:
        """Keys of the units that [start, end) touches; a unit's key covers all tokens before it."""
        keys = []
        key = b""
        for at in range(0, end, self.unit):
            part = torch.tensor(list(token_ids[at : at + self.unit]), dtype=torch.int64)
            key = hashlib.sha256(key + part.numpy().tobytes()).digest()
            if at + self.unit > start:
                keys.append(key.hex()[:32])
        return keys

    def _stored(self, keys: list[str]) -> int:
        """How many leading keys are in the store, in all layers and ranks."""
        for n, key in enumerate(keys):
            if not all(self._file(key, self.last_layer, rank).exists() for rank in range(self.ranks)):
                return n
        return len(keys)
