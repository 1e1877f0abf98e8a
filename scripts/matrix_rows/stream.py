"""Prompts that come in parts, a session each: ``python -m matrix_rows.stream SPEC.json``.

Knows nothing of kvtrace. SPEC as for play.py, of one engine; of each prompt of its acts the engine gets
``part`` tokens, answers, gets the next ones, and so on, one prompt after another.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

from matrix_rows import play


async def answer(engine: Any, name: str, prompt: list[int], act: dict[str, Any]) -> list[int]:
    """One session: its tokens, of all its parts."""
    from vllm import SamplingParams
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind

    heard = asyncio.Event()
    size, answers = act["part"], act["params"]["max_tokens"]

    async def parts() -> AsyncIterator[Any]:
        for at in range(0, len(prompt), size):
            heard.clear()
            yield StreamingInput(prompt={"type": "token", "prompt_token_ids": prompt[at : at + size]})
            await heard.wait()

    params = SamplingParams(
        temperature=0.0, max_tokens=answers, ignore_eos=True, detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip
    tokens: list[int] = []
    async for output in engine.generate(parts(), params, name):
        tokens += output.outputs[0].token_ids
        if len(tokens) % answers == 0:  # this part is answered
            heard.set()
    return tokens


async def work(spec: dict[str, Any]) -> play.Answers:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**spec["engines"][0], disable_log_stats=True))
    answers: play.Answers = []
    try:
        for at, act in enumerate(spec["acts"]):
            for number, prompt in enumerate(act["prompts"]):
                answers.append(await answer(engine, f"session-{at}-{number}", prompt, act))
    finally:
        engine.shutdown()
    return answers


def main() -> int:
    spec = play.read_spec()
    return 1 if play.record(spec, lambda: asyncio.run(work(spec))) else 0


if __name__ == "__main__":
    sys.exit(main())
