"""Rows: tiny models of other architectures, with random weights (scripts/tiny_models.py)."""

from __future__ import annotations

from typing import Any

from matrix_rows.row import STORE, Act, Connector, Row, prompts

FIRST = prompts("models", 300, 200, 50)
LATER = [FIRST[0] + prompts("models go on", 40)[0], FIRST[1] + prompts("models go on", 20)[0]]
"""Two of them go on: what was stored is loaded."""


def _asked(some: list[list[int]]) -> Act:
    return {"do": "generate", "prompts": some, "params": {"max_tokens": 6}, "together": False}


ACTS = (_asked(FIRST), _asked(LATER))
CHUNKED: dict[str, Any] = {"max_num_batched_tokens": 128}


def _group_store(name: str, *first: str, at_rest: bool = True) -> Connector:
    return Connector(name, "group_store", extra={"path": STORE}, first=frozenset(first), at_rest=at_rest)


WHOLE = _group_store("GroupStore")
FIRST_CHUNK = _group_store("FirstChunkGroupStore", "first-chunk-only")
SHORT = _group_store("ShortGroupStore", "slots-short")
FIRST_GROUP = _group_store("FirstGroupStore", "kv-misplaced", at_rest=False)
"""Takes the block ids of the first group for the layers of all."""


def _row(name: str, title: str, planted: Connector = FIRST_CHUNK, **more: Any) -> Row:
    engine = {**CHUNKED, **more.pop("engine", {})}
    shows = more.pop("shows", ("loaded",))
    more.setdefault("model", name)
    return Row(name, title, more.pop("acts", ACTS), engine=engine, shows=shows, healthy=WHOLE,
               planted=planted, **more)  # fmt: skip


MLA: dict[str, Any] = {"block_size": 16}
"""The block of its kernel; it computes each prompt in one chunk."""

POOLED = ({"do": "embed", "prompts": FIRST}, {"do": "embed", "prompts": LATER})
HEARD = ({"do": "hear", "prompts": [one[:40] for one in FIRST], "params": {"max_tokens": 6}, "seconds": 2},)
ENCODER: dict[str, Any] = {"runner": "pooling", "max_model_len": 512, "max_num_batched_tokens": 512}

ROWS: tuple[Row, ...] = (
    _row("gqa", "Dense, grouped queries (Llama)", model="tiny"),
    _row("kv-fp8", "KV cache quantised to fp8 (Llama)", model="tiny", engine={"kv_cache_dtype": "fp8"}),
    _row("mixtral", "Mixture of experts (Mixtral)"),
    _row("qwen2-moe", "Mixture of experts with a shared one (Qwen2-MoE)"),
    _row("deepseek-v2", "MLA (DeepSeek-V2)", SHORT, engine=MLA),
    _row("deepseek-v3", "MLA with V3's router (DeepSeek-V3)", SHORT, engine=MLA),
    _row("gemma3", "Sliding window and full attention (Gemma-3)", FIRST_GROUP),
    _row("gpt-oss", "Sliding window and full attention, with sinks (GPT-OSS)", FIRST_GROUP),
    _row("gemma3n", "Layers that share a KV cache (Gemma-3n)", FIRST_GROUP),
    _row("granite-hybrid", "Mamba2 and attention (Granite-4)"),
    _row("bamba", "Mamba2 and attention (Bamba)",
         note="no configuration changes that: vLLM's own Bamba ended with 0.23.0 "
              "(_PREVIOUSLY_SUPPORTED_MODELS of its registry), and Transformers' one is not laid out for it"),
    _row("jamba", "Mamba1 and attention (Jamba)",
         note="no configuration changes that: the kernel of Mamba1 is not in the CPU build"),
    _row("qwen3-next", "Linear and full attention (Qwen3-Next)", engine={"dtype": "bfloat16"}),
    _row("pooling", "Pooling (Llama as an embedder)", model="tiny", acts=POOLED,
         engine={"runner": "pooling", "convert": "embed"}),
    _row("encoder-only", "An encoder alone (BERT)", WHOLE, model="bert", acts=POOLED[:1], engine=ENCODER,
         shows=(), note="it keeps no KV: there is nothing to save, and no fault to plant"),
    _row("whisper", "Cross attention (Whisper)", acts=HEARD, shows=(),
         engine={"max_model_len": 448, "max_num_batched_tokens": 2048},
         note="no configuration changes that: vLLM's scheduler refuses a connector with any encoder and "
              "decoder"),
)  # fmt: skip
