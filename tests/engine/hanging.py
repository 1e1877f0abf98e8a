"""A connector that hangs in one way after another, each until a file appears, as the tests run it.

python hanging.py MODEL FOLDER

Each request has a way to hang (WAYS, in order); it goes on when FOLDER holds a file of that name.
"""

from __future__ import annotations

import random
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from hanging_ways import WAYS
from small_engine import start
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata


class Way(KVConnectorMetadata):
    def __init__(self, name: str | None) -> None:
        self.name = name


class Hanging(KVConnectorBase_V1):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self._vllm_config.kv_transfer_config
        self.folder = Path(config.get_from_extra_config("folder", ""))
        self.ways = list(WAYS)

    # --- scheduler ------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Way:
        return Way(self.ways.pop(0) if scheduler_output.scheduled_new_reqs else None)

    # --- worker ---------------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.way() == "hang_loading":
            self.hang_loading()

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        way = self.way()
        if way not in (None, "hang_loading"):
            getattr(self, way)()

    def way(self) -> str | None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Way)
        return metadata.name

    def let_go(self, name: str) -> None:
        """Comes back when the test wants it to."""
        while not (self.folder / name).exists():
            time.sleep(0.01)

    def hang_loading(self) -> None:
        self.let_go("hang_loading")

    def hang_saving(self) -> None:
        self.let_go("hang_saving")

    def hang_for_thread(self) -> None:
        done = threading.Event()

        def upload() -> None:
            self.let_go("hang_for_thread")
            done.set()

        threading.Thread(target=upload, name="uploader", daemon=True).start()
        done.wait()

    def hang_for_lock(self) -> None:
        lock, held = threading.Lock(), threading.Event()

        def hold() -> None:
            with lock:
                held.set()
                self.let_go("hang_for_lock")

        threading.Thread(target=hold, name="holder", daemon=True).start()
        held.wait()
        lock.acquire()

    def hang_for_socket(self) -> None:
        here, _there = socket.socketpair()  # a peer that took the request and never answers
        here.recv(1)


def main() -> None:
    model, folder = sys.argv[1:3]
    transfer = {"kv_connector_extra_config": {"folder": folder}}
    engine = start(
        model, "Hanging", "hanging", transfer=transfer, max_model_len=256, max_num_batched_tokens=256
    )
    rng = random.Random(1)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for _ in WAYS:
        prompt = [rng.randrange(10, 500) for _ in range(64)]
        engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)


if __name__ == "__main__":
    main()
