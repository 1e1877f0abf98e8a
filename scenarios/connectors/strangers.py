"""Connectors of other people's making: nothing in them is shared with :mod:`chunk_store`.

Other class names, other words in the metadata, other files (one ``.npy`` a layer and prompt), other
places where the work is done. They stand for the connectors that nobody here has seen: a rule that
holds for :class:`chunk_store.ChunkStore` alone shows on these. Nothing here knows of kvtrace.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from chunk_store import by_block
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

log = logging.getLogger("strangers")
log.addHandler(logging.NullHandler())
log.propagate = False


def option(config: VllmConfig, name: str, default: Any) -> Any:
    assert config.kv_transfer_config is not None
    return config.kv_transfer_config.get_from_extra_config(name, default)


class Timetable:
    """Scheduler side: where each prompt lies, and which ones are complete with a step."""

    def __init__(self) -> None:
        self.pages: dict[str, list[int]] = {}
        self.length: dict[str, int] = {}

    def due(self, output: SchedulerOutput) -> Iterator[tuple[str, int, list[int]]]:
        scheduled = output.num_scheduled_tokens
        moved = []
        for new in output.scheduled_new_reqs:
            self.pages[new.req_id] = list(new.block_ids[0])
            self.length[new.req_id] = len(new.prompt_token_ids or ())
            moved.append((new.req_id, new.num_computed_tokens))
        cached = output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            fresh = cached.new_block_ids[i]
            if fresh is not None:
                self.pages[name].extend(fresh[0])
            moved.append((name, cached.num_computed_tokens[i]))
        for name, before in moved:
            if before < self.length[name] <= before + scheduled[name]:
                yield name, self.length[name], self.pages[name]

    def forget(self, name: str) -> None:
        self.pages.pop(name, None)
        self.length.pop(name, None)


class Shelf:
    """Worker side: one array a layer and prompt, rows are tokens."""

    def __init__(self, place: str) -> None:
        self.place = Path(place)

    def put(self, name: str, layer: str, rows: torch.Tensor) -> None:
        folder = self.place / layer
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{name}.npy", rows.detach().to("cpu").contiguous().numpy())


def rows_of(kv: torch.Tensor, pages: Any, tokens: int) -> torch.Tensor:
    """The first ``tokens`` rows of some blocks of a layer."""
    picked = by_block(kv)[torch.as_tensor(np.asarray(pages, dtype=np.int64))]
    return picked.transpose(1, 2).flatten(0, 1)[:tokens]


class Stranger(KVConnectorBase_V1):
    """Loads nothing; what is stored, and how it is written down, is each class's own business."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.times = Timetable()
        self.shelf = Shelf(option(vllm_config, "shelf", ""))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        pass

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self.times.forget(request.request_id)
        return False, None


# --- a list of jobs, numpy pages, "upto" -----------------------------------------------------


@dataclass
class Job:
    rid: str
    upto: int
    put: bool
    pages: np.ndarray


@dataclass
class Sack(KVConnectorMetadata):
    work: list[Job] = field(default_factory=list)


class PostOffice(Stranger):
    """Posts whole parcels of ``parcel`` tokens; a prompt below one has no job at all.

    With ``publish`` off it takes part and posts nothing.
    """

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.parcel = int(option(vllm_config, "parcel", 1))
        self.publish = bool(option(vllm_config, "publish", True))
        self.window = 4096

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        sack = Sack()
        for name, tokens, pages in self.times.due(scheduler_output):
            whole = tokens // self.parcel * self.parcel
            if whole and self.publish:
                sack.work.append(Job(name, whole, True, np.array(pages)))
        return sack

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if not self.has_connector_metadata():
            return
        sack = self._get_connector_metadata()
        assert isinstance(sack, Sack)
        for job in sack.work:
            if job.put:
                self.shelf.put(job.rid, layer_name, rows_of(kv_layer, job.pages, job.upto))


class ShyPostOffice(PostOffice):
    """Its post boxes are full, and it keeps that to itself: an error class of its own, caught a call up."""

    class BoxFull(Exception):
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        try:
            self._find_box(layer_name)
        except ShyPostOffice.BoxFull:
            return
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def _find_box(self, layer_name: str) -> None:
        raise ShyPostOffice.BoxFull(f"no box left for {layer_name}")


class SlowPostOffice(PostOffice):
    """Posts a step later, before anything else is done in it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pile: list[Job] = []
        self.caches: dict[str, torch.Tensor] = {}

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for job in self.pile:
            for layer_name, kv in self.caches.items():
                self.shelf.put(job.rid, layer_name, rows_of(kv, job.pages, job.upto))
        self.pile.clear()

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass

    def wait_for_save(self) -> None:
        sack = self._get_connector_metadata()
        assert isinstance(sack, Sack)
        self.pile += [job for job in sack.work if job.put]


# --- a dictionary of named tuples, positions as (from, to) -------------------------------------


class Parcel(NamedTuple):
    span: tuple[int, int]
    where: tuple[int, ...]
    action: str


class Customs(Stranger):
    """The metadata is a plain dictionary: request to named tuple."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Any:
        return {
            name: Parcel((0, tokens), tuple(pages), "dump")
            for name, tokens, pages in self.times.due(scheduler_output)
        }

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        declared: Any = self._get_connector_metadata()
        for name, parcel in declared.items():
            if parcel.action == "dump":
                self.shelf.put(name, layer_name, rows_of(kv_layer, parcel.where, parcel.span[1]))


# --- objects in objects, all with __slots__ ------------------------------------------------------


class Wagon:
    __slots__ = ("begin", "cargo", "end", "passenger", "unloads")

    def __init__(self, passenger: str, end: int, cargo: list[list[int]]) -> None:
        self.passenger = passenger
        self.begin = 0
        self.end = end
        self.cargo = cargo
        self.unloads = False


class Train:
    __slots__ = ("outbound",)

    def __init__(self) -> None:
        self.outbound: list[Wagon] = []


class Track(KVConnectorMetadata):
    __slots__ = ("number", "train")

    def __init__(self) -> None:
        self.train = Train()
        self.number = 7


class Railway(Stranger):
    """What goes out is what it saves; no word for it that anybody else would use."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        track = Track()
        for name, tokens, pages in self.times.due(scheduler_output):
            track.train.outbound.append(Wagon(name, tokens, [pages]))
        return track

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        track = self._get_connector_metadata()
        assert isinstance(track, Track)
        for wagon in track.train.outbound:
            self.shelf.put(wagon.passenger, layer_name, rows_of(kv_layer, wagon.cargo[0], wagon.end))


# --- nothing in the metadata: the worker decides -------------------------------------------------


class Nothing(KVConnectorMetadata):
    pass


class Mute(Stranger):
    """Tells its worker nothing. The worker takes what the attention's own metadata says was computed,
    in whole ``portion`` tokens a prompt."""

    def __init__(self, vllm_config: VllmConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        self.portion = int(option(vllm_config, "portion", 1))
        self.served = 0

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return Nothing()

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        bounds = attn_metadata.query_start_loc.tolist()
        kv = by_block(kv_layer)
        size = kv.shape[2]
        for first, last in pairwise(bounds):
            whole = (last - first) // self.portion * self.portion
            if whole:
                slots = attn_metadata.slot_mapping[first : first + whole]
                self.served += 1
                self.shelf.put(f"{self.served}", layer_name, kv[slots // size, :, slots % size])


class Outdated(Mute):
    """Written for a vLLM whose attention metadata had another field; without it there is nothing to do."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        if getattr(attn_metadata, "slot_mapping_tensor", None) is not None:
            super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)


# --- a thread of its own -------------------------------------------------------------------------


@dataclass
class Shift(KVConnectorMetadata):
    to_copy: dict[str, list[int]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)


class NightShift(Stranger):
    """``wait_for_save`` hands everything to a thread; the blocks are held until that is through."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, role, *args, **kwargs)
        self.caches: dict[str, torch.Tensor] = {}
        self.jobs: queue.Queue[tuple[str, list[int], int] | None] = queue.Queue()
        if role == KVConnectorRole.WORKER:
            self.clerk = threading.Thread(target=self._work, daemon=True)
            self.clerk.start()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        shift = Shift()
        for name, tokens, pages in self.times.due(scheduler_output):
            shift.to_copy[name] = list(pages)
            shift.lengths[name] = tokens
        return shift

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass

    def wait_for_save(self) -> None:
        shift = self._get_connector_metadata()
        assert isinstance(shift, Shift)
        for name, pages in shift.to_copy.items():
            self.jobs.put((name, pages, shift.lengths[name]))

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        super().request_finished(request, block_ids)
        return True, None

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if finished_req_ids:
            self.jobs.join()
        return set(finished_req_ids), None

    def shutdown(self) -> None:
        self.jobs.put(None)

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            try:
                self._copy(*job)
            finally:
                self.jobs.task_done()

    def _copy(self, name: str, pages: list[int], tokens: int) -> None:
        for layer_name, kv in self.caches.items():
            self.shelf.put(name, layer_name, rows_of(kv, pages, tokens))


class DrowsyShift(NightShift):
    """Its thread meets a full disk, logs that where nobody looks, and takes the next job."""

    def _copy(self, name: str, pages: list[int], tokens: int) -> None:
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            log.warning("copy of %s failed: %s", name, error)


# --- wrappers around wrappers --------------------------------------------------------------------


class Meter:
    """Counts the calls of whatever it holds; no connector itself."""

    def __init__(self, held: Any) -> None:
        self._held = held
        self._calls: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        self._calls[name] = self._calls.get(name, 0) + 1
        return getattr(self._held, name)


class Envelope(KVConnectorBase_V1):
    """A connector around a meter around a connector, which does the work."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.letter = Meter(PostOffice(vllm_config, role, kv_cache_config))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self.letter.bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self.letter.clear_connector_metadata()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.letter.register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.letter.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.letter.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self.letter.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        self.letter.wait_for_save()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        answer: tuple[int | None, bool] = self.letter.get_num_new_matched_tokens(request, num_computed_tokens)
        return answer

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.letter.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        metadata: KVConnectorMetadata = self.letter.build_connector_meta(scheduler_output)
        return metadata

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        answer: tuple[bool, dict[str, Any] | None] = self.letter.request_finished(request, block_ids)
        return answer


class EmptyEnvelope(Envelope):
    """Forgets to hand ``save_kv_layer`` on."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass


class UnaddressedEnvelope(Envelope):
    """Keeps the metadata for itself: what it holds never gets any, and takes that for an empty step."""

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        KVConnectorBase_V1.bind_connector_metadata(self, connector_metadata)
