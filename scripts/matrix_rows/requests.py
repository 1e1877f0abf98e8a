"""Rows: kinds of requests, and what may happen to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tiny_models import PLACEHOLDER

from matrix_rows.row import CHUNKS, MODEL, STORE, UNIT, Connector, Row, generate, prompts

PLAIN = generate("requests", 64, 160, 96, 256, together=False)
SOME = (96, 128, 224, 64)

SMALL: dict[str, Any] = {
    "max_model_len": 384, "max_num_batched_tokens": 32, "num_gpu_blocks_override": 13,
    "scheduler_reserve_full_isl": False,
}  # fmt: skip
"""So few blocks that a request is preempted for another one."""


def faulty(name: str, module: str, first: str) -> Connector:
    return Connector(name, module, extra=UNIT, first=frozenset({first}))


SLOW = Connector("SlowLoads", "loads", extra=UNIT)
TOLD = Connector("FinishedStore", "saves", extra=UNIT)


def _ends() -> tuple[Row, ...]:
    """What ends, or interrupts, a request."""
    leave = {"do": "leave", "steps": 6, "params": {"max_tokens": 200}}
    many = generate("unfinished", 64, 128, 192, 64, 128, 192, 64, 128, together=False)
    return (
        Row("preemption", "Preemption", (generate("preempted", 64, 320, max_tokens=40),), engine=SMALL,
            shows=("preempted",), planted=faulty("ForgetfulStore", "saves", "preempted-before-save")),
        Row("abort-prefill", "Abort while the prompt is computed",
            (PLAIN, {**leave, "prompts": prompts("leaving", 960), "steps": 4}), shows=("aborted",),
            engine={"max_num_batched_tokens": 64}),
        Row("abort-decode", "Abort in decode", (PLAIN, {**leave, "prompts": prompts("leaving", 128)}),
            shows=("aborted",), engine={"max_num_batched_tokens": 64}),
        Row("abort-load", "Abort during a load",
            (generate("loads", 128, 256), {**leave, "prompts": prompts("loads", 128, 256)[1:], "steps": 2},
             generate("loads", 128)), shows=("aborted", "loaded"),
            healthy=SLOW, planted=faulty("EarlyReturn", "loads", "load-not-injected"),
            note="healthy: each load takes a second, the client leaves in it"),
        Row("abort-save", "Abort during a save", (
            many, {**leave, "prompts": prompts("left", 128)}, {"do": "idle", "steps": 2}),
            shows=("aborted",), healthy=TOLD,
            planted=replace(faulty("UnfinishedStore", "saves", "save-never-finished"), at_rest=False),
            note="its blocks are held until the connector says that they are stored"),
    )  # fmt: skip


def _kinds() -> tuple[Row, ...]:
    """What a request asks for."""
    sampled = {"n": 2, "temperature": 0.8, "seed": 7}
    return (
        Row("two-answers", "Two answers to a prompt (n = 2)",
            (generate("n", *SOME, max_tokens=6, params=sampled),), at_rest=False),
        Row("beam", "Beam search", (
            {"do": "beam", "prompts": prompts("beam", *SOME), "width": 2, "max_tokens": 4},), at_rest=False),
        Row("prompt-logprobs", "Log probabilities of the prompt",
            (generate("logprobs", *SOME, max_tokens=4, params={"prompt_logprobs": 1}),)),
        Row("priority", "Priority scheduling",
            (generate("priority", *SOME, max_tokens=6, priorities=[3, 2, 1, 0]),),
            engine={"scheduling_policy": "priority", "max_num_seqs": 2}),
        Row("structured", "Structured output",
            (generate("structured", *SOME, max_tokens=6, choice=["baba bebe", "bibi bobo"]),)),
        Row("lora", "LoRA", (generate("lora", *SOME, max_tokens=4, adapter=f"{MODEL}/adapter"),
                             generate("no lora", *SOME, max_tokens=4)),
            model="lora", engine={"enable_lora": True, "max_lora_rank": 8}),
        Row("prompt-embeds", "Prompts as vectors",
            ({**generate("embeds", *SOME, max_tokens=4), "do": "embeds", "hidden": 128}, PLAIN),
            engine={"enable_prompt_embeds": True},
            healthy=Connector("Mute", "strangers", extra={"shelf": STORE}),
            planted=replace(CHUNKS, first=frozenset({"metadata-has-no-store"})),
            note="planted: a connector that keys by token ids, of which these prompts have none"),
        Row("cache-salt", "Cache salt", (
            generate("salt", 128, 192, max_tokens=2, salts=["one", "one"]),
            generate("salt", 128, 192, max_tokens=2, salts=["two", "two"])),
            engine={"enable_prefix_caching": True}, shows=("loaded",)),
    )  # fmt: skip


def _sounds_and_images() -> tuple[Row, ...]:
    """Two prompts with the same token ids and different sounds or images, and one of them again."""
    (text,) = prompts("sounds", 96)
    one = [*text[:40], PLACEHOLDER, *text[40:]]
    asked = {"prompts": [one, one, one], "together": False, "params": {"max_tokens": 4}}
    heard = {**asked, "do": "listen", "sounds": [1, 2, 1]}
    seen = {**asked, "do": "look", "images": [1, 2, 1]}
    return (
        Row("multimodal", "Sounds in prompts (Qwen2-Audio): equal tokens, different sounds", (heard,),
            model="qwen2-audio", shows=("loaded",), healthy=Connector("SoundStore", "loads", extra=UNIT),
            engine={"max_num_batched_tokens": 1024, "limit_mm_per_prompt": {"audio": 1}},
            planted=replace(CHUNKS, first=frozenset({"kv-load-wrong"}), at_rest=False),
            note="planted: a connector that keys by token ids, which are the same for every sound"),
        Row("images", "Images in prompts (LLaVA): equal tokens, different images", (seen,),
            model="llava", images=True, shows=("loaded",),
            healthy=Connector("SoundStore", "loads", extra=UNIT),
            engine={"max_num_batched_tokens": 1024, "limit_mm_per_prompt": {"image": 1}},
            planted=replace(CHUNKS, first=frozenset({"kv-load-wrong"}), at_rest=False),
            note="planted: a connector that keys by token ids, which are the same for every image. "
                 "torchvision is fetched for this row alone, and runs without its compiled operators"),
    )  # fmt: skip


def _engine() -> tuple[Row, ...]:
    """What is done to the engine between requests."""
    again = (PLAIN, {"do": "reset"}, PLAIN)
    return (
        Row("reset-prefix-cache", "Prefix cache reset", again, engine={"enable_prefix_caching": True},
            shows=("loaded",)),
        Row("sleep-wake", "Sleep and wake", (PLAIN, {"do": "sleep", "level": 1}, PLAIN),
            engine={"enable_sleep_mode": True}, shows=("loaded",)),
        Row("pause-wake", "Scheduling paused and resumed (sleep level 0)",
            (PLAIN, {"do": "sleep", "level": 0}, PLAIN), shows=("loaded",)),
    )  # fmt: skip


def _streams() -> tuple[Row, ...]:
    parts = {**generate("streams", 96, 160, max_tokens=3), "part": 64}
    return (
        Row("streaming-input", "Streaming input: prompts in parts", (parts,), how="stream"),
    )  # fmt: skip


ROWS: tuple[Row, ...] = (*_ends(), *_kinds(), *_sounds_and_images(), *_engine(), *_streams())
