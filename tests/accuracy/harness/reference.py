"""What the KV of a prompt is, computed without vLLM: the same weights in transformers.

And how a block lays tokens out: of vLLM's CPU attention, found by asking its own kernel, and on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CLOSE = 2e-4
"""Largest difference between two computations of one KV value: about ten times what is seen (2e-5 at values
of up to 8), and less than a rounding to half precision makes of some value of each token."""

TIE = 1e-3
"""Logits nearer than this are a tie: either token is a right answer."""


CLOSE_ON_GPU = 1e-3
"""The same, where a GPU's kernels computed one of them."""


@dataclass(frozen=True)
class GpuLayout:
    """Blocks of [heads of K and of V, tokens, size]: Triton's attention, with vLLM's layout HND."""

    block: int

    @staticmethod
    def row(heads: int, size: int) -> tuple[int, int]:
        """(Heads, width) of a stored block."""
        return 2 * heads, size

    def unpack(self, blocks: np.ndarray) -> np.ndarray:
        """[blocks, 2 * heads, tokens, size] as stored -> [tokens, heads, 2 * size] by token."""
        count, heads, tokens, size = blocks.shape
        both = blocks.reshape(count, 2, heads // 2, tokens, size).transpose(0, 3, 2, 1, 4)
        return both.reshape(count * tokens, heads // 2, 2 * size)

    def pack(self, tokens: np.ndarray) -> np.ndarray:
        """The way back, for whole blocks."""
        total, heads, width = tokens.shape
        both = tokens.reshape(total // self.block, self.block, heads, 2, width // 2).transpose(0, 3, 2, 1, 4)
        return np.ascontiguousarray(both).reshape(total // self.block, 2 * heads, self.block, width // 2)


@dataclass(frozen=True)
class Layout:
    """Where a token's key and value lie in one head's part of a block, by position in the block.

    Attributes:
        keys, values: [tokens of a block, head size], indices into ``tokens * 2 * head size`` floats.
    """

    keys: np.ndarray
    values: np.ndarray

    @classmethod
    def of(cls, block: int, head: int) -> Layout:
        """Writes numbers through the kernel and looks where they land."""
        import torch
        from vllm import _custom_ops as ops
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        count = block * head
        key = torch.arange(1, count + 1, dtype=torch.float32).reshape(block, 1, head)
        cache = torch.zeros((1, 1, block * 2, head), dtype=torch.float32)
        key_cache, value_cache = cache.chunk(2, dim=2)
        isa = _get_attn_isa(torch.float32, block, head, "auto")
        slots = torch.arange(block, dtype=torch.long)
        ops.cpu_attn_reshape_and_cache(
            key, key + count, key_cache, value_cache, slots, isa,
            k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto",
        )  # fmt: skip
        flat = cache.ravel().numpy().astype(np.int64)
        place = np.empty(2 * count + 1, dtype=np.int64)
        place[flat] = np.arange(2 * count)
        if sorted(flat) != list(range(1, 2 * count + 1)):
            raise RuntimeError(f"the CPU kernel's layout of blocks of {block} tokens is not understood")
        return cls(
            place[1 : count + 1].reshape(block, head), place[count + 1 : 2 * count + 1].reshape(block, head)
        )

    @staticmethod
    def row(heads: int, size: int) -> tuple[int, int]:
        """(Heads, width) of a stored block."""
        return heads, 2 * size

    def unpack(self, blocks: np.ndarray) -> np.ndarray:
        """[blocks, heads, tokens, 2 * size] as stored -> [tokens, heads, 2 * size] by token."""
        count, heads, tokens, width = blocks.shape
        flat = blocks.reshape(count, heads, tokens * width)
        both = np.concatenate([flat[:, :, self.keys], flat[:, :, self.values]], axis=-1)
        return both.transpose(0, 2, 1, 3).reshape(count * tokens, heads, width)

    def pack(self, tokens: np.ndarray) -> np.ndarray:
        """The way back, for whole blocks."""
        block, size = self.keys.shape
        count, heads = len(tokens) // block, tokens.shape[1]
        both = tokens.reshape(count, block, heads, 2 * size).transpose(0, 2, 1, 3)
        flat = np.empty((count, heads, block * 2 * size), dtype=np.float32)
        flat[:, :, self.keys] = both[..., :size]
        flat[:, :, self.values] = both[..., size:]
        return flat.reshape(count, heads, block, 2 * size)


class Reference:
    """The model, and what it computes."""

    def __init__(self, model: Path | str) -> None:
        import torch
        from transformers import LlamaForCausalLM

        self._torch = torch
        self._model = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._model.eval()
        self._seen: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}
        config: Any = self._model.config
        self.layers, self.heads, self.head = (
            int(config.num_hidden_layers), int(config.num_key_value_heads), int(config.head_dim),
        )  # fmt: skip

    def of(self, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """KV of all tokens, [layers, tokens, heads, 2 * size], and the logits after each, [tokens, words]."""
        name = tuple(tokens)
        if name not in self._seen:
            with self._torch.no_grad():
                out = self._model(self._torch.tensor([name]), use_cache=True)
            layers = [
                self._torch.cat([layer.keys[0], layer.values[0]], dim=-1).transpose(0, 1)
                for layer in out.past_key_values.layers
            ]
            kv = self._torch.stack(layers).float().numpy()
            self._seen[name] = (kv, out.logits[0].float().numpy())
        return self._seen[name]

    def forget(self) -> None:
        self._seen.clear()

    def is_answer(self, prompt: Sequence[int], answer: Sequence[int], tie: float = TIE) -> bool:
        """Whether a greedy answer is one that this model gives. Logits nearer than ``tie`` are a tie."""
        _, logits = self.of([*prompt, *answer])
        after = logits[len(prompt) - 1 : len(prompt) - 1 + len(answer)]
        return bool(np.all(after[np.arange(len(answer)), list(answer)] >= after.max(axis=-1) - tie))
