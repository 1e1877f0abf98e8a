"""A user's script with secrets in every place where a user puts them: its command line, the connector's
configuration, the environment, the engine's arguments, a child's command line, messages and logs.

python secretive.py MODEL STORE CONFIG WORDS ...

CONFIG: JSON of the connector's extra configuration. ``SAYS`` in the environment: JSON of the messages that
the connector raises and logs.
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading

from small_engine import start, storing
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

SAYS = json.loads(os.environ["SAYS"])


class Secretive(ExampleConnector):
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        logger = logging.getLogger("secretive")
        for text in SAYS:
            with contextlib.suppress(ValueError):
                raise ValueError(text)
            logger.warning("cannot do it: %s", text)
            logger.error(text)
        with contextlib.suppress(RuntimeError):
            raise RuntimeError("connect with password=literalhorse now")
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self):
        thread = threading.Thread(target=self._work, name=SAYS[0])
        thread.start()
        thread.join()
        super().wait_for_save()

    def _work(self):
        raise ConnectionError(SAYS[-1])


def main() -> None:
    model, store, config = sys.argv[1:4]
    secrets = {"hf_token": "enginehorse", "additional_config": {"access": "enginefoal"}}
    transfer = storing(store, **json.loads(config))
    engine = start(model, "Secretive", "secretive", transfer=transfer, max_model_len=512, **secrets)
    # another program of the run: its command line is seen from outside
    child = subprocess.Popen(["bash", "-c", f"TOKEN=childhorse sleep 3 {os.environ['CHILD']}; true"])
    prompt = {"prompt_token_ids": list(range(10, 200))}
    engine.generate([prompt], SamplingParams(temperature=0, max_tokens=2), use_tqdm=False)
    child.wait()


if __name__ == "__main__":
    main()
