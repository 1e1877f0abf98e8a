"""A user's script that asks for the same beginning twice: python asked_twice.py MODEL STORE."""

import sys

from vllm import LLM, SamplingParams


def main() -> None:
    model, store = sys.argv[1:]
    engine = LLM(
        model=model,
        enforce_eager=True,
        max_model_len=512,
        enable_prefix_caching=False,
        kv_transfer_config={
            "kv_connector": "GroupStore",
            "kv_connector_module_path": "group_store",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"path": store},
        },
    )
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for end in (394, 460):  # a prompt, and one that begins with it
        engine.generate([{"prompt_token_ids": list(range(10, end))}], params, use_tqdm=False)


if __name__ == "__main__":
    main()
