"""A scheduler out of tree that lets requests in without asking the connector.

As schedulers do that were written before vLLM had KV connectors and copy the admission loop: the
connector still gets the step's metadata to build, so everything is saved and nothing is loaded.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class NoLookupScheduler(Scheduler):
    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        connector, self.connector = self.connector, None
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.connector = connector
        if connector is not None:
            output.kv_connector_metadata = connector.build_connector_meta(output)
        return output
