"""A package that sets up the environment of vLLM's other processes anew when it is imported: its own plugins
alone (VLLM_PLUGINS), and its own folder alone on PYTHONPATH.

vLLM's first process imports it after it has loaded its plugins; the engine's process, started after
that, has neither of kvtrace's two ways in.
"""

from __future__ import annotations

import os
from pathlib import Path

from chunk_store import ChunkStore

os.environ["VLLM_PLUGINS"] = "plugins_off"
os.environ["PYTHONPATH"] = str(Path(__file__).parent)


class PluginsOff(ChunkStore):
    pass
