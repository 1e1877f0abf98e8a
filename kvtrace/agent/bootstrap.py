"""In place before any of the user's code: the agent waits for ``import vllm``.

``kvtrace run`` puts a folder on PYTHONPATH with a ``sitecustomize`` (``launch/overlay.py``) that calls
:func:`wait_for_vllm` as the interpreter starts. Plugins, scripts and tests that import vLLM's modules
before vLLM loads its plugins then come too late to be missed. Every Python process of the command runs
this, so it costs next to nothing where vLLM is never imported.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from kvtrace import CONFIG_VARIABLE


class _FirstImport:
    """A meta-path finder that finds nothing: it hears of the first import of vLLM, and goes."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "vllm":
            sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _FirstImport)]
            try:
                from kvtrace.agent.plugin import arm

                arm()
            except Exception:  # `import vllm` goes on, whatever this Python can't do
                pass


def wait_for_vllm() -> None:
    """Have the agent in place when vLLM is imported. Called again it does nothing more."""
    if CONFIG_VARIABLE not in os.environ or any(isinstance(finder, _FirstImport) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _FirstImport())
