"""Hooks by what they do, from the one table of hooks."""

from __future__ import annotations

from kvtrace.trace.format import Flag
from kvtrace.trace.hooks import REGISTER_CROSS_LAYERS, REGISTER_KV_CACHES, TABLE

SAVE_HOOKS = tuple(hook.name for hook in TABLE if hook.direction is Flag.STORE)
LOAD_HOOKS = tuple(hook.name for hook in TABLE if hook.direction is Flag.LOAD)
BACKGROUND = ("thread", "executor", "asyncio")
"""Where exceptions of a connector's work beside the hooks stand."""
START_HOOKS = (REGISTER_KV_CACHES.name, REGISTER_CROSS_LAYERS.name)
"""They run before the first step."""
