"""Run a callback right after a module has been executed, without importing it.

Attention modules read their settings at import (``VLLM_USE_BREAKABLE_CUDAGRAPH``), so a
tracer must never import them itself.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Callback = Callable[[ModuleType], object]


class _Finder:
    """A meta-path finder that hands every wanted module to the real finders, and patches
    the loader *instance* they return: the module's ``__spec__`` and ``__loader__`` stay what
    they would have been."""

    def __init__(self) -> None:
        self.wanted: dict[str, list[Callback]] = {}
        self._busy = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.wanted or getattr(self._busy, "name", None) == name:
            return None
        self._busy.name = name
        try:
            spec = importlib.util.find_spec(name)
        except Exception:
            # The real import will raise what there is to raise.
            return None
        finally:
            self._busy.name = None
        if spec is not None and spec.loader is not None:
            self._patch(spec.loader, name)
        return spec

    def _patch(self, loader: Any, name: str) -> None:
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            original(module)
            for callback in self.wanted.pop(name, ()):
                callback(module)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            return


_finder = _Finder()


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback(module)`` now if ``name`` is imported, else right after it is. It must not raise."""
    module = sys.modules.get(name)
    if module is not None and getattr(getattr(module, "__spec__", None), "_initializing", False) is False:
        callback(module)
        return
    _finder.wanted.setdefault(name, []).append(callback)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
