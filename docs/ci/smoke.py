"""A connector's smoke test for CI: prompts in, the same prompts again. Copy it and change the first lines.

Run by ``scripts/connector_ci.py`` of kvtrace (or its GitHub action), which makes the tiny model.
"""

from __future__ import annotations

import json
import os
import random
import tempfile

CONNECTOR = os.environ.get("SMOKE_CONNECTOR", "MyStore")
MODULE = os.environ.get("SMOKE_MODULE", "my_store.connector")  # None for a connector that vLLM brings
BLOCK = 32  # CPU attention wants multiples of 32

if __name__ == "__main__":  # vLLM starts processes that import this file
    from vllm import LLM, SamplingParams

    llm = LLM(
        os.environ["KVTRACE_TINY_MODEL"],
        enforce_eager=True,
        block_size=BLOCK,
        max_model_len=1024,
        enable_prefix_caching=False,  # or vLLM reuses what the connector should load
        kv_transfer_config={
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": MODULE,
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "path": tempfile.mkdtemp(prefix="smoke-store-"),  # empty: no earlier run decides this one
                **json.loads(os.environ.get("SMOKE_EXTRA", "{}")),
            },
        },
    )
    rng = random.Random(7)  # the same prompts in every run: shares can be compared
    prompts = [{"prompt_token_ids": [rng.randrange(10, 500) for _ in range(n)]} for n in (64, 128, 320, 500)]
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)  # the same length of answers, too
    first = llm.generate(prompts, params)
    again = llm.generate(prompts, params)  # this time from the connector
    assert len(first) == len(again) == len(prompts)
