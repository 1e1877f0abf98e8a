"""A user's script, as the tests run it: an LLM, a few prompts, tokens on stdout, exit code 3.

python offline.py MODEL STORE [kill]
"""

import os
import random
import signal
import sys

from small_engine import start, storing
from vllm import SamplingParams

SECRET = "planted-S3cr3t"


def main() -> int:
    model, store = sys.argv[1:3]
    transfer = storing(store, store={"creds": SECRET})
    engine = start(
        model, "Curious", "curious", transfer=transfer, max_model_len=1024, max_num_batched_tokens=256
    )
    rng = random.Random(1)
    prompts = [[rng.randrange(10, 500) for _ in range(length)] for length in (200, 20, 25, 600, 97)]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    for batch in ([prompts[0]], prompts[1:3], [prompts[0]], prompts[3:]):
        for output in engine.generate([{"prompt_token_ids": p} for p in batch], params, use_tqdm=False):
            print("tokens", *output.outputs[0].token_ids, flush=True)
    if "kill" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    return 3


if __name__ == "__main__":
    sys.exit(main())
