"""One engine of two, asked line by line, as a proxy asks; exit code 0.

python prefill_decode.py kv_producer|kv_consumer MODEL STORE

A line of stdin is ``{"prompt": [token id, ...], "params": kv_transfer_params}``; each is answered by a line
of stdout: ANSWER and the kv_transfer_params that came back. It ends where stdin ends.
"""

import json
import sys

from small_engine import start, storing
from vllm import SamplingParams

ANSWER = "prefill_decode: "


def main() -> None:
    role, model, store = sys.argv[1:]
    transfer = {**storing(store), "kv_role": role, "engine_id": f"engine of {role}"}
    limits = {"max_model_len": 1024, "max_num_batched_tokens": 1024}
    engine = start(model, "HandsOver", "hands_over", transfer=transfer, enable_prefix_caching=False, **limits)
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
