"""A connector that keeps the step's metadata for itself.

``bind_connector_metadata`` is overridden and does not call ``super()``. The connector works on
its own copy, so nothing looks wrong from inside; but ``has_connector_metadata()`` of the base
class stays False, and vLLM then leaves out ``wait_for_layer_load`` and ``save_kv_layer`` in
silence.
"""

from __future__ import annotations

from chunk_store import ChunkStore, ChunkStoreMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata


class UnboundStore(ChunkStore):
    step: ChunkStoreMetadata

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        assert isinstance(connector_metadata, ChunkStoreMetadata)
        self.step = connector_metadata

    def clear_connector_metadata(self) -> None:
        self.step = ChunkStoreMetadata()

    def plan(self) -> ChunkStoreMetadata:
        return self.step


class ReboundStore(UnboundStore):
    """The healthy twin: the same copy, and the base class is told too."""

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super(UnboundStore, self).bind_connector_metadata(connector_metadata)
        super().bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        super(UnboundStore, self).clear_connector_metadata()
        super().clear_connector_metadata()
