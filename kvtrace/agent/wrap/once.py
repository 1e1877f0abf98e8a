"""A wrapper in a function's place, and never two of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARK = "_kvtrace"


def wrap_once(holder: Any, name: str, around: Callable[[Any], Any]) -> bool:
    """Put ``around(original)`` in the place of what stands under that name; nothing where it is ours already,
    or where there is none. Whether one of ours stands there now."""
    original = getattr(holder, name, None)
    if original is None or hasattr(original, _MARK):
        return original is not None
    wrapper = functools.update_wrapper(around(original), original)
    setattr(wrapper, _MARK, True)
    setattr(holder, name, wrapper)
    return True
