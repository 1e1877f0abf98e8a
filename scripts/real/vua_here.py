"""Lets the connector of the thread that kvtrace began with (VUA at 3eb853e, for vLLM 0.9 and CUDA) run on
vLLM 0.32's CPU build, without a change to its source, which is no part of this repository.

What stands between it and vLLM: modules that are gone, the batch of running requests (a list then, one object
now), a loader that needs a GPU, and the layout of the KV cache (K and V of all slots then, a block's heads
with K beside V here). What it stores, when, under which key and in which thread is its own.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import vllm.utils
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1


class Rows:
    """``kv.reshape(2, slots, -1)`` of the layout that it expects: [K or V, slot, heads x size]."""

    def __init__(self, kv: torch.Tensor) -> None:
        self._kv = kv
        self._block = kv.shape[2]

    def _at(self, slots: torch.Tensor) -> tuple[Any, ...]:
        return slots // self._block, slice(None), slots % self._block

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows = self._kv[self._at(index[1])]
        count, heads, width = rows.shape
        return (
            rows.view(count, heads, 2, width // 2).permute(2, 0, 1, 3).reshape(2, count, heads * width // 2)
        )

    def __setitem__(self, index: Any, value: torch.Tensor) -> None:
        _, heads, _, width = self._kv.shape
        rows = value.view(2, -1, heads, width // 2).permute(1, 2, 0, 3)
        self._kv[self._at(index[1])] = rows.reshape(-1, heads, width)

    def reshape(self, *_: Any) -> Rows:
        return self


class Pages:
    """A layer's KV cache with the shape that it expects; ``kv`` is [blocks, heads, block, 2 x size]."""

    def __init__(self, kv: torch.Tensor) -> None:
        blocks, heads, block, width = kv.shape
        self._kv = kv
        self.shape = (2, blocks, block, heads, width // 2)

    def reshape(self, *_: Any) -> Rows:
        return Rows(self._kv)


class Loader:
    """Reads safetensors files on the CPU, with the calls of a loader that reads them into a GPU."""

    def __init__(self, *_: Any) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

    def add_filenames(self, names: dict[int, list[str]]) -> None:
        from safetensors.torch import load_file

        for name in itertools.chain.from_iterable(names.values()):
            self._tensors.update(load_file(name))

    def copy_files_to_device(self) -> Loader:
        return self

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def close(self) -> None:
        return


def _batched(items: Iterable[Any], size: int) -> Iterator[tuple[Any, ...]]:
    left = iter(items)
    while batch := tuple(itertools.islice(left, size)):
        yield batch


def _stand_in(name: str, **contents: Any) -> None:
    try:
        importlib.import_module(name)
    except ImportError:
        module = ModuleType(name)
        module.__dict__.update(contents)
        sys.modules[name] = module


_stand_in("vllm.v1.attention.backends.mla.common", MLACommonMetadata=type("MLACommonMetadata", (), {}))
_stand_in("fastsafetensors", SafeTensorsFileLoader=Loader, SingleGroup=object)
if not hasattr(vllm.utils, "PlaceholderModule"):
    vllm.utils.PlaceholderModule = object  # type: ignore[attr-defined]
if not hasattr(itertools, "batched"):
    itertools.batched = _batched  # type: ignore[attr-defined, misc, assignment]

from vua.vllm.kv_connector_v1 import VUAStorageConnector_V1  # type: ignore  # noqa: E402


class _TwoArguments(KVConnectorBase_V1):  # type: ignore[misc]
    """The base class as it was: without the configuration of the KV cache."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=self._of_this_vllm)


class VUAHere(VUAStorageConnector_V1, _TwoArguments):  # type: ignore[misc]
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._of_this_vllm = kv_cache_config
        self._known: dict[str, Any] = {}
        super().__init__(vllm_config, role)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        layers = {
            name: SimpleNamespace(kv_cache=[Pages(layer.kv_cache)])
            for name, layer in forward_context.no_compile_layers.items()
        }
        super().start_load_kv(
            SimpleNamespace(
                attn_metadata=forward_context.attn_metadata, no_compile_layers=layers, virtual_engine=0
            )
        )

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        super().save_kv_layer(layer_name, Pages(kv_layer), attn_metadata)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._known[request.request_id] = request
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        cached, running = scheduler_output.scheduled_cached_reqs, []
        for i, name in enumerate(cached.req_ids):
            done = cached.num_computed_tokens[i]
            upto = done + scheduler_output.num_scheduled_tokens[name]
            fresh = cached.new_block_ids[i]
            running.append(
                SimpleNamespace(
                    req_id=name,
                    resumed_from_preemption=name in cached.resumed_req_ids,
                    new_token_ids=list(self._known[name].all_token_ids[done:upto]),
                    new_block_ids=[list(fresh[0]) if fresh is not None else []],
                    num_computed_tokens=done,
                )
            )
        return super().build_connector_meta(
            SimpleNamespace(
                finished_req_ids=scheduler_output.finished_req_ids,
                num_scheduled_tokens=scheduler_output.num_scheduled_tokens,
                scheduled_new_reqs=scheduler_output.scheduled_new_reqs,
                scheduled_cached_reqs=running,
            )
        )
