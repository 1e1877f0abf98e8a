"""Streaming input: prompts that come in parts, a session each, on the asynchronous engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sessions:
    """Some prompts, one after another: ``part`` tokens of one, ``max_tokens`` answered, the next ones."""

    prompts: list[list[int]]
    part: int
    max_tokens: int


def run(engine_args: dict[str, Any], asked: Iterable[Sessions]) -> list[list[int]]:
    """Returns the tokens of each prompt's answers, those of all its parts."""
    return asyncio.run(_work(engine_args, list(asked)))


async def _work(engine_args: dict[str, Any], asked: list[Sessions]) -> list[list[int]]:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args, disable_log_stats=True))
    answers: list[list[int]] = []
    try:
        for at, sessions in enumerate(asked):
            for number, prompt in enumerate(sessions.prompts):
                answers.append(await _answer(engine, f"session-{at}-{number}", prompt, sessions))
    finally:
        engine.shutdown()
    return answers


async def _answer(engine: Any, name: str, prompt: list[int], sessions: Sessions) -> list[int]:
    from vllm import SamplingParams
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind

    heard = asyncio.Event()

    async def parts() -> AsyncIterator[Any]:
        for at in range(0, len(prompt), sessions.part):
            heard.clear()
            yield StreamingInput(
                prompt={"type": "token", "prompt_token_ids": prompt[at : at + sessions.part]}
            )
            await heard.wait()

    params = SamplingParams(
        temperature=0.0, max_tokens=sessions.max_tokens, ignore_eos=True, detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip
    tokens: list[int] = []
    async for output in engine.generate(parts(), params, name):
        tokens += output.outputs[0].token_ids
        if len(tokens) % sessions.max_tokens == 0:  # this part is answered
            heard.set()
    return tokens
