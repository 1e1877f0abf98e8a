"""A user's script whose connectors vLLM's factory does not make: python past_factory.py MODEL STORE."""

import sys
from typing import Any

from small_engine import start, storing
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class Mine(ExampleConnector):
    pass


def create(config: Any, role: Any, kv_cache_config: Any) -> Any:
    return Mine(config, role, kv_cache_config)


def main() -> None:
    model, store = sys.argv[1:]
    KVConnectorFactory.create_connector = create  # type: ignore[method-assign]
    engine = start(model, "ExampleConnector", transfer=storing(store), max_model_len=512)
    prompt = {"prompt_token_ids": list(range(10, 138))}
    engine.generate([prompt], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)


if __name__ == "__main__":
    main()
