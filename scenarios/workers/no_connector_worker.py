"""An out-of-tree worker written before the worker had to create the connector.

``initialize_from_config`` allocates the KV cache as ``vllm.v1.worker.gpu_worker.Worker`` does,
but never calls ``ensure_kv_transfer_initialized``: the scheduler has a connector, the worker
has none, and nothing complains.
"""

from __future__ import annotations

from contextlib import nullcontext

from vllm.v1.attention.backends.utils import record_kv_cache_layout
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.cpu_worker import CPUWorker


class NoConnectorWorker(CPUWorker):
    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        if kv_cache_config.kv_cache_layout is not None:
            record_kv_cache_layout(self.cache_config, kv_cache_config.kv_cache_layout)
        self.cache_config.hash_block_size = kv_cache_config.hash_block_size
        self.cache_config.cache_hit_alignment_tokens = kv_cache_config.cache_hit_alignment_tokens
        self.model_runner.initialize_kv_cache(kv_cache_config, kv_cache_allocation_context=nullcontext())
