"""One engine of two, which hand requests over in a file as a proxy would; exit code 0.

python prefill_decode.py kv_producer|kv_consumer MODEL STORE HANDED_OVER

What the producer stored of its second prompt is gone when it ends.
"""

import json
import random
import shutil
import sys
from pathlib import Path

from vllm import LLM, SamplingParams

LENGTHS = (600, 200)


def main() -> None:
    role, model, store, handed_over = sys.argv[1:]
    Path(store).mkdir(exist_ok=True)
    engine = LLM(
        model=model,
        enforce_eager=True,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        block_size=32,
        enable_prefix_caching=False,
        kv_transfer_config={
            "kv_connector": "HandsOver",
            "kv_connector_module_path": "hands_over",
            "kv_role": role,
            "engine_id": f"engine of {role}",
            "kv_connector_extra_config": {"shared_storage_path": store},
        },
    )
    rng = random.Random(1)
    prompts = [[rng.randrange(10, 500) for _ in range(length)] for length in LENGTHS]
    params = [{"do_remote_decode": True}] * len(prompts)
    if role == "kv_consumer":
        params = json.loads(Path(handed_over).read_text())
    returned = []
    for prompt, given in zip(prompts, params, strict=True):
        before = set(Path(store).iterdir())
        sampling = SamplingParams(
            temperature=0,
            max_tokens=1 if role == "kv_producer" else 4,
            ignore_eos=True,
            extra_args={"kv_transfer_params": given},
        )
        (output,) = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        returned.append(output.kv_transfer_params)
    if role == "kv_producer":
        Path(handed_over).write_text(json.dumps(returned))
        for folder in set(Path(store).iterdir()) - before:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
