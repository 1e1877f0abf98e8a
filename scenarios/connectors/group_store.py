"""A KV store on disk for models whose layers do not all keep the same: several groups, states, latents.

It takes part in vLLM's hybrid KV cache manager (``SupportsHMA``): each layer is saved by the block ids of its
own KV cache group. A prompt is stored whole, chunk by chunk as it is computed:

- attention layers in ``save_kv_layer``, the tokens of the step: one file a chunk and layer. Blocks that a
  sliding window has left already (the null block) are left out.
- layers with a state (Mamba, linear attention) get no ``save_kv_layer`` from vLLM. Their state after the
  whole prompt is copied in ``wait_for_save``: one file a layer. It belongs to exactly that length.

A prompt that begins with a stored one gets all of it loaded, tokens and states; of itself it stores what
comes after, and the name of that one. Written for vLLM 0.32 (KV layers are views of [blocks, heads, block
size, 2 x head size], latents of [blocks, block size, latent]).

Nothing here knows of kvtrace. Option (``kv_connector_extra_config``): ``path``, the directory of the store.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import AttentionSpec, CrossAttentionSpec, MambaSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

_NULL = 0
_WHOLE = "whole"


@dataclass
class Piece:
    """Tokens [start, end) of one request, to store or to load."""

    req_id: str
    key: str
    start: int
    end: int
    block_ids: tuple[list[int], ...]
    """Of each KV cache group, in order of position."""
    is_store: bool
    last: bool = False
    """The prompt is complete with it."""
    before: str = ""
    """Of a store: the key of the stored prompt that it goes on from, "" for none."""


@dataclass
class GroupStoreMetadata(KVConnectorMetadata):
    pieces: list[Piece] = field(default_factory=list)


@dataclass
class _Live:
    request: Request
    key: str
    block_ids: tuple[list[int], ...] = ()
    offered: int = 0
    before: str = ""


class GroupStore(KVConnectorBase_V1, SupportsHMA):
    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.path = Path(self._kv_transfer_config.get_from_extra_config("path", None) or "")
        if not self.path.is_absolute():
            raise ValueError('GroupStore: kv_connector_extra_config["path"] must be an absolute path')
        self.groups = kv_cache_config.kv_cache_groups
        self.group_of = {name: i for i, group in enumerate(self.groups) for name in group.layer_names}
        self._live: dict[str, _Live] = {}
        self._to_load: dict[str, int] = {}
        self._caches: dict[str, Any] = {}
        for group in self.groups:
            spec = group.kv_cache_spec
            if isinstance(spec, MambaSpec) and spec.mamba_cache_mode != "none":
                raise ValueError("GroupStore: one state a request only: turn prefix caching off")
        self.path.mkdir(parents=True, exist_ok=True)

    # ---- worker ----

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = kv_caches

    def plan(self) -> list[Piece]:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, GroupStoreMetadata)
        return metadata.pieces

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        for piece in self.plan():
            if piece.is_store:
                continue
            for layer_name, cache in self._own_caches():
                if self._keeps_state(layer_name):
                    kept = load_file(self.path / piece.key / layer_name / "state.safetensors")
                    for i, tensor in enumerate(self._states(cache)):
                        tensor[self._state_block(piece, layer_name)] = kept[f"state{i}"]
                    continue
                for file in self._files(piece.key, layer_name):
                    rows = load_file(file)["kv"]
                    end = int(file.stem.partition("-")[2])
                    at = torch.arange(end - len(rows), end)
                    inside = (at >= piece.start) & (at < piece.end)
                    slots = self._slots(piece, layer_name)[at[inside]]
                    self._put(cache, slots[slots >= 0], rows[inside][slots >= 0])

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if not self._owns(layer_name):
            return
        for piece in self.plan():
            if piece.is_store:
                slots = self._slots(piece, layer_name)[piece.start : piece.end]
                # what a window has left comes first: the rows are the last ones of the piece
                rows = self._take(kv_layer, slots[slots >= 0])
                self._write(piece, layer_name, f"{piece.start}-{piece.end}", {"kv": rows})

    def wait_for_save(self) -> None:
        for piece in self.plan():
            if not (piece.is_store and piece.last):
                continue
            for layer_name, cache in self._own_caches():
                if self._keeps_state(layer_name):
                    block = self._state_block(piece, layer_name)
                    kept = enumerate(self._states(cache))
                    state = {f"state{i}": one[block].clone().contiguous() for i, one in kept}
                    self._write(piece, layer_name, "state", state)
            (self.path / piece.key).mkdir(parents=True, exist_ok=True)
            (self.path / piece.key / _WHOLE).write_text(piece.before, encoding="utf-8")

    def _own_caches(self) -> list[tuple[str, Any]]:
        return [(name, cache) for name, cache in self._caches.items() if self._owns(name)]

    def _files(self, key: str, layer_name: str) -> Iterator[Path]:
        """Of a stored prompt, and of those that it goes on from."""
        while key:
            yield from (self.path / key / layer_name).glob("*-*.safetensors")
            key = (self.path / key / _WHOLE).read_text(encoding="utf-8")

    def _owns(self, layer_name: str) -> bool:
        """Whether it keeps KV of its own tokens, none of another layer or of the encoder's output."""
        group = self.group_of.get(layer_name)
        return group is not None and not isinstance(self.groups[group].kv_cache_spec, CrossAttentionSpec)

    def _keeps_state(self, layer_name: str) -> bool:
        return not isinstance(self.groups[self.group_of[layer_name]].kv_cache_spec, AttentionSpec)

    @staticmethod
    def _states(cache: Any) -> list[torch.Tensor]:
        return list(cache) if isinstance(cache, (list, tuple)) else [cache]

    def _blocks(self, piece: Piece, layer_name: str) -> list[int]:
        return piece.block_ids[self.group_of[layer_name]]

    def _state_block(self, piece: Piece, layer_name: str) -> int:
        return self._blocks(piece, layer_name)[0]

    def _slots(self, piece: Piece, layer_name: str) -> torch.Tensor:
        """The slot of each position in the layer's cache; negative where the request has none."""
        size = self.groups[self.group_of[layer_name]].kv_cache_spec.block_size
        blocks = torch.tensor(self._blocks(piece, layer_name))
        slots = blocks[:, None] * size + torch.arange(size)[None, :]
        slots[blocks == _NULL] = -1
        return slots.flatten()

    @staticmethod
    def _index(cache: torch.Tensor, slots: torch.Tensor) -> tuple[Any, ...]:
        """A block of the kernel may be smaller than one of the KV cache manager."""
        size = cache.shape[-2]
        block, offset = slots // size, slots % size
        return (block, offset) if cache.dim() == 3 else (block, slice(None), offset)

    def _take(self, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return cache[self._index(cache, slots)].detach().cpu().contiguous()

    def _put(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        at = self._index(cache, slots)
        cache[at] = rows.to(cache.device).reshape(cache[at].shape)

    def _write(self, piece: Piece, layer_name: str, name: str, tensors: dict[str, torch.Tensor]) -> None:
        folder = self.path / piece.key / layer_name
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{name}.{os.getpid()}.part"
        save_file(tensors, part)
        part.replace(folder / f"{name}.safetensors")

    # ---- scheduler ----

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        held = self._held(list(request.prompt_token_ids or []))
        return max(0, held - num_computed_tokens), False

    def _held(self, tokens: list[int]) -> int:
        """Length of the longest stored prompt that this one goes on from."""
        lengths = {int(entry.name.partition("-")[0]) for entry in self.path.iterdir()}
        for length in sorted(lengths, reverse=True):
            if length < len(tokens) and (self.path / key_of(tokens[:length]) / _WHOLE).exists():
                return length
        return 0

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if request.request_id not in self._live:
            key = key_of(list(request.prompt_token_ids or []))
            self._live[request.request_id] = _Live(request, key)
        if num_external_tokens > 0:
            self._to_load[request.request_id] = num_external_tokens

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = GroupStoreMetadata()
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            live = self._live[new.req_id]
            live.block_ids = tuple(list(group) for group in new.block_ids)
            self._offer(metadata, live, new.num_computed_tokens, scheduled[new.req_id])
        cached = scheduler_output.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            live = self._live[req_id]
            given = cached.new_block_ids[i]
            if req_id in cached.resumed_req_ids:
                assert given is not None
                live.block_ids = tuple(list(group) for group in given)
                live.before, live.offered = "", 0
            elif given is not None:
                for have, more in zip(live.block_ids, given, strict=True):
                    have.extend(more)
            self._offer(metadata, live, cached.num_computed_tokens[i], scheduled[req_id])
        self._to_load.clear()
        return metadata

    def _offer(self, metadata: GroupStoreMetadata, live: _Live, computed: int, scheduled: int) -> None:
        """What this step shall load and store of one request."""
        prompt = list(live.request.prompt_token_ids or [])
        load = self._to_load.get(live.request.request_id, 0)
        if load:
            source = key_of(prompt[:computed])
            metadata.pieces.append(self._piece(live, source, computed - load, computed, is_store=False))
            live.before, live.offered = source, computed
        end = min(computed + scheduled, len(prompt))
        if live.offered < end:
            metadata.pieces.append(self._piece(live, live.key, live.offered, end, is_store=True))
            live.offered = end

    def _piece(self, live: _Live, key: str, start: int, end: int, is_store: bool) -> Piece:
        blocks = tuple(list(group) for group in live.block_ids)
        last = is_store and end == len(live.request.prompt_token_ids or [])
        before = live.before if is_store else ""
        return Piece(live.request.request_id, key, start, end, blocks, is_store, last, before)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._live.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])


def key_of(tokens: list[int]) -> str:
    """The length and the hash of a prompt's tokens."""
    told = torch.tensor(tokens, dtype=torch.int64).numpy().tobytes()
    return f"{len(tokens)}-{hashlib.sha256(told).hexdigest()[:32]}"


class FirstGroupStore(GroupStore):
    """Written when all layers shared a block table: takes the block ids of the first group for all."""

    def _blocks(self, piece: Piece, layer_name: str) -> list[int]:
        return piece.block_ids[0]


class FirstChunkGroupStore(GroupStore):
    """Meets each prompt as a new request only: what later steps compute of it is never offered."""

    def _offer(self, metadata: GroupStoreMetadata, live: _Live, computed: int, scheduled: int) -> None:
        if live.offered == 0:
            super()._offer(metadata, live, computed, scheduled)


class ShortGroupStore(GroupStore):
    """Takes the first half of each piece's slots for the whole."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        for piece in self.plan() if self._owns(layer_name) else ():
            if piece.is_store:
                middle = (piece.start + piece.end) // 2
                slots = self._slots(piece, layer_name)[piece.start : middle]
                rows = self._take(kv_layer, slots[slots >= 0])
                self._write(piece, layer_name, f"{piece.start}-{middle}", {"kv": rows})
