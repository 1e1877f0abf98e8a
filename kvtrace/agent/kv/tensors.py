"""Looking at tensors without importing torch."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any


class _Own(threading.local):
    busy = False


OWN = _Own()
"""``busy``: this thread runs our own accounting; what it asks of tensors is not the connector's."""


_tensor: Any = ()
"""torch.Tensor, once torch is there."""


def is_tensor(value: Any) -> bool:
    global _tensor
    if _tensor == () and "torch" in sys.modules:
        _tensor = sys.modules["torch"].Tensor
    return isinstance(value, _tensor)


def tensors(value: Any) -> Sequence[Any]:
    """The tensor, or those in the list, that an argument is."""
    if is_tensor(value):
        return (value,)
    if isinstance(value, (list, tuple)):
        return [item for item in value if is_tensor(item)]
    return ()
