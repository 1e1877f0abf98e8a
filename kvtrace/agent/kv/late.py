"""A library that vLLM brought, looked up when it is first used: the agent loads none itself."""

from __future__ import annotations

import importlib
from typing import Any


class Late:
    """Stands for a module: ``np = Late("numpy")``. Each name is looked up once."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module(self._module), name)
        setattr(self, name, value)
        return value
