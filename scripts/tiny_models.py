#!/usr/bin/env python3
"""Make a tiny model of a kind by its name, with real random weights and a tokenizer: locally, no network.

    python scripts/tiny_models.py KIND OUT
    python scripts/tiny_models.py --list

One row of the table is one kind of architecture, as far as it decides how vLLM lays out its KV cache: what
a layer keeps for a token, which layers own a KV cache, and which groups of layers share block tables. The
shapes are the smallest that vLLM's kernels for the CPU take (a head is 64 wide). The dense kind is
``scripts/tiny_model.py``, whose vocabulary and way to make a folder all share.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_model import RECIPE, SPECIAL, make_folder, words, write_tokenizer

SEED = 20261122
PLACEHOLDER = RECIPE["vocab"] - 1
"""Token id that stands for a sound or an image in a prompt: the last word."""

COMMON: dict[str, Any] = {
    "vocab_size": RECIPE["vocab"],
    "hidden_size": RECIPE["hidden"],
    "intermediate_size": RECIPE["intermediate"],
    "num_hidden_layers": RECIPE["layers"],
    "num_attention_heads": RECIPE["heads"],
    "num_key_value_heads": RECIPE["kv_heads"],
    "head_dim": RECIPE["head_dim"],
    "max_position_embeddings": RECIPE["max_position"],
    "initializer_range": RECIPE["initializer_range"],
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        config: class of its configuration in transformers.
        model: class of the model there.
        says: what is special about its KV cache.
        settings: of the configuration, beside and over COMMON.
        without: settings of COMMON that its configuration has not.
        extra: files that its folder needs beside weights and tokenizer, as {name: JSON value}.
        placeholders: words that are one token wherever they stand, without spaces around them.
        renamed: beginnings of the weights' names, as transformers saves them, and as vLLM reads them.
    """

    config: str
    model: str
    says: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    placeholders: tuple[str, ...] = ()


_MLA = {
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "head_dim": 64,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}

_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 32,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 64,
}

WHISPER_SOUND = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "chunk_length": 30,
    "feature_size": 80,
    "hop_length": 160,
    "n_fft": 400,
    "sampling_rate": 16000,
    "padding_side": "right",
    "padding_value": 0.0,
    "return_attention_mask": False,
}

IMAGE_SIDE, PATCH_SIDE = 64, 8
"""Pixels: an image is 8 x 8 patches."""
_VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "image_size": IMAGE_SIDE,
    "patch_size": PATCH_SIDE,
}
"""Of a small vision tower, in all of them."""
AROUND_IMAGES = ("<fake_token_around_image>", "<global-img>", "<image>", "<end_of_utterance>")
"""Words of Idefics3's processor, behind the vocabulary."""

KINDS: dict[str, Kind] = {
    "mixtral": Kind(
        "MixtralConfig",
        "MixtralForCausalLM",
        "a mixture of experts; its attention is that of a dense model",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen2-moe": Kind(
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        "a mixture of experts with a shared one",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "deepseek-v2": Kind(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        "MLA: one latent a token and layer, no K and V of heads",
        _MLA | {"topk_method": "greedy"},
    ),
    "deepseek-v3": Kind(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        "MLA, with the router of V3",
        _MLA | {"q_lora_rank": 64, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    "gemma3": Kind(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        "layers with a sliding window beside layers with full attention: two kinds of groups",
        {
            "num_hidden_layers": 6,
            "sliding_window": 128,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
            "query_pre_attn_scalar": 64,
            "hidden_activation": "gelu_pytorch_tanh",
        },
    ),
    "gpt-oss": Kind(
        "GptOssConfig",
        "GptOssForCausalLM",
        "sliding and full layers in turn, with attention sinks",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gemma3n": Kind(
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        "the last layers read the KV cache of earlier ones and own none",
        {
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "tie_word_embeddings": True,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "intermediate_size": [256] * 6,
            "activation_sparsity_pattern": [0.0] * 6,
            "vocab_size_per_layer_input": RECIPE["vocab"],
            "hidden_size_per_layer_input": 64,
            "laurel_rank": 16,
            "altup_num_inputs": 2,
        },
    ),
    "granite-hybrid": Kind(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        "Mamba2 layers keep one state a request; attention layers keep KV a token",
        _MAMBA2
        | {
            "layer_types": ["mamba", "attention", "mamba", "attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 256,
            "position_embedding_type": "nope",
        },
        without=("head_dim",),
    ),
    "bamba": Kind(
        "BambaConfig",
        "BambaForCausalLM",
        "Mamba2 layers and attention layers",
        _MAMBA2 | {"attn_layer_indices": [1, 3]},
        without=("head_dim",),
    ),
    "jamba": Kind(
        "JambaConfig",
        "JambaForCausalLM",
        "Mamba1 layers and attention layers, experts in some",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "mamba_d_state": 16,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
        without=("head_dim",),
    ),
    "qwen3-next": Kind(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        "layers with linear attention keep one state a request",
        {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "decoder_sparse_step": 1,
        },
    ),
    "whisper": Kind(
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        "cross attention: its layers keep KV of the encoder's output, not of prompt tokens",
        {
            "d_model": 128,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 256,
            "decoder_ffn_dim": 256,
            "num_mel_bins": 80,
            "max_source_positions": 1500,
            "max_target_positions": 448,
            "init_std": RECIPE["initializer_range"],
            "decoder_start_token_id": 1,
            "tie_word_embeddings": True,
        },
        without=(
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
            "initializer_range",
        ),
        extra={
            "preprocessor_config.json": {**WHISPER_SOUND, "processor_class": "WhisperProcessor"},
        },
    ),
    "qwen2-audio": Kind(
        "Qwen2AudioConfig",
        "Qwen2AudioForConditionalGeneration",
        "2.56 s of sound are 64 placeholder tokens in the prompt, all with one token id",
        {
            "text_config": COMMON | {"model_type": "qwen2", "num_attention_heads": 2},
            "audio_config": {
                "model_type": "qwen2_audio_encoder",
                "d_model": 64,
                "encoder_layers": 2,
                "encoder_attention_heads": 1,
                "encoder_ffn_dim": 128,
                "num_mel_bins": 80,
                "max_source_positions": 1500,
                "init_std": RECIPE["initializer_range"],
            },
            "audio_token_index": PLACEHOLDER,
            "tie_word_embeddings": False,
        },
        without=tuple(COMMON),
        extra={
            "preprocessor_config.json": {**WHISPER_SOUND, "processor_class": "Qwen2AudioProcessor"},
            "processor_config.json": {
                "processor_class": "Qwen2AudioProcessor",
                "audio_token": words()[PLACEHOLDER - len(SPECIAL)],
                "audio_bos_token": words()[0] + " ",
                "audio_eos_token": " " + words()[0],
            },
        },
        renamed={"language_model.model.model.": "language_model.model."},
        placeholders=(words()[PLACEHOLDER - len(SPECIAL)],),
    ),
    "llava": Kind(
        "LlavaConfig",
        "LlavaForConditionalGeneration",
        "an image is 64 placeholder tokens in the prompt, all with one token id",
        {
            "text_config": COMMON | {"model_type": "llama"},
            "vision_config": _VISION | {"model_type": "clip_vision_model", "projection_dim": 64},
            "image_token_index": PLACEHOLDER,
            "vision_feature_layer": -1,
            "tie_word_embeddings": False,
        },
        without=tuple(COMMON),
        extra={
            "preprocessor_config.json": {
                "image_processor_type": "CLIPImageProcessor",
                "processor_class": "LlavaProcessor",
                "size": {"shortest_edge": IMAGE_SIDE},
                "crop_size": {"height": IMAGE_SIDE, "width": IMAGE_SIDE},
            },
            "processor_config.json": {
                "processor_class": "LlavaProcessor",
                "image_token": words()[PLACEHOLDER - len(SPECIAL)],
                "patch_size": PATCH_SIDE,
                "num_additional_image_tokens": 1,
                "vision_feature_select_strategy": "default",
            },
        },
        renamed={"vision_tower.": "vision_tower.vision_model."},
        placeholders=(words()[PLACEHOLDER - len(SPECIAL)],),
    ),
    "idefics3": Kind(
        "Idefics3Config",
        "Idefics3ForConditionalGeneration",
        "as llava, with 16 placeholder tokens, and no need of torchvision",
        {
            "text_config": COMMON | {"model_type": "llama", "vocab_size": RECIPE["vocab"] + 64},
            "vision_config": _VISION | {"model_type": "idefics3_vision"},
            "image_token_id": RECIPE["vocab"] + AROUND_IMAGES.index("<image>"),
            "scale_factor": 2,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
        },
        without=tuple(COMMON),
        extra={
            "preprocessor_config.json": {
                "image_processor_type": "Idefics3ImageProcessor",
                "processor_class": "Idefics3Processor",
                "do_image_splitting": False,
                "size": {"longest_edge": IMAGE_SIDE},
                "max_image_size": {"longest_edge": IMAGE_SIDE},
            },
            "processor_config.json": {
                "processor_class": "Idefics3Processor",
                "image_seq_len": 16,
                "chat_template": "{% for m in messages %}{% for part in m.content %}"
                "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endfor %}",
            },
        },
        placeholders=AROUND_IMAGES,
    ),
    "bert": Kind(
        "BertConfig",
        "BertModel",
        "an encoder alone: no KV cache at all",
        {"num_attention_heads": 2},
        without=("num_key_value_heads", "head_dim", "tie_word_embeddings"),
    ),
}


def settings_of(kind: Kind) -> dict[str, Any]:
    """All that its configuration is made of."""
    common = {name: value for name, value in COMMON.items() if name not in kind.without}
    return common | dict(kind.settings)


def make_tiny(name: str, path: Path | str) -> Path:
    """Make the model of that kind at ``path`` unless it is there already, and return the path.

    Raises:
        KeyError: there is no such kind.
        FileExistsError: another folder is there.
    """
    kind = KINDS[name]
    recipe = {"version": 1, "seed": SEED, "kind": name, "config": kind.config, "settings": settings_of(kind)}

    def write(folder: Path) -> None:
        write_tokenizer(folder)
        if kind.placeholders:
            _set_apart(folder, kind.placeholders)
        _write_weights(folder, kind)
        for file, value in kind.extra.items():
            (folder / file).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")

    return make_folder(Path(path), recipe, write)


def _write_weights(path: Path, kind: Kind) -> None:
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = getattr(transformers, kind.config)(**settings_of(kind))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = getattr(transformers, kind.model)(config).to(torch.bfloat16)
    model.save_pretrained(path)
    if kind.renamed:
        _rename(path / "model.safetensors", kind.renamed)


def _set_apart(folder: Path, placeholders: tuple[str, ...]) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": list(placeholders)})
    tokenizer.save_pretrained(folder)


def _rename(file: Path, renamed: Mapping[str, str]) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(file)
    for old, new in renamed.items():
        weights = {
            new + name[len(old) :] if name.startswith(old) else name: one for name, one in weights.items()
        }
    save_file(weights, file, metadata={"format": "pt"})


def main() -> int:
    args = sys.argv[1:]
    if args == ["--list"]:
        for name, kind in KINDS.items():
            print(f"{name:16} {kind.says}")
        return 0
    if len(args) != 2 or args[0] not in KINDS:
        print(f"usage: python scripts/tiny_models.py KIND OUT\n  KIND: {', '.join(KINDS)}", file=sys.stderr)
        return 2
    try:
        print(make_tiny(args[0], args[1]))
    except OSError as error:
        print(f"tiny_models: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
