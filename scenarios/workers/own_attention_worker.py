"""A worker whose last layer has an attention of its own, as models with sparse or linear attention do.

The layer writes its KV cache and attends as ever, but it calls its backend itself and not the op around
which vLLM calls the connector.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from vllm.model_executor.layers.attention.attention import (
    Attention,
    get_attention_context,
    unified_kv_cache_update,
)
from vllm.v1.worker.cpu_worker import CPUWorker


def own_forward(
    self: Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output_shape: torch.Size | None = None,
    **_: Any,
) -> torch.Tensor:
    query = query.view(-1, self.num_heads, self.head_size)
    key = key.view(-1, self.num_kv_heads, self.head_size)
    value = value.view(-1, self.num_kv_heads, self.head_size_v)
    output = torch.empty(query.shape[0], self.num_heads, self.head_size_v, dtype=query.dtype)
    if not self.attn_backend.forward_includes_kv_cache_update:
        unified_kv_cache_update(key, value, self.layer_name)
    metadata, _, kv_cache, _ = get_attention_context(self.layer_name)
    if metadata is None:  # profiling
        return output.zero_().view(query.shape[0], -1)
    self.impl.forward(self, query, key, value, kv_cache, metadata, output=output)
    return output.view(query.shape[0], -1)


class OwnAttentionWorker(CPUWorker):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        layers = self.vllm_config.compilation_config.static_forward_context
        last = list(layers.values())[-1]
        last.forward = MethodType(own_forward, last)
