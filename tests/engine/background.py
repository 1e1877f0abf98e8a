"""Three connectors that copy in the background, each in an engine of its own, as the tests run them.

python background.py MODEL ANSWERS

A save is handed over in ``wait_for_save`` and waits for the next step to begin. ANSWERS gets, as JSON, the
blocks that each of them copied, save by save, in the order in which they were handed over.
"""

from __future__ import annotations

import asyncio
import gc
import json
import queue
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from small_engine import start
from vllm import SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

BLOCK = 32
COPIED: list[list[int]] = []
"""Of the engine that runs."""


@dataclass
class Saves(KVConnectorMetadata):
    blocks: list[int] = field(default_factory=list)


class Gate:
    """Opens when the step after begins; closed again for each save."""

    def __init__(self) -> None:
        self.open, self.done = threading.Event(), threading.Event()


class Base(KVConnectorBase_V1):
    """Whole blocks of each new prompt; ``hand_over`` says where they are copied."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.caches: dict[str, torch.Tensor] = {}
        self.gates: list[Gate] = []
        self.start()

    # --- scheduler ------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> Saves:
        found = Saves()
        for request in scheduler_output.scheduled_new_reqs:
            tokens = scheduler_output.num_scheduled_tokens[request.req_id]
            found.blocks += request.block_ids[0][: tokens // BLOCK]
        return found

    # --- worker ---------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for gate in self.gates:
            gate.open.set()

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        for gate in self.gates:
            assert gate.done.wait(60)
        self.gates.clear()
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Saves)
        if metadata.blocks:
            COPIED.append(metadata.blocks)
            self.gates.append(Gate())
            self.hand_over(metadata.blocks, self.gates[0])

    def copy(self, blocks: list[int]) -> None:
        for kv in self.caches.values():
            torch.stack([kv[block] for block in blocks])

    def save(self, blocks: list[int], gate: Gate) -> None:
        assert gate.open.wait(60)
        self.copy(blocks)
        gate.done.set()

    def start(self) -> None:
        raise NotImplementedError

    def hand_over(self, blocks: list[int], gate: Gate) -> None:
        raise NotImplementedError


class InThread(Base):
    def start(self) -> None:
        self.jobs: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self.loop, daemon=True).start()

    def loop(self) -> None:
        while True:
            self.save(*self.jobs.get())

    def hand_over(self, blocks: list[int], gate: Gate) -> None:
        self.jobs.put((blocks, gate))


class InExecutor(Base):
    def start(self) -> None:
        self.pool = ThreadPoolExecutor(2)

    def hand_over(self, blocks: list[int], gate: Gate) -> None:
        self.pool.submit(self.save, blocks, gate)


class InLoop(Base):
    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def hand_over(self, blocks: list[int], gate: Gate) -> None:
        asyncio.run_coroutine_threadsafe(self.upload(blocks, gate), self.loop)

    async def upload(self, blocks: list[int], gate: Gate) -> None:
        await asyncio.to_thread(gate.open.wait, 60)
        self.save(blocks, gate)


def main() -> None:
    model, answers = sys.argv[1:3]
    copied = {}
    for cls in (InThread, InExecutor, InLoop):
        limits = {"max_model_len": 256, "max_num_batched_tokens": 256}
        engine = start(model, cls.__name__, "background", enable_prefix_caching=False, **limits)
        rng = random.Random(1)
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        for length in (64, 96, 128):
            prompt = [rng.randrange(10, 500) for _ in range(length)]
            engine.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        import background

        copied[cls.__name__] = list(background.COPIED)
        background.COPIED.clear()
        del engine
        gc.collect()
    Path(answers).write_text(json.dumps(copied))


if __name__ == "__main__":
    main()
