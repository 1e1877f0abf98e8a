"""Copies by address that go through ctypes: ``memmove``, ``memset`` and ``string_at`` on KV memory.

Seen through the ``errcheck`` of ctypes's own function objects, which stay what they are: it is called after
each call with its arguments. A connector that sets one itself replaces ours.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from kvtrace.agent.state import AGENT
from kvtrace.agent.watch.modes import seeing_here

_FUNCTIONS: dict[str, tuple[int, int, int]] = {
    "memmove": (0, 1, 2),
    "memset": (0, -1, 2),
    "_string_at": (-1, 0, 1),
}
"""Name in ctypes -> places of its target, source and size among its arguments; -1: it has none."""


def install() -> None:
    """Idempotent."""
    for name, places in _FUNCTIONS.items():
        function: Any = getattr(ctypes, name, None)
        if getattr(function, "errcheck", function) is None:
            function.errcheck = _checking(*places)


def _checking(target: int, source: int, size: int) -> Callable[[Any, Any, Any], Any]:
    def check(result: Any, function: Any, args: Any) -> Any:
        watchers = seeing_here()
        if watchers:
            try:
                count = int(getattr(args[size], "value", args[size]))
                read = 0 if source < 0 else _address(args[source])
                written = 0 if target < 0 else _address(args[target])
                for watcher in watchers:
                    watcher.moved(written, read, count)
            except Exception:
                AGENT.failed("copies")
        return result

    return check


def _address(value: Any) -> int:
    """Of what is given as a pointer; 0 where that is no KV for sure, or can't be said."""
    if isinstance(value, int):
        return value
    if isinstance(value, ctypes.c_void_p):
        return value.value or 0
    if isinstance(value, ctypes._Pointer):
        return ctypes.addressof(value.contents) if value else 0
    return ctypes.addressof(value) if isinstance(value, (ctypes.Array, ctypes.Structure)) else 0
