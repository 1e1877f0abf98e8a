"""A store for a server that takes images: what stands in its keys is up to the request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from chunk_store import ChunkStore
from loads import SoundStore

if TYPE_CHECKING:
    from vllm.v1.request import Request


class ImageStore(SoundStore):
    """Tells images apart, but in requests with a cache_salt: those have the keys of their token ids alone."""

    def tokens(self, request: Request) -> Sequence[int]:
        return ChunkStore.tokens(self, request) if request.cache_salt else super().tokens(request)
