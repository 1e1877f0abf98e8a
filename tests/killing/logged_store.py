"""A healthy connector that keeps a log of its own: what kvtrace recorded is held against it.

Whole blocks of each prompt are written to files, layer by layer. Each call of ``build_connector_meta`` and of
``save_kv_layer`` appends a line to ``PATH/log-PID`` and has it on the disk (fsync) before it returns:

    meta STEP
    save STEP LAYER [REQUEST:START:END ...]

STEP is the connector's own count of ``build_connector_meta``. Nothing here knows of kvtrace.
Option (``kv_connector_extra_config``): ``path``, the folder of the store.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)


@dataclass
class Save:
    """Tokens [start, end) of a request, which fill these blocks."""

    request: str
    start: int
    end: int
    blocks: list[int]


@dataclass
class Saves(KVConnectorMetadata):
    step: int
    saves: list[Save] = field(default_factory=list)


@dataclass
class _Live:
    """What the scheduler side keeps of a request between its steps."""

    prompt: int
    blocks: list[int] = field(default_factory=list)


class LoggedStore(KVConnectorBase_V1):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self.path = Path(self._kv_transfer_config.get_from_extra_config("path", ""))
        self.block = vllm_config.cache_config.block_size
        self.steps = 0
        self.live: dict[str, _Live] = {}
        self.path.mkdir(parents=True, exist_ok=True)
        self.log = os.open(self.path / f"log-{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(self, line: str) -> None:
        os.write(self.log, f"{line}\n".encode())
        os.fsync(self.log)

    # ---- scheduler ----

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: Any) -> Saves:
        self.steps += 1
        found = Saves(self.steps)
        scheduled = scheduler_output.num_scheduled_tokens
        for gone in scheduler_output.finished_req_ids:
            self.live.pop(gone, None)
        for new in scheduler_output.scheduled_new_reqs:
            self.live[new.req_id] = _Live(len(new.prompt_token_ids), list(new.block_ids[0]))
            self._offer(found, new.req_id, new.num_computed_tokens, scheduled[new.req_id])
        cached = scheduler_output.scheduled_cached_reqs
        for name, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if name in cached.resumed_req_ids:
                self.live[name].blocks.clear()
            if blocks is not None:
                self.live[name].blocks.extend(blocks[0])
            self._offer(found, name, computed, scheduled[name])
        self.say(f"meta {self.steps}")
        return found

    def _offer(self, found: Saves, name: str, computed: int, tokens: int) -> None:
        """The blocks of the prompt that this step fills."""
        live = self.live[name]
        first = computed // self.block
        last = min(computed + tokens, live.prompt) // self.block
        if last > first:
            found.saves.append(Save(name, first * self.block, last * self.block, live.blocks[first:last]))

    # ---- worker ----

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Saves)
        line = [f"save {metadata.step} {layer_name}"]
        for save in metadata.saves:
            rows = kv_layer[torch.tensor(save.blocks)].contiguous()
            file = self.path / f"{save.request}-{save.start}-{layer_name}-{os.getpid()}"
            part = Path(f"{file}.part")  # each worker's own
            save_file({"kv": rows}, part)
            part.replace(f"{file}.safetensors")
            line.append(f"{save.request}:{save.start}:{save.end}")
        self.say(" ".join(line))

    def wait_for_save(self) -> None:
        return
