"""Setting this thread's trace or profile function without an error reaching anybody.

Python 3.11 refuses where another thread is doing the same at that moment (its check is one for all threads,
and an audit hook lets another thread in): the next try goes through.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_TRIES = 16


def set_trace(function: Any) -> bool:
    """``sys.settrace``; False where it could not be set."""
    return _set(sys.settrace, function)


def set_profile(function: Any) -> bool:
    """``sys.setprofile``; False where it could not be set."""
    return _set(sys.setprofile, function)


def _set(setter: Callable[[Any], object], function: Any) -> bool:
    for _ in range(_TRIES):
        try:
            setter(function)
            return True
        except RuntimeError:
            continue
    return False
