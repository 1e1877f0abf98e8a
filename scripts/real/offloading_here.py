"""The host memory of vLLM's OffloadingConnector without a GPU: streams, events and the copy are replaced.

Its scheduler, its worker, when what is copied from where to where are its own; the copy itself is vLLM's op
``swap_blocks_batch`` by address, which the CPU build does not have. At its end the worker writes how many of
its blocks hold something to the file that the option ``count_file`` names.
"""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from no_device import Stream, Torch, stream
from vllm.v1.kv_offload.cpu import gpu_worker, spec

_OPS = torch.library.Library("_C_cache_ops", "FRAGMENT")
_OPS.define(
    "swap_blocks_batch(Tensor src_ptrs, Tensor dst_ptrs, Tensor sizes, bool is_src_access_order_any) -> ()"
)


@torch.library.impl(_OPS, "swap_blocks_batch", "CPU")
def _copy(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor, _: bool) -> None:
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


class _OnDevice(torch.Tensor):
    """The KV cache as the worker checks it: on a GPU."""

    is_cuda = True


gpu_worker.torch = Torch("torch")
gpu_worker.current_platform = SimpleNamespace(
    Stream=Stream, current_stream=Stream, stream=stream, is_xpu=lambda: False, is_rocm=lambda: False
)


class _Worker(gpu_worker.CPUOffloadingWorker):  # type: ignore[misc]
    count_file = ""

    def shutdown(self) -> None:
        held = [cache.ne(0).any(dim=1) for cache in self._store_handler.dst_tensors]
        if held:
            count = int(torch.stack(held).all(dim=0).sum())
            Path(self.count_file).write_text(json.dumps(count), encoding="utf-8")
        super().shutdown()


class HostSpec(spec.CPUOffloadingSpec):  # type: ignore[misc]
    def get_worker(self, kv_caches: Any) -> Any:
        if self._worker is None:
            for one in kv_caches.tensors:
                one.tensor = one.tensor.as_subclass(_OnDevice)
            self._worker = _Worker(kv_caches, self.blocks_per_chunk, self.num_chunks)
            self._worker.count_file = self.extra_config["count_file"]
        return self._worker
