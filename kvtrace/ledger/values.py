"""Many small values that nobody changes: made quickly."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")


def replace(one: T, **changes: Any) -> T:
    """As ``dataclasses.replace``, of a plain frozen dataclass, in a tenth of its time.

    Raises:
        TypeError: there is no such field.
    """
    values = vars(one)
    if not changes.keys() <= values.keys():
        raise TypeError(f"{type(one).__name__} has no {', '.join(sorted(changes.keys() - values.keys()))}")
    new = object.__new__(type(one))
    vars(new).update(values, **changes)
    return new


@contextmanager
def without_collector() -> Iterator[None]:
    """Within it Python looks for no values that hold each other in circles: it does so again and again while
    memory grows, takes a fifth of an analysis' time for it, and there are hardly any."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
