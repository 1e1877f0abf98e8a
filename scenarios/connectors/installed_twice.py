"""A connector that is installed twice: whoever looks it up after the worker finds the other copy.

With vLLM's own processes this is a PYTHONPATH or a working directory that the processes do not
share. In one process the copy forgets itself once the worker has its KV caches, and the scheduler,
which is made after that, imports ``second_install/installed_twice.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from chunk_store import ChunkStore

if TYPE_CHECKING:
    import torch

SECOND = str(Path(__file__).resolve().parent / "second_install")


class InstalledTwice(ChunkStore):
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        sys.path.insert(0, SECOND)
        del sys.modules[__name__]
