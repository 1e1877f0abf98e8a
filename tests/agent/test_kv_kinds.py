"""What a worker's layers keep: KV of tokens, or something else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvtrace.agent.facts import describe


class KVCacheSpec:
    block_size = 32


class FullAttentionSpec(KVCacheSpec):
    pass


class SlidingWindowSpec(KVCacheSpec):
    pass


class MambaSpec(KVCacheSpec):
    pass


class OwnMambaSpec(MambaSpec):
    """A kind of state that a later vLLM may have."""


class CrossAttentionSpec(KVCacheSpec):
    pass


class UniformTypeKVCacheSpecs(KVCacheSpec):
    def __init__(self, kv_cache_specs: dict[str, KVCacheSpec]) -> None:
        self.kv_cache_specs = kv_cache_specs


def config(*groups: tuple[KVCacheSpec, list[str]]) -> Any:
    return SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=names) for spec, names in groups]
    )


def worker(kv_cache_config: Any) -> Any:
    return describe.worker(SimpleNamespace(), kv_cache_config, 0)


def test_layers_with_a_state_are_no_kv_layers() -> None:
    told = worker(config((MambaSpec(), ["m0", "m1"]), (OwnMambaSpec(), ["m2"]), (FullAttentionSpec(), ["a"])))
    assert told.kv_layers == ("a",)
    assert told.other_layers == {"m0": "state", "m1": "state", "m2": "state"}


def test_cross_attention_keeps_kv_of_the_encoder() -> None:
    told = worker(config((FullAttentionSpec(), ["self"]), (CrossAttentionSpec(), ["cross"])))
    assert told.kv_layers == ("self",) and told.other_layers == {"cross": "encoder"}


def test_windows_keep_kv_of_tokens() -> None:
    told = worker(config((SlidingWindowSpec(), ["w"]), (FullAttentionSpec(), ["a"])))
    assert told.kv_layers == ("w", "a") and not told.other_layers


def test_a_group_of_several_kinds_is_told_layer_by_layer() -> None:
    spec = UniformTypeKVCacheSpecs({"a": FullAttentionSpec(), "c": CrossAttentionSpec()})
    told = worker(config((spec, ["a", "c"])))
    assert told.kv_layers == ("a",) and told.other_layers == {"c": "encoder"}
