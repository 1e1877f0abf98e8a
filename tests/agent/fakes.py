"""A connector base with the names of vLLM's, for tests that need no vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvtrace.agent.hooks.connector import traced
from kvtrace.agent.state import AGENT
from kvtrace.trace.format import Role

BLOCKS, BLOCK = 10, 4
"""Of the KV caches of the tests that watch copies."""


def on_worker(connector: Any, name: str = "") -> Any:
    """What a worker holds of vLLM's factory: the connector, traced, under the name that is configured."""
    return traced(connector, Role.WORKER, name or type(connector).__name__)


def on_scheduler(connector: Any, name: str = "") -> Any:
    return traced(connector, Role.SCHEDULER, name or type(connector).__name__)


class KVConnectorMetadata:
    pass


class KVConnectorBase_V1:
    def __init__(self) -> None:
        self._connector_metadata: Any = None

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        self._connector_metadata = connector_metadata

    def clear_connector_metadata(self) -> None:
        self._connector_metadata = None

    def has_connector_metadata(self) -> bool:
        return self._connector_metadata is not None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return

    def get_finished(self, finished_req_ids: set[str]) -> tuple[Any, Any]:
        return None, None

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra: dict[str, Any]) -> bool:
        return bool(extra.get("piecewise"))


class Storing(KVConnectorBase_V1):
    """Keeps what it was asked to save."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: list[Any] = []
        self._unit = 256

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        if kv_layer == "bad":
            raise ValueError("token=hunter2 no room")
        self.saved.append((layer_name, kv_layer, attn_metadata, kwargs))


class MultiConnector(KVConnectorBase_V1):
    """By its name vLLM's, whose children are traced."""

    __module__ = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"

    def __init__(self, *children: Any) -> None:
        super().__init__()
        self._connectors = list(children)


class Parent(MultiConnector):
    pass


class Fan(Parent):
    """Hands each call on to those inside it, as a MultiConnector does."""

    def __init__(self, *children: Any) -> None:
        super().__init__(*children)
        self._block_size = 4

    def register_kv_caches(self, kv_caches: Any) -> None:
        for each in self._connectors:
            each.register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        for each in self._connectors:
            each.bind_connector_metadata(connector_metadata)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        for each in self._connectors:
            each.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)


class Work:
    """An entry as connectors write them: one request's slots to store, or to load."""

    def __init__(self, slots: Any, is_store: bool = True) -> None:
        self.req_id = "req"
        self.slot_mapping = slots
        self.is_store = is_store
        self.is_load = not is_store


class WorkMetadata(KVConnectorMetadata):
    def __init__(self, *requests: Work) -> None:
        self.requests = list(requests)


class Copying(KVConnectorBase_V1):
    """Copies the slots it was given; ``how`` says in which way. KV: [blocks, block size, 8]."""

    def __init__(self, how: Any = None) -> None:
        super().__init__()
        self._block_size = 4
        self.how = how
        self.kept: list[Any] = []
        self.caches: dict[str, Any] = {}

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.caches = kv_caches

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        for work in self._connector_metadata.requests:
            if work.is_store:
                self.kept.append(self.how(self, kv_layer, work.slot_mapping))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for work in self._connector_metadata.requests:
            if not work.is_store:
                for kv in self.caches.values():
                    slots = work.slot_mapping
                    kv[slots // 4, slots % 4] = 1.0

    def wait_for_save(self) -> None:
        if self.how is None:
            for kv in self.caches.values():
                for work in self._connector_metadata.requests:
                    self.kept.append(kv[work.slot_mapping // 4, work.slot_mapping % 4])


def kv_cache_config(blocks: int, block_size: int, *groups: list[str]) -> Any:
    """What vLLM says of the KV caches of the layers of each group."""
    return SimpleNamespace(
        num_blocks=blocks,
        kv_cache_groups=[
            SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=block_size), layer_names=names)
            for names in groups
        ],
    )


def step(connector: Any, caches: dict[str, Any], *works: Work, number: int = 1) -> None:
    """One step as vLLM runs it."""
    import torch

    AGENT.worker.step = number
    connector.bind_connector_metadata(WorkMetadata(*works))
    with torch.inference_mode():
        connector.start_load_kv(None)
        for name, kv in caches.items():
            connector.save_kv_layer(name, kv, None)
        connector.wait_for_save()
    connector.clear_connector_metadata()
    AGENT.worker.step = 0
