"""Stores that load wrongly, each in one way that people met, and one that loads asynchronously and well.

All are :class:`ChunkStore` with one thing changed. Nothing here knows of kvtrace.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from chunk_store import ChunkStore, ChunkStoreMetadata, Transfer, by_block
from safetensors.torch import load_file
from saves import WaitStore
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.loads")


class StoreAgain(ChunkStore):
    """Stores a prompt each time that it is computed, also where it holds it."""

    def _offer(self, metadata: ChunkStoreMetadata, live: Any, computed: int, scheduled: int) -> None:
        self._storing = True
        try:
            super()._offer(metadata, live, computed, scheduled)
        finally:
            self._storing = False

    def _stored(self, keys: list[str]) -> int:
        return 0 if getattr(self, "_storing", False) else super()._stored(keys)


class SoundStore(ChunkStore):
    """Tells sounds and images apart: their placeholders are the same tokens."""

    def tokens(self, request: Request) -> Sequence[int]:
        found = list(super().tokens(request))
        for feature in request.mm_features:
            place = feature.mm_position
            digest = hashlib.sha256(feature.identifier.encode()).digest()
            number = int.from_bytes(digest[:7], "little")
            found[place.offset : place.offset + place.length] = range(number, number + place.length)
        return found


class FailingLoads(ChunkStore):
    """The second half of each load fails, and the connector says which blocks that are."""

    _failed: set[int]

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._failed = set()
        for transfer in self.plan().requests:
            if not transfer.is_store:
                blocks = (transfer.slot_mapping // self.block_size).unique(sorted=False).tolist()
                half = sorted(set(transfer.slot_mapping[(transfer.num_tokens + 1) // 2 :].tolist()))
                bad = {slot // self.block_size for slot in half}
                self._failed |= bad & set(blocks)
        super().start_load_kv(forward_context, **kwargs)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = getattr(self, "_failed", set()), set()
        return failed


class HalfUnits(ChunkStore):
    """Promises every stored token, and loads whole units only."""

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        for transfer in self.plan().requests:
            if not transfer.is_store:
                whole = transfer.num_tokens // self.unit * self.unit
                transfer.slot_mapping = transfer.slot_mapping[:whole]
                transfer.num_tokens = whole
        super().start_load_kv(forward_context, **kwargs)


class FirstUnitAgain(ChunkStore):
    """Reads the first unit of a prompt for each of its units."""

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        for transfer in self.plan().requests:
            if not transfer.is_store:
                transfer.keys = transfer.keys[:1] * len(transfer.keys)
        super().start_load_kv(forward_context, **kwargs)


class AsyncLoads(ChunkStore):
    """Loads before the request is scheduled, and says so when it is done."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tokens, _ = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens > 0:
            self._live[request.request_id].block_ids = list(blocks.get_block_ids()[0])

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        loads = [self._transfer(self._live[req_id], 0, count, is_store=False)
                 for req_id, count in self._to_load.items() if req_id in self._live]  # fmt: skip
        self._to_load.clear()
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, ChunkStoreMetadata)
        metadata.requests.extend(loads)
        return metadata

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        self._report([transfer for transfer in self.plan().requests if not transfer.is_store])

    def _report(self, loads: list[Transfer]) -> None:
        self._loaded = getattr(self, "_loaded", set()) | {transfer.req_id for transfer in loads}

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        loaded, self._loaded = getattr(self, "_loaded", set()), set()
        return None, loaded or None


class SlowLoads(AsyncLoads):
    """A store far away: every load takes three seconds."""

    def _report(self, loads: list[Transfer]) -> None:
        self._due = {**getattr(self, "_due", {}), **{t.req_id: time.monotonic() + 3.0 for t in loads}}

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        time.sleep(0.01)
        due = getattr(self, "_due", {})
        loaded = {req_id for req_id, t in due.items() if t <= time.monotonic()}
        self._due = {req_id: t for req_id, t in due.items() if req_id not in loaded}
        return None, loaded or None


class LostLoads(AsyncLoads):
    """Forgets to report the loads of prompts longer than 200 tokens."""

    def _report(self, loads: list[Transfer]) -> None:
        super()._report([transfer for transfer in loads if transfer.num_tokens <= 200])


class EarlyReturn(AsyncLoads):
    """Loads nothing in a step without a forward, and reports the request as loaded all the same."""

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if forward_context.attn_metadata is None:
            loads = [transfer for transfer in self.plan().requests if not transfer.is_store]
            if loads:
                logger.warning("In connector.start_load_kv, but the attn_metadata is None")
            self._report(loads)
            return
        super().start_load_kv(forward_context, **kwargs)


class LayerwiseLoads(WaitStore):
    """Loads a layer when its attention is about to need it; saves all layers at the end of the step."""

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        kv_layer = by_block(self.caches[layer_name])
        for transfer in self.plan().requests:
            if not transfer.is_store:
                rows = torch.cat([load_file(self._file(key, layer_name))["kv"] for key in transfer.keys])
                first = transfer.start % self.unit
                blocks, offsets = self._where(transfer.slot_mapping, kv_layer)
                kv_layer[blocks, :, offsets] = rows[first : first + transfer.num_tokens].to(kv_layer.device)
