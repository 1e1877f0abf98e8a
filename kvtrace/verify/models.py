"""Small models for connectors that come without a server: made on the spot, with nothing but numpy.

Random weights with a wide spread: with small ones answers hardly depend on the KV cache. One word of the
vocabulary is one token. The same call gives the same bytes; a finished folder is left as it is.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

VERSION = 3
_SEED = 20261123
_SPREAD = 0.15
_VOCABULARY = 512
_LAYERS = 4
_HIDDEN, _INNER, _HEADS, _HEAD = 128, 256, 4, 64
_DONE = "kvtrace-model.json"
MANY_BLOCKS = 640
"""For a model whose layers are not all alike, or not known."""

Shapes: TypeAlias = dict[str, tuple[int, ...]]


def _common(layers: int) -> dict[str, Any]:
    return {
        "vocab_size": _VOCABULARY, "hidden_size": _HIDDEN, "intermediate_size": _INNER,
        "num_hidden_layers": layers, "num_attention_heads": _HEADS, "num_key_value_heads": 2,
        "head_dim": _HEAD, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16",
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 10000.0,
    }  # fmt: skip


def _mlp(layer: str) -> Shapes:
    return {
        f"{layer}.mlp.gate_proj.weight": (_INNER, _HIDDEN),
        f"{layer}.mlp.up_proj.weight": (_INNER, _HIDDEN),
        f"{layer}.mlp.down_proj.weight": (_HIDDEN, _INNER),
    }


def _attention(layer: str, head: int = _HEAD) -> Shapes:
    own = f"{layer}.self_attn"
    return {
        f"{own}.q_proj.weight": (_HEADS * head, _HIDDEN),
        f"{own}.k_proj.weight": (2 * head, _HIDDEN),
        f"{own}.v_proj.weight": (2 * head, _HIDDEN),
        f"{own}.o_proj.weight": (_HIDDEN, _HEADS * head),
    }


def _norms(layer: str, *names: str) -> Shapes:
    return {f"{layer}.{name}.weight": (_HIDDEN,) for name in names}


_AROUND = ("input_layernorm", "post_attention_layernorm")


def _llama(layer: str, number: int) -> Shapes:
    return {**_attention(layer), **_mlp(layer), **_norms(layer, *_AROUND)}


_RANK, _NOPE, _ROPE = 512, 64, 64


def _deepseek(layer: str, number: int) -> Shapes:
    own = f"{layer}.self_attn"
    return {
        f"{own}.q_proj.weight": (_HEADS * (_NOPE + _ROPE), _HIDDEN),
        f"{own}.kv_a_proj_with_mqa.weight": (_RANK + _ROPE, _HIDDEN),
        f"{own}.kv_a_layernorm.weight": (_RANK,),
        f"{own}.kv_b_proj.weight": (_HEADS * (_NOPE + _HEAD), _RANK),
        f"{own}.o_proj.weight": (_HIDDEN, _HEADS * _HEAD),
        **_mlp(layer),
        **_norms(layer, *_AROUND),
    }


def _gemma(layer: str, number: int) -> Shapes:
    return {
        **_attention(layer),
        **_mlp(layer),
        **_norms(layer, *_AROUND, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
        f"{layer}.self_attn.q_norm.weight": (_HEAD,),
        f"{layer}.self_attn.k_norm.weight": (_HEAD,),
    }


_STATE, _MAMBA = 32, 256
"""Size of a Mamba2 state, and of what goes through it: four heads of 64."""


def _granite(layer: str, number: int) -> Shapes:
    own = f"{layer}.mamba"
    wide = _MAMBA + 2 * _STATE
    state: Shapes = {
        f"{own}.in_proj.weight": (_MAMBA + wide + 4, _HIDDEN),
        f"{own}.conv1d.weight": (wide, 1, 4),
        f"{own}.conv1d.bias": (wide,),
        f"{own}.A_log": (4,),
        f"{own}.D": (4,),
        f"{own}.dt_bias": (4,),
        f"{own}.norm.weight": (_MAMBA,),
        f"{own}.out_proj.weight": (_HIDDEN, _MAMBA),
    }
    return {
        **(_attention(layer, _HIDDEN // _HEADS) if number % 2 else state),
        **_norms(layer, *_AROUND),
        f"{layer}.shared_mlp.input_linear.weight": (2 * _INNER, _HIDDEN),
        f"{layer}.shared_mlp.output_linear.weight": (_HIDDEN, _INNER),
    }


@dataclass(frozen=True)
class ModelKind:
    """A kind of model, as far as it decides how vLLM lays out its KV cache.

    Attributes:
        config: of its ``config.json``, beside what all have.
        layer: the weights of one layer, by its name and its number.
        blocks: of its KV cache; few, where all layers are alike: what is given back is soon another's.
    """

    architecture: str
    config: Mapping[str, Any]
    layer: Callable[[str, int], Shapes]
    layers: int = _LAYERS
    blocks: int = 66

    def shapes(self) -> Shapes:
        """All of its weights."""
        found: Shapes = {
            "model.embed_tokens.weight": (_VOCABULARY, _HIDDEN),
            "model.norm.weight": (_HIDDEN,),
            "lm_head.weight": (_VOCABULARY, _HIDDEN),
        }
        for number in range(self.layers):
            found |= self.layer(f"model.layers.{number}", number)
        return found


KINDS: Mapping[str, ModelKind] = {
    "gqa": ModelKind("LlamaForCausalLM", {"model_type": "llama"}, _llama),  # grouped-query attention
    "mla": ModelKind(  # one latent a token and layer
        "DeepseekV2ForCausalLM",
        {
            "model_type": "deepseek_v2", "kv_lora_rank": _RANK, "q_lora_rank": None,
            "qk_nope_head_dim": _NOPE, "qk_rope_head_dim": _ROPE, "v_head_dim": _HEAD,
            "num_key_value_heads": _HEADS, "first_k_dense_replace": _LAYERS,
        },
        _deepseek,
        blocks=130,  # vLLM's CPU backend makes blocks of 16 tokens for it
    ),
    "sliding": ModelKind(  # a sliding window beside full attention
        "Gemma3ForCausalLM",
        {
            "model_type": "gemma3_text", "sliding_window": 128, "query_pre_attn_scalar": 64,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "hidden_activation": "gelu_pytorch_tanh", "rope_local_base_freq": 10000.0,
        },
        _gemma,
        6,
        MANY_BLOCKS,
    ),
    "hybrid": ModelKind(  # layers that keep a state a request beside full attention
        "GraniteMoeHybridForCausalLM",
        {
            "model_type": "granitemoehybrid", "layer_types": ["mamba", "attention"] * (_LAYERS // 2),
            "head_dim": None, "num_local_experts": 0, "num_experts_per_tok": 0,
            "shared_intermediate_size": _INNER, "position_embedding_type": "rope", "mamba_n_heads": 4,
            "mamba_d_head": 64, "mamba_d_state": _STATE, "mamba_expand": 2, "mamba_n_groups": 1,
            "mamba_d_conv": 4, "mamba_chunk_size": 64, "mamba_conv_bias": True, "mamba_proj_bias": False,
            "embedding_multiplier": 1.0, "logits_scaling": 1.0, "residual_multiplier": 1.0,
            "attention_multiplier": (_HIDDEN // _HEADS) ** -0.5, "attention_bias": False,
        },
        _granite,
        blocks=MANY_BLOCKS,
    ),
}  # fmt: skip
FIRST = "gqa"


def folder() -> Path:
    """Where they are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "kvtrace" / "models"


def make(kind: str, place: Path | None = None, other: bool = False) -> Path:
    """The folder of that kind's model, made where it is not there; a finished one is left as it is.

    Args:
        other: another one of the same shape: its weights are others.

    Raises:
        OSError: it cannot be written.
    """
    path = (place or folder()) / f"{kind}{'-other' * other}-{VERSION}"
    if (path / _DONE).exists():
        return path
    half = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.rmtree(half, ignore_errors=True)
    half.mkdir(parents=True)
    try:
        for name, value in _documents(KINDS[kind]):
            (half / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        _write_weights(half / "model.safetensors", KINDS[kind].shapes(), _SEED + other)
        (half / _DONE).write_text(json.dumps({"version": VERSION}) + "\n", encoding="utf-8")
        if not (path / _DONE).exists():  # another process may have been faster
            shutil.rmtree(path, ignore_errors=True)
            half.rename(path)
    except OSError:
        if not (path / _DONE).exists():
            raise
    finally:
        shutil.rmtree(half, ignore_errors=True)
    return path


def _documents(kind: ModelKind) -> Iterator[tuple[str, Any]]:
    yield "config.json", {"architectures": [kind.architecture], **_common(kind.layers), **kind.config}
    yield "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    words = [*special, *(f"w{number}" for number in range(len(special), _VOCABULARY))]
    yield (
        "tokenizer.json",
        {
            "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
            "added_tokens": [
                {
                    "id": number, "content": word, "special": True, "single_word": False, "lstrip": False,
                    "rstrip": False, "normalized": False,
                }
                for number, word in enumerate(special)
            ],
            "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None,
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
            "model": {
                "type": "WordLevel", "vocab": {word: number for number, word in enumerate(words)},
                "unk_token": "<unk>",
            },
        },
    )  # fmt: skip
    yield (
        "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 4096, "pad_token": "<pad>",
            "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
            "clean_up_tokenization_spaces": False,
        },
    )  # fmt: skip


def _write_weights(path: Path, shapes: Shapes, seed: int) -> None:
    """A safetensors file: the length of a JSON head, the head, the numbers."""
    source = np.random.default_rng(seed)
    parts: list[bytes] = []
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in sorted(shapes.items()):
        data = _bfloat16(_values(name, shape, source)).tobytes()
        head[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


def _values(name: str, shape: tuple[int, ...], source: np.random.Generator) -> NDArray[np.float32]:
    if "norm" in name or name.endswith(".D"):
        return np.ones(shape, dtype=np.float32)
    if name.endswith("A_log"):
        return np.log(np.arange(1, shape[0] + 1, dtype=np.float32))
    return (source.standard_normal(shape) * _SPREAD).astype(np.float32)


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper half of each number."""
    return (values.view(np.uint32) >> 16).astype(np.uint16)
