"""One engine of `scripts/gpu_check.py`, in a process of its own: `drive.py SPEC`, a JSON file.

`job` of the spec: `case` generates once, `profile` again under torch's profiler, `parts` some blocks with the
agent's parts clocked, `blocks` one block for each line on stdin, answered with its seconds. What it found
goes to the spec's `result` file.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import step_parts

from gpu.cases import BLOCK_STEPS, OP, OWN, SAVE_RANGE

HOST_BYTES = 256 << 20
PARTS_BLOCKS = 20
NEED_PREFIX_CACHE = ("SimpleCPUOffloadConnector",)
"""Connectors that switch themselves off without the engine's own prefix cache."""


def engine(spec: dict[str, Any]) -> Any:
    from vllm import LLM

    options: dict[str, Any] = {}
    if spec["mode"] == "eager":
        options["enforce_eager"] = True
    else:
        options["compilation_config"] = {
            "cudagraph_mode": spec["mode"],
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 256, 512],
        }
    if spec["backend"]:
        options["attention_backend"] = spec["backend"]
    cpu = spec["device"] == "cpu"
    return LLM(
        model=spec["model"],
        dtype="float32" if cpu else "bfloat16",
        max_model_len=1024,
        max_num_seqs=64,
        block_size=32 if cpu else 16,
        gpu_memory_utilization=0.2,
        kv_cache_memory_bytes=256 << 20,
        enable_prefix_caching=spec["connector"] in NEED_PREFIX_CACHE,
        disable_log_stats=True,
        seed=0,
        kv_transfer_config=transfer_config(spec),
        **options,
    )


def transfer_config(spec: dict[str, Any]) -> dict[str, Any]:
    if spec["connector"] != OWN:
        of_host = {"cpu_bytes_to_use": HOST_BYTES}
        return {"kv_connector": spec["connector"], "kv_role": "kv_both", "kv_connector_extra_config": of_host}
    return {
        "kv_connector": OWN,
        "kv_connector_module_path": "gpu_layer_store",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": spec["store"], "declares": spec["declares"]},
    }


def generate(llm: Any, batch: int, seed: int, output: int) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in answers(llm, batch, seed, output)]


def answers(llm: Any, batch: int, seed: int, output: int) -> list[Any]:
    """vLLM's own results, of prompts that the seed decides."""
    from vllm import SamplingParams

    rng = random.Random(seed)
    prompts = [{"prompt_token_ids": [rng.randrange(10, 500) for _ in range(97)]} for _ in range(batch)]
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    return list(llm.generate(prompts, params, use_tqdm=False))


def given_back(llm: Any) -> int:
    """Tokens that the engine did not compute when the same prompts came once more. Its own prefix cache is
    off, or emptied: the connector gave them."""
    generate(llm, 1, 2, 4)  # steps in which what was saved comes to its end
    llm.reset_prefix_cache()
    return sum(int(one.num_cached_tokens or 0) for one in answers(llm, 4, 0, 12))


def profiled(llm: Any, spec: dict[str, Any]) -> dict[str, Any]:
    import torch
    from torch.profiler import ProfilerActivity, profile

    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if spec["device"] != "cpu" else [])
    began = time.perf_counter_ns()
    with profile(activities=kinds) as trace:
        generate(llm, 4, 1, 8)
        if spec["device"] != "cpu":
            torch.cuda.synchronize()
    ended = time.perf_counter_ns()
    generate(llm, 1, 2, 4)  # steps in which the last events of the window are read
    # By the host's side of each range: kernels count where they were launched.
    rows = {one.key: one for one in trace.key_averages() if "CPU" in str(one.device_type)}
    found: dict[str, Any] = {"window": [began, ended]}
    for name, key in (("op", f"vllm::{OP}"), ("save", SAVE_RANGE)):
        row = rows.get(key)
        found[name] = {
            "calls": row.count if row else 0,
            "device_ns": row.device_time_total * 1000 if row else 0,
        }
    return found


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's own prints must not mix with the answers
    if spec["job"] == "parts":
        step_parts.clock_parts()  # before vLLM is imported
    llm = engine(spec)
    result: dict[str, Any] = {}
    if spec["job"] == "parts":
        for number in range(PARTS_BLOCKS):
            generate(llm, 8, number, BLOCK_STEPS)
        result["parts"] = step_parts.medians()
    elif spec["job"] == "blocks":
        print("ready", file=out, flush=True)
        for number, line in enumerate(sys.stdin):
            began = time.perf_counter()
            tokens = generate(llm, int(line), number, BLOCK_STEPS)
            figures = {"seconds": time.perf_counter() - began, "tokens": tokens}
            print(json.dumps(figures), file=out, flush=True)
    else:
        generate(llm, 4, 0, 12)
        if spec["job"] == "profile":
            result["profile"] = profiled(llm, spec)
        if spec["connector"] != OWN:
            result["counts"] = {"loaded": given_back(llm)}
    import gpu_layer_store
    import torch
    import vllm

    result = {"counts": gpu_layer_store.COUNTS, "vllm": vllm.__version__, "torch": torch.__version__} | result
    Path(spec["result"]).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
