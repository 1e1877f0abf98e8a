"""A package that sets VLLM_PLUGINS when it is imported, so that vLLM loads its own plugins alone.

vLLM's first process imports it after it has loaded its plugins; the engine's process, started after
that, loads none of the others.
"""

from __future__ import annotations

import os

from chunk_store import ChunkStore

os.environ["VLLM_PLUGINS"] = "plugins_off"


class PluginsOff(ChunkStore):
    pass
