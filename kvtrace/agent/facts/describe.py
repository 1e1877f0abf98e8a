"""What is configured and live: facts of an engine and of a worker, read off vLLM's own objects.

Every reader tolerates missing attributes: names differ between versions, and a fact that
cannot be read is left out (None), never guessed.
"""

from __future__ import annotations

import sys
from enum import Enum
from typing import Any

from kvtrace.agent.state import version_of
from kvtrace.agent.wrap.proxy import index_of
from kvtrace.trace.facts import NOT_OF_TOKENS, EngineFact, KvGroup, KvTransfer, WorkerFact
from kvtrace.trace.mask import mask_mapping, mask_text


def get(value: Any, path: str, default: Any = None) -> Any:
    """``get(config, "cache_config.block_size")`` without raising."""
    for name in path.split("."):
        value = getattr(value, name, None)
        if value is None:
            return default
    return value


def plain(value: Any) -> Any:
    """A JSON scalar; enum members (also IntEnum's) by their name."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def block_size(scheduler: Any) -> int:
    """Tokens in a block of the scheduler's (first) KV cache group; 0 where unknown."""
    size = getattr(scheduler, "block_size", None)
    if not isinstance(size, int):
        size = get(scheduler, "cache_config.block_size")
    return size if isinstance(size, int) else 0


def dp_rank(config: Any) -> int:
    for path in ("parallel_config.data_parallel_index", "parallel_config.data_parallel_rank"):
        rank = get(config, path)
        if isinstance(rank, int):
            return rank
    return 0


def platform() -> str | None:
    current = getattr(sys.modules.get("vllm.platforms"), "current_platform", None)
    name = getattr(current, "device_type", None) or getattr(current, "device_name", None)
    return str(name) if name else None


def kv_transfer(config: Any) -> KvTransfer | None:
    transfer = getattr(config, "kv_transfer_config", None)
    if transfer is None:
        return None
    extra = getattr(transfer, "kv_connector_extra_config", None) or {}
    return KvTransfer(
        connector=plain(getattr(transfer, "kv_connector", None)),
        role=plain(getattr(transfer, "kv_role", None)),
        module_path=plain(getattr(transfer, "kv_connector_module_path", None)),
        engine_id=plain(getattr(transfer, "engine_id", None)),
        extra=mask_mapping(jsonable(extra)),
    )


def jsonable(value: Any, depth: int = 0) -> Any:
    """A copy of a configuration as JSON, of bounded size; what is no JSON as its text."""
    if depth > 6:
        return "..."
    if isinstance(value, dict):
        return {str(key): jsonable(item, depth + 1) for key, item in list(value.items())[:200]}
    if isinstance(value, (list, tuple, set)):
        return [jsonable(item, depth + 1) for item in list(value)[:200]]
    return plain(value)


def kv_groups(kv_cache_config: Any) -> tuple[KvGroup, ...]:
    """The KV cache groups of vLLM's KVCacheConfig."""
    groups = []
    for group in getattr(kv_cache_config, "kv_cache_groups", None) or ():
        spec = getattr(group, "kv_cache_spec", None)
        groups.append(
            KvGroup(
                kind=type(spec).__name__,
                block_size=plain(getattr(spec, "block_size", None)),
                layers=tuple(str(name) for name in getattr(group, "layer_names", ())),
                window=plain(getattr(spec, "sliding_window", None)),
                dtype=_dtype(spec),
            )
        )
    return tuple(groups)


def _dtype(spec: Any) -> str | None:
    """Of the KV of a group; of one with several specs where these have the same."""
    specs = getattr(spec, "kv_cache_specs", None)
    found = {str(getattr(one, "dtype", None)) for one in (specs.values() if specs else (spec,))}
    return found.pop() if len(found) == 1 and "None" not in found else None


def not_of_tokens(kv_cache_config: Any) -> dict[str, str]:
    """Layers in the KV cache that keep no KV of a request's tokens, and what they keep (NOT_OF_TOKENS)."""
    found: dict[str, str] = {}
    for group in getattr(kv_cache_config, "kv_cache_groups", None) or ():
        spec = getattr(group, "kv_cache_spec", None)
        of_layer = getattr(spec, "kv_cache_specs", None)  # a group of several kinds of the same size
        for name in map(str, getattr(group, "layer_names", ())):
            own = of_layer.get(name, spec) if isinstance(of_layer, dict) else spec
            kinds = (cls.__name__ for cls in type(own).__mro__)
            kept = next((NOT_OF_TOKENS[kind] for kind in kinds if kind in NOT_OF_TOKENS), None)
            if kept is not None:
                found[name] = kept
    return found


def engine(scheduler: Any, tag: int) -> EngineFact:
    """One Scheduler instance, of that tag, and the engine it schedules for."""
    config = scheduler.vllm_config
    connector = getattr(scheduler, "connector", None)
    return EngineFact(
        tag=tag,
        vllm=version_of("vllm"),
        torch=version_of("torch"),
        platform=platform(),
        model=mask_text(str(get(config, "model_config.model", ""))),
        dp_rank=dp_rank(config),
        tp=get(config, "parallel_config.tensor_parallel_size", 1),
        pp=get(config, "parallel_config.pipeline_parallel_size", 1),
        dp=get(config, "parallel_config.data_parallel_size", 1),
        block_size=block_size(scheduler),
        max_num_batched_tokens=get(config, "scheduler_config.max_num_batched_tokens"),
        max_num_seqs=get(config, "scheduler_config.max_num_seqs"),
        max_model_len=get(config, "model_config.max_model_len"),
        prefix_caching=bool(get(config, "cache_config.enable_prefix_caching", False)),
        chunked_prefill=bool(get(config, "scheduler_config.enable_chunked_prefill", False)),
        enforce_eager=bool(get(config, "model_config.enforce_eager", False)),
        cudagraph_mode=plain(get(config, "compilation_config.cudagraph_mode")),
        scheduler=type(scheduler).__name__,
        kv_transfer=kv_transfer(config),
        connector_created=connector is not None,
        connector=index_of(connector),
        kv_groups=kv_groups(getattr(scheduler, "kv_cache_config", None)),
        multimodal=get(config, "model_config.multimodal_config") is not None,
        hash_algo=plain(get(config, "cache_config.prefix_caching_hash_algo")),
    )


def worker(wrapper: Any, kv_cache_config: Any, ordinal: int) -> WorkerFact:
    """One worker, once its KV cache exists.

    Args:
        wrapper: vLLM's WorkerWrapperBase.
        kv_cache_config: this rank's KVCacheConfig.
        ordinal: number of the worker in this process.
    """
    inner = getattr(wrapper, "worker", None)
    config = getattr(wrapper, "vllm_config", None)
    others = not_of_tokens(kv_cache_config)
    every = tuple(name for group in kv_groups(kv_cache_config) for name in group.layers)
    layers = tuple(name for name in every if name not in others)
    context = get(config, "compilation_config.static_forward_context", {})
    known = {name: context[name] for name in layers if name in context}
    state = sys.modules.get("vllm.distributed.kv_transfer.kv_transfer_state")
    connector = getattr(state, "_KV_CONNECTOR_AGENT", None)
    return WorkerFact(
        ordinal=ordinal,
        rank=plain(getattr(inner, "rank", getattr(wrapper, "global_rank", 0))),
        tp_rank=_group_rank("get_tp_group"),
        pp_rank=_group_rank("get_pp_group"),
        dp_rank=dp_rank(config),
        worker_class=f"{type(inner).__module__}.{type(inner).__qualname__}",
        kv_layers=layers,
        other_layers=others,
        direct_call={
            name: bool(layer.use_direct_call)
            for name, layer in known.items()
            if hasattr(layer, "use_direct_call")
        },
        backends={name: backend for name, layer in known.items() if (backend := _backend(layer))},
        connector_live=connector is not None,
        connector=index_of(connector),
    )


def _group_rank(getter: str) -> int | None:
    module = sys.modules.get("vllm.distributed.parallel_state")
    try:
        rank = getattr(module, getter)().rank_in_group
    except Exception:
        return None
    return rank if isinstance(rank, int) else None


def _backend(layer: Any) -> str | None:
    get_name = getattr(getattr(layer, "attn_backend", None), "get_name", None)
    try:
        return str(get_name()) if get_name is not None else None
    except Exception:
        return None
