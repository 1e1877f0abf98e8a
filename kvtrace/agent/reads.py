"""What the agent reads of vLLM without hooking it: the other half of the table of targets.

The readers tolerate that a name is missing, so a renamed one would silently be "unknown" in every report:
``scripts/check_targets.py`` holds vLLM's sources to this table, and a test holds the agent's code to it.
Nothing here is imported inside vLLM's processes.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtrace.trace import hooks
from kvtrace.versions import since


@dataclass(frozen=True)
class Reads:
    """Names of one class of a module of vLLM, of the module itself where ``holder`` is "".

    Attributes:
        names: attributes, methods, fields, members or module-level names, a method with the parameters that
            are relied on as ``method(first, second)``; () for the holder alone.
        versions: where they are expected. In others the agent does without.
    """

    module: str
    holder: str
    names: tuple[str, ...]
    versions: str

    @property
    def id(self) -> str:
        return f"{self.module}:{self.holder}" if self.holder else self.module


_ALL = since("0.8.5")
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_LAYERS = "vllm.model_executor.layers.attention"
_HF3FS = "vllm.distributed.kv_transfer.kv_connector.v1.hf3fs.utils"
_NATIVE = since("0.32.0")
_RESUMED = "resumed_from_preemption"
_LAYER = "use_direct_call kv_cache attn_backend"


def _reads(module: str, holder: str, names: str, versions: str = _ALL) -> Reads:
    return Reads(module, holder, tuple(names.split()), versions)


def _hooks() -> tuple[Reads, ...]:
    """The connector's hooks; each version's traced connectors have those of its base class."""
    rows: dict[tuple[str, str], list[str]] = {}
    for hook in hooks.TABLE:
        holder = "SupportsHMA" if hook is hooks.REQUEST_FINISHED_GROUPS else "KVConnectorBase_V1"
        arguments = ", ".join(argument for _, argument in hook.needs)
        rows.setdefault((holder, hook.versions), []).append(f"{hook.name}({arguments})")
    return tuple(Reads(_BASE, holder, tuple(names), where) for (holder, where), names in rows.items())


READS: tuple[Reads, ...] = (
    # the configuration (describe.py, front.py, config_keys.py, connector.py)
    _reads("vllm", "", "__version__"),
    _reads(
        "vllm.config", "VllmConfig",
        "model_config parallel_config scheduler_config cache_config compilation_config kv_transfer_config",
    ),
    _reads("vllm.config", "ModelConfig", "model max_model_len enforce_eager multimodal_config"),
    _reads(
        "vllm.config", "ParallelConfig",
        "tensor_parallel_size pipeline_parallel_size data_parallel_size data_parallel_rank",
    ),
    _reads("vllm.config", "ParallelConfig", "data_parallel_index", since("0.14.1")),
    _reads("vllm.config", "ParallelConfig", "decode_context_parallel_size", since("0.11.1")),
    _reads("vllm.config", "ParallelConfig", "prefill_context_parallel_size", since("0.12.0")),
    _reads("vllm.config", "SchedulerConfig", "max_num_batched_tokens max_num_seqs enable_chunked_prefill"),
    _reads("vllm.config", "CacheConfig", "block_size enable_prefix_caching prefix_caching_hash_algo"),
    _reads("vllm.config", "CompilationConfig", "static_forward_context"),
    _reads("vllm.config", "CompilationConfig", "cudagraph_mode", since("0.10.2")),
    _reads("vllm.config", "KVTransferConfig", "kv_connector kv_role kv_connector_extra_config"),
    _reads("vllm.config", "KVTransferConfig", "kv_connector_module_path engine_id", since("0.9.2")),
    _reads("vllm.config", "CUDAGraphMode", "NONE PIECEWISE FULL", since("0.10.2")),
    _reads("vllm.engine.arg_utils", "EngineArgs", "compilation_config max_num_batched_tokens"),
    _reads("vllm.v1.engine", "EngineCoreRequest", "request_id"),
    _reads("vllm.v1.engine.core", "EngineCore", "step step_with_batch_queue"),
    _reads("vllm.v1.engine", "EngineCoreRequest", "external_req_id", since("0.14.1")),
    _reads("vllm.envs", "", "VLLM_USE_BREAKABLE_CUDAGRAPH", since("0.22.1")),
    _reads("vllm.platforms", "", "current_platform"),
    _reads("vllm.platforms.interface", "Platform", "device_type device_name"),
    _reads("vllm.platforms.interface", "Platform", "opaque_attention_op", since("0.10.2")),
    _reads("vllm.model_executor.models.registry", "", ""),
    # the scheduler (scheduler.py, block_tables.py, prefixes.py, handover.py, metadata/, describe.py)
    _reads(
        "vllm.v1.core.sched.scheduler", "Scheduler",
        "vllm_config cache_config block_size kv_cache_config connector requests "
        "running kv_cache_manager _free_request finish_requests",
    ),
    _reads("vllm.v1.core.sched.scheduler", "Scheduler", "_handle_invalid_blocks", since("0.11.1")),
    _reads("vllm.v1.core.sched.scheduler", "Scheduler", "_preempt_request", since("0.12.0")),
    Reads("vllm.v1.core.kv_cache_manager", "KVCacheManager", ("get_block_ids(request_id)",), since("0.9.2")),
    _reads("vllm.v1.core.kv_cache_manager", "KVCacheManager", "coordinator", since("0.9.2")),
    _reads(
        "vllm.v1.core.kv_cache_coordinator", "KVCacheCoordinator", "single_type_managers", since("0.9.2")
    ),
    _reads(
        "vllm.v1.core.single_type_kv_cache_manager", "SingleTypeKVCacheManager", "block_size", since("0.9.2")
    ),
    _reads("vllm.sampling_params", "SamplingParams", ""),
    _reads(
        "vllm.v1.core.sched.output", "SchedulerOutput",
        "num_scheduled_tokens total_num_scheduled_tokens scheduled_new_reqs scheduled_cached_reqs "
        "finished_req_ids",
    ),
    _reads("vllm.v1.core.sched.output", "SchedulerOutput", "preempted_req_ids", since("0.12.0")),
    _reads(
        "vllm.v1.core.sched.output", "NewRequestData",
        "req_id block_ids prompt_token_ids num_computed_tokens",
    ),
    _reads("vllm.v1.core.sched.output", "CachedRequestData", "new_block_ids num_computed_tokens"),
    _reads("vllm.v1.core.sched.output", "CachedRequestData", "req_id", since("0.8.5", "0.8.5")),
    _reads("vllm.v1.core.sched.output", "CachedRequestData", "req_ids", since("0.9.2")),
    _reads("vllm.v1.core.sched.output", "CachedRequestData", _RESUMED, since("0.8.5", "0.13.0")),
    _reads("vllm.v1.core.sched.output", "CachedRequestData", "resumed_req_ids", since("0.11.1")),
    _reads(
        "vllm.v1.request", "Request",
        "request_id num_prompt_tokens prompt_token_ids max_tokens num_computed_tokens num_output_tokens "
        "num_tokens status lora_request _all_token_ids",
    ),
    _reads("vllm.v1.request", "Request", "mm_hashes", since("0.8.5", "0.10.2")),
    _reads("vllm.v1.request", "Request", "cache_salt kv_transfer_params", since("0.9.2")),
    _reads("vllm.v1.request", "Request", "mm_features", since("0.10.2")),
    _reads("vllm.v1.request", "Request", "num_preemptions prompt_embeds", since("0.11.1")),
    _reads("vllm.v1.request", "Request", "resumable", since("0.27.1")),
    _reads("vllm.multimodal.inputs", "MultiModalFeatureSpec", "identifier mm_position", since("0.10.2")),
    _reads("vllm.multimodal.inputs", "PlaceholderRange", "offset length", since("0.10.2")),
    _reads("vllm.lora.request", "LoRARequest", "lora_name lora_int_id"),
    # the worker (worker.py, startup.py, describe.py, watch/)
    _reads(
        "vllm.v1.worker.worker_base", "WorkerWrapperBase",
        "worker vllm_config global_rank init_device initialize_from_config execute_model", since("0.11.1"),
    ),
    _reads(
        "vllm.v1.worker.gpu_worker", "Worker",
        "rank model_runner load_model determine_available_memory compile_or_warm_up_model",
    ),
    _reads("vllm.v1.worker.gpu_worker", "Worker", "sample_tokens", since("0.11.1")),
    _reads("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "", since("0.12.0")),
    _reads("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "kv_connector", _NATIVE),
    _reads("vllm.v1.worker.gpu.kv_connector", "ActiveKVConnector", "kv_connector", _NATIVE),
    _reads("vllm.v1.kv_cache_interface", "KVCacheConfig", "num_blocks kv_cache_groups"),
    _reads("vllm.v1.kv_cache_interface", "KVCacheGroupSpec", "layer_names kv_cache_spec"),
    _reads("vllm.v1.kv_cache_interface", "KVCacheSpec", "block_size"),
    _reads("vllm.v1.kv_cache_interface", "CrossAttentionSpec", "", since("0.11.1")),
    _reads("vllm.v1.kv_cache_interface", "UniformTypeKVCacheSpecs", "kv_cache_specs", since("0.11.1")),
    _reads("vllm.v1.kv_cache_interface", "MambaSpec", "", since("0.11.1")),
    _reads("vllm.v1.kv_cache_interface", "SlidingWindowSpec", "sliding_window"),
    _reads("vllm.v1.kv_cache_interface", "AttentionSpec", "dtype"),
    _reads("vllm.v1.kv_cache_interface", "EncoderOnlyAttentionSpec", "", since("0.11.1")),
    _reads("vllm.distributed.parallel_state", "", "get_tp_group get_pp_group"),
    _reads("vllm.distributed.parallel_state", "GroupCoordinator", "rank_in_group"),
    # attention and CUDA graphs (ops.py, graphs.py, describe.py, watch/)
    _reads("vllm.attention.layer", "Attention", "use_direct_call kv_cache", since("0.8.5", "0.15.1")),
    _reads("vllm.attention.layer", "Attention", "attn_backend", since("0.10.2", "0.15.1")),
    _reads(f"{_LAYERS}.attention", "Attention", _LAYER, since("0.16.0")),
    _reads(f"{_LAYERS}.mla_attention", "MLAAttention", _LAYER, since("0.16.0")),
    _reads("vllm.v1.attention.backend", "AttentionBackend", "get_name", since("0.14.1")),
    _reads(
        "vllm.attention.backends.abstract", "AttentionBackend", "get_name get_kv_cache_shape",
        since("0.8.5", "0.13.0"),
    ),
    _reads("vllm.v1.attention.backend", "AttentionBackend", "get_kv_cache_shape", since("0.14.1", "0.28.0")),
    _reads("vllm.v1.kv_cache_layout", "KVCacheLayout", "", since("0.30.0")),
    _reads("vllm.utils.torch_utils", "LayerName", "value", since("0.20.2")),
    _reads("vllm.forward_context", "", "_forward_context"),
    _reads("vllm.forward_context", "ForwardContext", "attn_metadata"),
    _reads(
        "vllm.forward_context", "ForwardContext", "cudagraph_runtime_mode batch_descriptor", since("0.10.2")
    ),
    _reads("vllm.forward_context", "BatchDescriptor", "num_tokens", since("0.10.2")),
    _reads(
        "vllm.v1.worker.gpu.cudagraph_utils", "BatchExecutionDescriptor", "num_tokens", since("0.18.1")
    ),
    _reads("vllm.compilation.counter", "", "compilation_counter"),
    _reads("vllm.compilation.counter", "CompilationCounter", "num_cudagraph_captured", since("0.9.2")),
    # connectors (connector.py, connector_facts.py, hook_records.py, owners.py)
    _reads(_BASE, "", "KVConnectorBase_V1 KVConnectorMetadata"),
    _reads(_BASE, "KVConnectorRole", "SCHEDULER WORKER"),
    _reads(_BASE, "KVConnectorBase_V1", "_kv_transfer_config has_connector_metadata", since("0.11.1")),
    _reads(_BASE, "KVConnectorBase_V1", "requires_piecewise_for_cudagraph", since("0.17.1")),
    _reads("vllm.distributed.kv_transfer.kv_connector.base", "", "KVConnectorBase"),
    _reads("vllm.distributed.kv_transfer.kv_transfer_state", "", "_KV_CONNECTOR_AGENT"),
    _reads(
        "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector", "MultiConnector", "_connectors",
        since("0.9.2"),
    ),
    _reads("vllm.v1.outputs", "KVConnectorOutput", "finished_sending finished_recving", since("0.10.2")),
    _reads("vllm.v1.outputs", "KVConnectorOutput", "failed_recving", since("0.30.0")),
    _reads("vllm.v1.kv_offload", "", "", since("0.11.0")),
    _reads("vllm.v1.simple_kv_offload", "", "", since("0.19.1")),
    # native copies (watch/native.py)
    Reads("vllm._custom_ops", "", (
        "swap_blocks(src, dst, block_size_in_bytes, block_mapping)",
        "swap_blocks_batch(src_ptrs, dst_ptrs, sizes)",
    ), _NATIVE),
    Reads(
        "vllm.v1.kv_offload.cpu.swap_blocks_triton", "", ("swap_blocks_batch(src_addrs, dst_addrs, sizes)",),
        _NATIVE,
    ),
    Reads(
        "vllm.v1.simple_kv_offload.cuda_mem_ops", "", ("copy_blocks(src_block_ids, dst_block_ids, params)",),
        _NATIVE,
    ),
    _reads("vllm.v1.simple_kv_offload.cuda_mem_ops", "BatchMemcpyParams", "src_bases dst_bases bpb", _NATIVE),
    Reads(f"{_HF3FS}.gather_scatter_helper", "", (
        "gather_kv_caches(kv_caches_ptrs, total_token_in_kvcache, dst_tensor, token_indices)",
        "scatter_kv_caches(kv_caches_ptrs, total_token_in_kvcache, src_tensor, token_indices)",
    ), _NATIVE),
    *_hooks(),
)  # fmt: skip
