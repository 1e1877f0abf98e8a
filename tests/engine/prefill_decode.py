"""One engine of two, asked line by line, as a proxy asks; exit code 0.

python prefill_decode.py kv_producer|kv_consumer MODEL STORE

A line of stdin is ``{"prompt": [token id, ...], "params": kv_transfer_params}``; each is answered by a line
of stdout: ANSWER and the kv_transfer_params that came back. It ends where stdin ends.
"""

import json
import sys

from vllm import LLM, SamplingParams

ANSWER = "prefill_decode: "


def main() -> None:
    role, model, store = sys.argv[1:]
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
    for line in sys.stdin:
        asked = json.loads(line)
        sampling = SamplingParams(
            temperature=0,
            max_tokens=1 if role == "kv_producer" else 4,
            ignore_eos=True,
            extra_args={"kv_transfer_params": asked["params"]},
        )
        prompt = {"prompt_token_ids": asked["prompt"]}
        (output,) = engine.generate([prompt], sampling, use_tqdm=False)
        print(f"\n{ANSWER}{json.dumps(output.kv_transfer_params)}", flush=True)


if __name__ == "__main__":
    main()
