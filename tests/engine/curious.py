"""vLLM's example connector, which prints what it finds out about itself when its first step ends."""

from __future__ import annotations

import logging
import queue
import sys
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector

sys.path.append(str(Path(__file__).parents[1]))
import looks

NOWHERE = "layer of nobody"
PROMPT = "the sauce is made of garlic"
log = logging.getLogger("curious")


class Curious(ExampleConnector):
    """A connector's own documentation."""

    looks = 0

    def wait_for_layer_load(self, layer_name: str) -> None:
        if layer_name == NOWHERE:
            raise LookupError(f"{layer_name} has no KV cache for {self._content()}")
        super().wait_for_layer_load(layer_name)

    def wait_for_save(self) -> None:
        super().wait_for_save()
        if Curious.looks:
            return
        found = [
            *looks.of_config(self._kv_transfer_config.kv_connector_extra_config),
            *looks.of_class(self, Curious),
            *looks.of_hooks(self),
            *looks.of_exception(lambda: self.wait_for_layer_load(NOWHERE)),
            *looks.of_exception(lambda: self.save_kv_layer(wrong=1)),  # type: ignore[call-arg]
            *looks.of_exception(self._empty),
        ]
        self._gossip()
        print(*(f"found {line}" for line in found), sep="\n", flush=True)

    def _content(self) -> str:
        """A user's, in words and in token ids."""
        request = self._get_connector_metadata().requests[0]  # type: ignore[attr-defined]
        return f"{PROMPT} {request.token_ids.tolist()}"

    def _gossip(self) -> None:
        """A user's content and secrets wherever a connector can put them."""
        content = self._content()
        log.warning("stored a prompt: %s", content)
        log.warning(f"stored another prompt: {content}")
        log.error("login failed", exc_info=ValueError(f"redis://bob:planted-S3cr3t@h for {content}"))
        try:
            raise ValueError(f"cannot keep {content} with pw=planted-S3cr3t")
        except ValueError as error:
            log.warning("gave up: %s", error)

    def _empty(self) -> Any:
        return queue.Queue[int]().get(timeout=0)
