"""vLLM's own SimpleCPUOffloadConnector without a GPU: the device copy, its streams and events are replaced.

At its end the worker writes how many of its blocks hold something to the file that the option ``count_file``
names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from no_device import Torch
from vllm.distributed.kv_transfer.kv_connector.v1 import simple_cpu_offload_connector as connector
from vllm.v1.simple_kv_offload import copy_backend, worker


def _pairs(source: dict[str, Any], target: dict[str, Any], *_: Any, **__: Any) -> list[tuple[Any, Any]]:
    return [(source[name], target[name]) for name in source]


def _copy(source: list[int], target: list[int], pairs: list[tuple[Any, Any]]) -> None:
    for there, here in pairs:
        here[torch.tensor(target)] = there[torch.tensor(source)]


copy_backend.torch = worker.torch = Torch("torch")
copy_backend.build_params = _pairs
copy_backend.copy_blocks = _copy
copy_backend.current_platform.set_device = lambda *_: None


class OffloadHere(connector.SimpleCPUOffloadConnector):  # type: ignore[misc]
    def shutdown(self) -> None:
        side = self.worker_handler
        if side is not None:
            held = [cache.view(len(cache), -1).ne(0).any(dim=1) for cache in side.cpu_kv_caches.values()]
            file = self._kv_transfer_config.kv_connector_extra_config["count_file"]
            Path(file).write_text(json.dumps(int(torch.stack(held).all(dim=0).sum())), encoding="utf-8")
        super().shutdown()
