"""What every run has in common: the engine's settings and the prompts. Standard library only."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

OUTPUT_TOKENS = 12
PROMPTS = 12
LAYERS = 4
"""Of the tiny model."""

# float32: which prompts share a step must not change a token.
ENGINE: dict[str, Any] = {
    "enforce_eager": True,
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 4,
    "block_size": 32,
    "num_gpu_blocks_override": 2048,
    "enable_prefix_caching": False,
}


def flags() -> list[str]:
    """:data:`ENGINE` as arguments of ``vllm serve``."""
    found = []
    for name, value in ENGINE.items():
        flag = name.replace("_", "-")
        found += (
            [f"--{flag}" if value else f"--no-{flag}"]
            if isinstance(value, bool)
            else [f"--{flag}", str(value)]
        )
    return found


def kv_transfer(store: Path) -> dict[str, Any]:
    return {
        "kv_connector": "LoggedStore",
        "kv_connector_module_path": "killing.logged_store",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"path": str(store)},
    }


def prompts(seed: int) -> list[tuple[int, list[int]]]:
    """(index, token ids), the same for every seed, in an order of its own."""
    rng = random.Random(20261122)
    made = [[rng.randrange(10, 500) for _ in range(rng.randint(20, 400))] for _ in range(PROMPTS)]
    order = list(enumerate(made))
    random.Random(f"order {seed}").shuffle(order)
    return order
