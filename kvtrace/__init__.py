"""kvtrace: why were so few KV blocks saved or loaded? A hook-coverage tracer for vLLM KV connectors."""

from __future__ import annotations

__version__ = "0.1.0"
