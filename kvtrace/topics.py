"""What people ask about vLLM and KV connectors when few KV blocks are saved: a short page each, for
``kvtrace docs``. Data only."""

from __future__ import annotations

from typing import NamedTuple


class Topic(NamedTuple):
    """``names``: other words for it; ``answer``: whole sentences; ``look``: where a run shows it; ``causes``:
    the findings that it may end in."""

    id: str
    title: str
    names: tuple[str, ...]
    answer: tuple[str, ...]
    look: str
    causes: tuple[str, ...]


TOPICS: tuple[Topic, ...] = (
    Topic(
        "unified_attention",
        "Was unified_attention called, and by which way?",
        ("unified_attention_with_output", "unified_mla_attention", "attention-ops"),
        (
            "vLLM computes attention in one custom op a layer: unified_attention_with_output, and "
            "unified_mla_attention_with_output for MLA. The ops without _with_output are gone from 0.20.0, "
            "so that a search for unified_attention finds nothing there.",
            "The op is a Python function. The attention backend (FLASH_ATTN, FLASHINFER, CPU_ATTN) is called "
            "inside it: no backend goes past it.",
            "From 0.11.1 on the function has the connector's hooks around it: wait_for_layer_load before the "
            "layer, save_kv_layer after it. Where it does not run in Python, neither do they.",
        ),
        "kvtrace explain names the op and the steps in which it ran; -v has it layer by layer (Coverage).",
        ("layer-not-hooked", "direct-call-bypass", "full-cudagraph-replay"),
    ),
    Topic(
        "save_kv_layer",
        "Did save_kv_layer fire, and did it do something?",
        ("save-kv-layer", "wait_for_save"),
        (
            "vLLM calls save_kv_layer on every layer in every step, also where there is nothing to save. "
            "That it was called says nothing: what counts is whether the step's metadata names KV to save.",
            "Many connectors do nothing in it and save in wait_for_save, or in threads of their own.",
        ),
        "kvtrace explain says how often it was called, and how often with KV to save.",
        ("saves-elsewhere", "below-save-granularity", "stored-nothing", "hook-raised"),
    ),
    Topic(
        "prefix-caching",
        "Does prefix caching matter here?",
        ("prefix-cache", "enable-prefix-caching", "no-enable-prefix-caching", "enable_prefix_caching"),
        (
            "A connector does not need vLLM's prefix caching: with it off, all prompt tokens are computed "
            "and may be saved.",
            "With it on, tokens that this GPU still has are reused: they are not computed again and not "
            "offered to the connector again. That takes nothing from the store if they were stored when they "
            "were computed; where they never were, it hides the loss.",
            "It also answers before the connector does: what the GPU has is not looked up in the store.",
        ),
        "kvtrace explain says in its second line whether it is on, and in the table what was reused from the "
        "GPU.",
        ("local-hit", "already-stored", "never-looked-up"),
    ),
    Topic(
        "cuda-graphs",
        "Do CUDA graphs and --enforce-eager matter here?",
        ("enforce-eager", "enforce_eager", "cudagraph", "cuda-graph", "cudagraph_mode", "graphs"),
        (
            "A step that is replayed as one FULL CUDA graph runs no Python in its layers: neither the "
            "attention op's function nor save_kv_layer. vLLM uses FULL graphs for decode steps mostly, so "
            "that prompts are saved all the same and generated tokens are not.",
            "PIECEWISE graphs leave attention, and the hooks with it, in Python. A connector that saves "
            "layer by layer returns True from requires_piecewise_for_cudagraph (vLLM 0.17.1 and later).",
            "--enforce-eager switches all graphs off: then they are not the reason.",
        ),
        "kvtrace explain says in its second line which graphs were used; -v has the steps in each mode.",
        ("full-cudagraph-replay", "captured-not-run"),
    ),
    Topic(
        "use_direct_call",
        "Does use_direct_call go past the hooks?",
        ("direct-call", "direct_call", "use-direct-call"),
        (
            "Where a platform has no opaque attention op, a layer calls the op's Python function directly "
            "and not through torch's dispatcher. On CUDA and CPU use_direct_call is False.",
            "Up to 0.14.1 such a call went to the backend, past the connector's hooks. From 0.15.0 on it "
            "calls the function with the hooks around it, so that nothing is lost; MLA layers still have "
            "none.",
        ),
        "kvtrace explain says in its second line whether layers are called directly.",
        ("direct-call-bypass",),
    ),
)


def find(name: str) -> Topic | None:
    """By its id or another word for it, with - and _ alike."""
    wanted = name.strip("-").replace("_", "-").lower()
    for topic in TOPICS:
        if wanted in {one.replace("_", "-").lower() for one in (topic.id, *topic.names)}:
            return topic
    return None
