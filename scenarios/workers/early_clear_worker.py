"""A worker that ends the connector's step before all layers have run.

As vLLM 0.11.1 to 0.16 did with a draft model: the metadata was cleared after the target's forward, and
the draft's layers ran without. Here the last two layers of the one model take the draft's place.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.worker.cpu_worker import CPUWorker


class EarlyClearWorker(CPUWorker):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        model = self.model_runner.get_model()
        model.model.layers[2].register_forward_pre_hook(self._clear)
        model.model.layers[-1].register_forward_hook(self._end)

    def _clear(self, *_: Any) -> None:
        self._kept = None
        if has_kv_transfer_group() and get_kv_transfer_group().has_connector_metadata():
            connector = get_kv_transfer_group()
            self._kept = connector._get_connector_metadata()
            connector.wait_for_save()
            connector.clear_connector_metadata()

    def _end(self, *_: Any) -> None:
        if self._kept is not None:  # this vLLM calls start_load_kv after the forward, and it needs some
            get_kv_transfer_group().bind_connector_metadata(self._kept)
