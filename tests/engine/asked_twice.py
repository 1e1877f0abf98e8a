"""A user's script that asks for the same beginning twice: python asked_twice.py MODEL STORE."""

import sys

from small_engine import start
from vllm import SamplingParams


def main() -> None:
    model, store = sys.argv[1:]
    transfer = {"kv_connector_extra_config": {"path": store}}
    limits = {"max_model_len": 512, "enable_prefix_caching": False}
    engine = start(model, "GroupStore", "group_store", transfer=transfer, **limits)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for end in (394, 460):  # a prompt, and one that begins with it
        engine.generate([{"prompt_token_ids": list(range(10, end))}], params, use_tqdm=False)


if __name__ == "__main__":
    main()
