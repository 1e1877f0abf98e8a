"""numpy, which vLLM brought, looked up when it is first used: the agent loads none itself."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__all__ = ["Array", "Mask", "np"]

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[np.int64]
    Mask = NDArray[np.bool_]
else:

    class _Late:
        """Stands for the module. Each name is looked up once."""

        def __getattr__(self, name: str) -> Any:
            value = getattr(importlib.import_module("numpy"), name)
            setattr(self, name, value)
            return value

    np, Array, Mask = _Late(), Any, Any
