"""What a workload may do with an engine: each act's function gets the ``LLM`` and the act.

All return the tokens of each sequence, in the order in which they were asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import drive

Act = dict[str, Any]
Answers = list[list[int]]


def generate(llm: Any, act: Act) -> Answers:
    """``prompts``, ``together`` (or one after another), ``params`` (of the sampling), ``adapter`` (folder of
    a LoRA), ``choice`` (what the output must be one of), and by prompt ``salts`` and ``priorities``."""
    salts = act.get("salts") or [None] * len(act["prompts"])
    prompts = [
        {"prompt_token_ids": prompt, **({"cache_salt": salt} if salt else {})}
        for prompt, salt in zip(act["prompts"], salts, strict=True)
    ]
    return _ask(llm, act, prompts)


def embeds(llm: Any, act: Act) -> Answers:
    """The prompts as vectors, of a width of ``hidden``; the same each time."""
    import torch

    source = torch.Generator().manual_seed(20261122)
    shapes = [(len(prompt), act["hidden"]) for prompt in act["prompts"]]
    return _ask(llm, act, [{"prompt_embeds": torch.randn(shape, generator=source)} for shape in shapes])


def _ask(llm: Any, act: Act, prompts: list[Any]) -> Answers:
    more: dict[str, Any] = {"use_tqdm": False}
    if "priorities" in act:
        more["priority"] = act["priorities"]
    if "adapter" in act:
        from vllm.lora.request import LoRARequest

        more["lora_request"] = LoRARequest("adapter", 1, act["adapter"])
    batches = [prompts] if act.get("together", True) else [[prompt] for prompt in prompts]
    outputs = [output for batch in batches for output in llm.generate(batch, sampling(act), **more)]
    return [list(sequence.token_ids) for output in outputs for sequence in output.outputs]


def sampling(act: Act) -> Any:
    from vllm import SamplingParams

    fixed: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    if "choice" in act:
        from vllm.sampling_params import StructuredOutputsParams

        choice = StructuredOutputsParams(choice=act["choice"])
        fixed.update(structured_outputs=choice, ignore_eos=False, detokenize=True)
    return SamplingParams(**{**fixed, **act.get("params", {})})


def beam(llm: Any, act: Act) -> Answers:
    """``prompts`` with a beam of ``width``, ``max_tokens``."""
    from vllm.sampling_params import BeamSearchParams

    params = BeamSearchParams(beam_width=act["width"], max_tokens=act["max_tokens"], ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt} for prompt in act["prompts"]]
    outputs = llm.beam_search(prompts, params)
    return [list(sequence.tokens) for output in outputs for sequence in output.sequences]


def leave(llm: Any, act: Act) -> Answers:
    """All requests are aborted after ``steps`` engine steps."""
    prompts = [{"prompt_token_ids": prompt} for prompt in act["prompts"]]
    return drive.leave(llm, prompts, sampling(act), act["steps"])


def give_up(llm: Any, act: Act) -> Answers:
    """What has no answer after some ``seconds`` is aborted."""
    prompts = [{"prompt_token_ids": prompt} for prompt in act["prompts"]]
    return drive.give_up(llm, prompts, sampling(act), act["seconds"])


def idle(llm: Any, act: Act) -> Answers:
    """Some engine ``steps`` with nothing to compute: what finished is told to the workers."""
    for _ in range(act["steps"]):
        llm.llm_engine.step()
    return []


def reset(llm: Any, act: Act) -> Answers:
    """The engine's own prefix cache is emptied."""
    if not llm.reset_prefix_cache():
        raise RuntimeError("the prefix cache was not reset")
    return []


def sleep(llm: Any, act: Act) -> Answers:
    """The engine goes to sleep (``level``), and wakes up."""
    llm.sleep(level=act["level"])
    llm.wake_up()
    return []


def embed(llm: Any, act: Act) -> Answers:
    """``prompts`` as the vectors that a pooling model makes of them, in thousandths; one after another."""
    outputs = []
    for prompt in act["prompts"]:
        outputs += llm.encode([{"prompt_token_ids": prompt}], pooling_task="embed", use_tqdm=False)
    return [[round(1000 * float(number)) for number in output.outputs.data] for output in outputs]


def hear(llm: Any, act: Act) -> Answers:
    """``prompts`` of a decoder, each with ``seconds`` of noise for its encoder; the same each time."""
    import numpy

    noise = numpy.random.default_rng(20261122).standard_normal(16000 * act["seconds"]).astype("float32")
    audio = {"prompt": "", "multi_modal_data": {"audio": (noise, 16000)}}
    asked = [{"encoder_prompt": audio, "decoder_prompt": {"prompt_token_ids": one}} for one in act["prompts"]]
    return _ask(llm, {**act, "together": False}, asked)


def listen(llm: Any, act: Act) -> Answers:
    """``prompts``, each with a sound (noise, made of its number in ``sounds``) in the place of a token."""
    import numpy

    asked = []
    for prompt, number in zip(act["prompts"], act["sounds"], strict=True):
        noise = numpy.random.default_rng(number).standard_normal(40960).astype("float32")
        asked.append({"prompt_token_ids": prompt, "multi_modal_data": {"audio": (noise, 16000)}})
    return _ask(llm, act, asked)


def look(llm: Any, act: Act) -> Answers:
    """``prompts``, each with an image (noise, made of its number in ``images``) in the place of a token."""
    import numpy
    from PIL import Image

    asked = []
    for prompt, number in zip(act["prompts"], act["images"], strict=True):
        noise = numpy.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype="uint8")
        asked.append({"prompt_token_ids": prompt, "multi_modal_data": {"image": Image.fromarray(noise)}})
    return _ask(llm, act, asked)


ACTS: dict[str, Callable[[Any, Act], Answers]] = {
    "beam": beam,
    "embeds": embeds,
    "generate": generate,
    "embed": embed,
    "hear": hear,
    "give up": give_up,
    "idle": idle,
    "leave": leave,
    "listen": listen,
    "look": look,
    "reset": reset,
    "sleep": sleep,
}
