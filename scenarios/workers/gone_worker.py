"""A worker that takes the connector down after its first step with tokens, as for a sleep mode."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_transfer_state import ensure_kv_transfer_shutdown
from vllm.v1.worker.cpu_worker import CPUWorker


class GoneWorker(CPUWorker):
    def execute_model(self, scheduler_output: Any) -> Any:
        result = super().execute_model(scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            ensure_kv_transfer_shutdown()
        return result
