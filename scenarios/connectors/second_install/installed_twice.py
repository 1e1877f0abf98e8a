"""The copy that nobody thought of: see ``../installed_twice.py``."""

from __future__ import annotations

from chunk_store import ChunkStore


class InstalledTwice(ChunkStore):
    pass
