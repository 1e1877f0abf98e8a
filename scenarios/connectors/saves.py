"""ChunkStore with one thing wrong on the way of a save, as it happens in connectors of teams.

Each class differs from :class:`chunk_store.ChunkStore` in one place; nothing here knows of kvtrace.
"""

from __future__ import annotations

import shutil
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from chunk_store import ChunkStore, ChunkStoreMetadata, Transfer, _Live, by_block, logger
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
            rows = by_block(kv_layer)[blocks, :, offsets].detach().cpu()
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
            rows = by_block(kv_layer)[blocks, :, offsets].detach().cpu()
            for i, key in enumerate(transfer.keys[:half]):
                self._write(
                    self._file(key, layer_name), rows[i * self.unit : (i + 1) * self.unit].contiguous()
                )


class FirstPartStore(ChunkStore):
    """Offers a request once, as if its whole prompt came with it: later parts of a session are not stored."""

    def _offer(self, metadata: ChunkStoreMetadata, live: _Live, computed: int, scheduled: int) -> None:
        if live.offered is None:
            super()._offer(metadata, live, computed, scheduled)


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


class SilentPeerStore(ChunkStore):
    """Waits without a limit for a peer to confirm each step's saves; after ``answers`` of them none comes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.answers = int(self._kv_transfer_config.get_from_extra_config("answers", 0))
        self.here, self.peer = socket.socketpair()

    def wait_for_save(self) -> None:
        if not self._get_connector_metadata().requests:
            return
        if self.answers > 0:
            self.answers -= 1
            self.peer.send(b"1")
        self.here.recv(1)


class CollidingStore(ChunkStore):
    """Forgets the tokens in its keys: all prompts of one length have the same, and it never looks before it
    writes."""

    def _keys(self, token_ids: Any, start: int, end: int) -> list[str]:
        return [f"{at // self.unit}-of-{len(token_ids) // self.unit}" for at in range(start, end, self.unit)]

    def _stored(self, keys: list[str]) -> int:
        return 0


class EarlyStore(ChunkStore):
    """Copies when the step's metadata is bound: before its forward has computed the prompt."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        for layer_name, kv_layer in self.caches.items():
            super().save_kv_layer(layer_name, kv_layer, None)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        return


class ShiftedStore(ChunkStore):
    """Counts blocks from 1: it copies the block behind each of the prompt's."""

    def _where(self, slot_mapping: torch.Tensor, kv_layer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks, offsets = super()._where(slot_mapping, kv_layer)
        return blocks + 1, offsets


class RoundingStore(ChunkStore):
    """Sends KV through half precision on its way."""

    def _write(self, path: Path, rows: torch.Tensor) -> None:  # type: ignore[override]
        ChunkStore._write(path, rows.half().to(rows.dtype))


class RefusedStore(ChunkStore):
    """Puts to a server that is not there, and never tells anybody."""

    def _write(self, path: Path, rows: torch.Tensor) -> None:  # type: ignore[override]
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))  # bound, and never listens
            with socket.socket() as put:
                if put.connect_ex(nobody.getsockname()) == 0:
                    put.sendall(rows.numpy().tobytes())


class HollowStore(ChunkStore):
    """Makes a file for each unit and layer, and writes nothing into it."""

    @staticmethod
    def _write(path: Path, rows: torch.Tensor) -> None:
        path.parent.mkdir(exist_ok=True)
        path.with_suffix(".kv").open("wb").close()


class EvictingStore(ChunkStore):
    """Keeps as many units as ``keep`` says: the oldest make room."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._keep = int(self._kv_transfer_config.get_from_extra_config("keep", 4))
        self._held: dict[Path, None] = {}

    def _write(self, path: Path, rows: torch.Tensor) -> None:  # type: ignore[override]
        ChunkStore._write(path, rows)
        self._held[path.parent] = None
        while len(self._held) > self._keep:
            oldest = next(iter(self._held))
            del self._held[oldest]
            for file in oldest.iterdir():
                file.unlink()


class ForgettingStore(ChunkStore):
    """Forgets all it stored when vLLM asks for it."""

    def reset_cache(self) -> bool:
        for unit in self.path.iterdir():
            shutil.rmtree(unit)
        return True


class DownStore(ChunkStore):
    """Its backend is down, and it never lets that disturb anybody."""

    def _write(self, path: Path, rows: torch.Tensor) -> None:  # type: ignore[override]
        try:
            raise ConnectionRefusedError(111, "Connection refused")
        except OSError:
            logger.debug("store of %s failed", path.name)
