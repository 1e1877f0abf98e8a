"""ChunkStore with one thing wrong on the way of a save, as it happens in connectors of teams.

Each class differs from :class:`chunk_store.ChunkStore` in one place; nothing here knows of kvtrace.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from chunk_store import ChunkStore, ChunkStoreMetadata, Transfer, logger
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class EmptyStore(ChunkStore):
    """Takes the slots of the padding instead of the prompt's: its files are there, and empty."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        for transfer in self.plan().requests:
            if not transfer.is_store:
                continue
            blocks, offsets = self._where(transfer.slot_mapping[transfer.num_tokens :], kv_layer)
            rows = kv_layer[blocks, :, offsets].detach().cpu()
            for key in transfer.keys:
                self._write(self._file(key, layer_name), rows)


class ShortStore(ChunkStore):
    """Stores the first half of each prompt's units and takes it for the whole."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        for transfer in self.plan().requests:
            if not transfer.is_store:
                continue
            half = len(transfer.keys) // 2
            blocks, offsets = self._where(transfer.slot_mapping[: half * self.unit], kv_layer)
            rows = kv_layer[blocks, :, offsets].detach().cpu()
            for i, key in enumerate(transfer.keys[:half]):
                self._write(
                    self._file(key, layer_name), rows[i * self.unit : (i + 1) * self.unit].contiguous()
                )


class CarefulStore(ChunkStore):
    """Never lets a failed save disturb the engine; ``quota`` bytes are all that its backend takes."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        try:
            super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
        except Exception:
            logger.debug("save of %s failed", layer_name)

    @staticmethod
    def _write(path: Path, rows: torch.Tensor) -> None:
        raise OSError(122, "Disk quota exceeded")


class RaisingStore(ChunkStore):
    """A backend that takes the first layer only, and nobody catches its error."""

    def _write(self, path: Path, rows: torch.Tensor) -> None:  # type: ignore[override]
        if ".layers.0." in path.name:
            return ChunkStore._write(path, rows)
        raise OSError(122, "Disk quota exceeded")


class ForgetfulStore(ChunkStore):
    """Does not know of preemptions: a resumed request is none of the new ones."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, ChunkStoreMetadata)
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        for req_id in resumed:
            self._live[req_id].admitted = False
        metadata.requests = [item for item in metadata.requests if item.req_id not in resumed]
        return metadata


class WaitStore(ChunkStore):
    """Copies all layers at once, in ``wait_for_save``."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return

    def wait_for_save(self) -> None:
        for layer_name, kv_layer in self.caches.items():
            ChunkStore.save_kv_layer(self, layer_name, kv_layer, None)


class LateStore(ChunkStore):
    """Hands each prompt over one step after it is complete: with an answer of one token there is no
    forward any more."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._late: list[Transfer] = []

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        assert isinstance(metadata, ChunkStoreMetadata)
        self._late, metadata.requests = metadata.requests, self._late
        return metadata


class UnfinishedStore(WaitStore):
    """Keeps the blocks until its saves are through, and forgets to tell of every third one."""

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        super().request_finished(request, block_ids)
        return True, None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        told = set()
        for req_id in sorted(finished_req_ids):
            self._met += 1
            if self._met % 3:
                told.add(req_id)
        return told, None


class FinishedStore(UnfinishedStore):
    """The healthy twin: tells of each."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return set(finished_req_ids), None


class DisabledStore(ChunkStore):
    """Wants to be told its endpoint, and without one does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.endpoint = self._kv_transfer_config.get_from_extra_config("endpoint", None)
        self._said = False

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if self.endpoint is not None:
            return super().build_connector_meta(scheduler_output)
        if not self._said:
            self._said = True
            logger.warning("DisabledStore: no endpoint given, storing is disabled")
        return ChunkStoreMetadata()


class SlowStore(ChunkStore):
    """A backend that takes ``layer_delay`` seconds a layer and ``step_delay`` seconds a step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        option = self._kv_transfer_config.get_from_extra_config
        self.layer_delay = float(option("layer_delay", 0))
        self.step_delay = float(option("step_delay", 0))

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
        time.sleep(self.layer_delay)

    def wait_for_save(self) -> None:
        time.sleep(self.step_delay)


class CollidingStore(ChunkStore):
    """Forgets the tokens in its keys: all prompts have the same, and it never looks before it writes."""

    def _keys(self, token_ids: Any, start: int, end: int) -> list[str]:
        return [f"unit-{at // self.unit}" for at in range(start, end, self.unit)]

    def _stored(self, keys: list[str]) -> int:
        return 0
