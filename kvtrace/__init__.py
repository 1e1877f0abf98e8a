"""kvtrace: why were so few KV blocks saved or loaded? A hook-coverage tracer for vLLM KV connectors."""

from __future__ import annotations

__version__ = "0.1.0"

CONFIG_VARIABLE = "KVTRACE_CONFIG"
"""The environment variable with the agent's configuration (``kvtrace.trace.config``). Its name stands here,
where reading it costs no further import: the agent is inert in every process where it is not set."""

ENTRY_POINT_GROUP = "vllm.general_plugins"
"""Entry points that vLLM calls in each of its processes."""

TYPE_CHECKING = False  # typing's, without importing it
if TYPE_CHECKING:
    from kvtrace.export.frames import load as load


def __getattr__(name: str) -> object:
    """``kvtrace.load``: imported where it is used, as it brings pandas."""
    if name == "load":
        import importlib

        return importlib.import_module("kvtrace.export.frames").load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
