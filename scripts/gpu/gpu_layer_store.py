"""The connector of `scripts/gpu_check.py`: vLLM's example connector, which saves each prompt layer by layer.

It counts its own calls, which is what the report is held against, names them to torch's profiler, and says
by its option ``declares`` whether it needs PIECEWISE graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

from gpu.cases import SAVE_RANGE

COUNTS = {"saves": 0, "capturing": 0}


def capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class GpuLayerStore(ExampleConnector):
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        COUNTS["capturing" if capturing() else "saves"] += 1
        with torch.profiler.record_function(SAVE_RANGE):
            super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return bool(extra_config.get("declares"))
