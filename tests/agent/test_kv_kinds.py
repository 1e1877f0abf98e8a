"""What a worker's layers keep: KV of tokens, or something else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtrace.agent.facts import describe


class KVCacheSpec:
    block_size = 32


def spec(name: str, base: type = KVCacheSpec) -> Any:
    """As vLLM has it, by the name of its class."""
    return type(name, (base,), {})()


FULL, WINDOW, CROSS = spec("FullAttentionSpec"), spec("SlidingWindowSpec"), spec("CrossAttentionSpec")
MAMBA = spec("MambaSpec")
LATER = spec("OwnMambaSpec", type(MAMBA))
"""A kind of state that a later vLLM may have."""
SEVERAL = spec("UniformTypeKVCacheSpecs")
SEVERAL.kv_cache_specs = {"a": FULL, "c": CROSS}


@pytest.mark.parametrize(
    ("groups", "kv", "other"),
    [
        (
            [(MAMBA, ["m0", "m1"]), (LATER, ["m2"]), (FULL, ["a"])],
            ("a",),
            {"m0": "state", "m1": "state", "m2": "state"},
        ),
        ([(FULL, ["self"]), (CROSS, ["cross"])], ("self",), {"cross": "encoder"}),
        ([(WINDOW, ["w"]), (FULL, ["a"])], ("w", "a"), {}),
        ([(SEVERAL, ["a", "c"])], ("a",), {"c": "encoder"}),
    ],
    ids=["states", "KV of the encoder", "windows keep KV of tokens", "a group of several kinds"],
)
def test_layers_with_kv_of_tokens_are_told_from_others(
    groups: list[tuple[Any, list[str]]], kv: tuple[str, ...], other: dict[str, str]
) -> None:
    config = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=one, layer_names=names) for one, names in groups]
    )
    told = describe.worker(SimpleNamespace(), config, 0)
    assert told.kv_layers == kv and told.other_layers == other


def test_the_dtype_of_a_groups_kv_is_said_where_it_is_one() -> None:
    def of(dtype: str) -> Any:
        return SimpleNamespace(block_size=32, dtype=dtype)

    one, other, several = of("torch.float16"), of("torch.bfloat16"), spec("UniformTypeKVCacheSpecs")
    several.kv_cache_specs = {"a": one, "b": other}
    config = SimpleNamespace(
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=spec, layer_names=["a"]) for spec in (one, several, FULL)
        ]
    )
    assert [group.dtype for group in describe.kv_groups(config)] == ["torch.float16", None, None]
