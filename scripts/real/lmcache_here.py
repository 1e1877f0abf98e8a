"""LMCache beside this vLLM's CPU build: the copy between the KV cache and its chunks is replaced.

LMCache has such copies for GPUs only. What it stores, when, under which key, in which backend and thread is
its own.

It is imported as late as can be: vLLM's CPU build looks through all modules when a worker begins, and fails
at what LMCache brings (``vllm.triton_utils.dispatcher``, AttributeError).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import LMCacheConnectorV1


class HostCopies:
    """A chunk: [K or V, layer, token, heads x size]; a layer here: [block, head, slot, K beside V]."""

    def __init__(self, metadata: Any) -> None:
        self._layers, _, _, heads, size = metadata.kv_shape
        self._width = heads * size

    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
        return

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, self._layers, num_tokens, self._width])

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        slots = kwargs["slot_mapping"][start:end]
        for layer, kv in enumerate(kwargs["kvcaches"]):
            _, heads, block, width = kv.shape
            rows = kv[slots // block, :, slots % block].view(end - start, heads, 2, width // 2)
            memory_obj.tensor[:, layer] = rows.permute(2, 0, 1, 3).reshape(2, end - start, -1)

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        slots = kwargs["slot_mapping"][start:end]
        for layer, kv in enumerate(kwargs["kvcaches"]):
            _, heads, block, width = kv.shape
            rows = memory_obj.tensor[:, layer].view(2, end - start, heads, width // 2).permute(1, 2, 0, 3)
            kv[slots // block, :, slots % block] = rows.reshape(end - start, heads, width)

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **kwargs: Any) -> None:
        for one, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(one, start, end, **kwargs)

    def batched_to_gpu(
        self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **kwargs: Any
    ) -> None:
        for one, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(one, start, end, **kwargs)


class LMCacheHere(LMCacheConnectorV1):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        import lmcache.v1.gpu_connector as copies  # type: ignore

        copies.CreateGPUConnector = lambda config, metadata, *_, **__: HostCopies(metadata)
        super().__init__(*args, **kwargs)

    def shutdown(self) -> None:
        """vLLM's class does not pass it on: LMCache's threads would keep a process with the engine in it."""
        self._lmcache_engine.shutdown()
