"""Prompts computed by one engine and continued by another that gets their KV: ``python pair.py SPEC.json``.

Knows nothing of kvtrace. SPEC as for work.py; each prompt is computed by the first engine for one token,
which says where its KV is to be had, and goes to the second one with that.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

ASKED = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def _engine(options: dict[str, Any]) -> Any:
    from vllm import LLM

    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = _free_port()
    return LLM(**options, disable_log_stats=True)


def _ask(engine: Any, prompt: list[int], max_tokens: int, params: Any) -> Any:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False,
        extra_args={"kv_transfer_params": params},
    )  # fmt: skip
    return engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0]


def main() -> int:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    engines = [_engine(spec["llm"]), _engine(spec["llm"])]
    answers: list[list[int]] = []
    error = ""
    try:
        for part in spec["rounds"]:
            for prompt in part["prompts"]:
                first = _ask(engines[0], prompt, 1, ASKED)
                second = _ask(engines[1], prompt, part["max_tokens"], first.kv_transfer_params)
                answers.append(list(second.outputs[0].token_ids))
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    Path(spec["outcome"]).write_text(json.dumps({"answers": answers, "error": error}), encoding="utf-8")
    for engine in engines:
        engine.llm_engine.engine_core.shutdown()
    return 1 if error else 0


if __name__ == "__main__":
    sys.exit(main())
