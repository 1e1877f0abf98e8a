"""Options of vLLM, of its connectors and of their environment whose values are words and no secret: names of
models, classes and modules, and one of a few. What has numbers, booleans or paths needs no row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

KV_TRANSFER = "--kv-transfer-config"


def option(words: Sequence[str], name: str) -> str | None:
    """The value of ``--name value`` or ``--name=value`` among a command's words, the last one; None where it
    is not given."""
    found = None
    for word, after in zip(words, (*words[1:], ""), strict=False):
        key, equals, value = word.partition("=")
        if key.replace("_", "-") == name:
            found = value if equals else after
    return found


def transfer_in(words: Sequence[str]) -> dict[str, Any] | None:
    """What ``--kv-transfer-config`` has among a command's words, where it is one JSON object."""
    try:
        found = json.loads(option(words, KV_TRANSFER) or "")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


# fmt: off
WORDS = frozenset((
    # model
    "model", "model_tag", "runner", "convert", "task", "tokenizer", "tokenizer_mode", "dtype", "revision",
    "code_revision", "tokenizer_revision", "quantization", "logprobs_mode", "served_model_name",
    "config_format", "hf_config_path", "generation_config", "model_impl", "load_format",
    "safetensors_load_strategy", "guided_decoding_backend", "reasoning_parser", "tool_call_parser",
    "chat_template_content_format", "response_role", "method", "architectures", "optimization_level",
    "performance_mode",
    # engine
    "attention_backend", "mamba_backend", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode",
    "kv_cache_dtype", "prefix_caching_hash_algo", "kv_offloading_backend", "offload_backend",
    "cpu_offload_params", "mm_processor_cache_type", "mm_encoder_tp_mode", "mm_encoder_attn_backend",
    "lora_dtype", "log_level", "uvicorn_log_level", "scheduling_policy", "scheduler_cls", "worker_cls",
    "worker_extension_cls", "executor_class", "moe_backend", "linear_backend",
    "distributed_executor_backend", "data_parallel_backend", "all2all_backend", "dcp_comm_backend",
    "expert_placement_strategy", "device", "cudagraph_mode", "custom_ops", "splitting_ops", "backend",
    "level", "mode", "collect_detailed_traces", "logits_processors",
    # KV transfer
    "kv_connector", "kv_connector_module_path", "kv_role", "kv_buffer_device", "kv_load_failure_policy",
    "load_failure_policy", "engine_id", "publisher", "backends", "spec_name", "spec_module_path",
    "eviction_policy", "kv_offload_backend", "read_mode", "send_type", "load_type",
    # bench
    "dataset_name", "endpoint_type", "request_rate", "percentile_metrics", "goodput",
    # environment
    "VLLM_ATTENTION_BACKEND", "VLLM_LOGGING_LEVEL", "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_TARGET_DEVICE",
    "VLLM_PLUGINS", "VLLM_KV_CACHE_LAYOUT", "VLLM_ALL2ALL_BACKEND", "VLLM_NIXL_SIDE_CHANNEL_HOST",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "NCCL_DEBUG", "UCX_TLS",
))
SHORT = {"-m": "module", "-q": "quantization", "-n": "nnodes", "-dpb": "data_parallel_backend"}
"""Options of one dash, as far as their values are words."""
COMMANDS = frozenset((
    "vllm", "serve", "chat", "complete", "bench", "latency", "throughput", "startup", "sweep", "run-batch",
    "collect-env", "launch", "env", "exec", "nohup", "timeout", "numactl", "taskset", "torchrun", "ray",
    "start", "uv", "run", "python", "python3", "bash", "sh", "kvtrace",
))
"""Words of a command line that are no option's value."""
SHELLS = frozenset(("sh", "bash", "dash", "zsh", "ash", "ksh"))
# fmt: on
