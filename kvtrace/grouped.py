"""Items by a key, and nested values by dotted names: standard library only, any piece may import it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

_T = TypeVar("_T")
_K = TypeVar("_K", bound=Hashable)


def grouped(items: Iterable[_T], key: Callable[[_T], _K]) -> list[tuple[_K, list[_T]]]:
    """Items by key, keys in order of first sight."""
    groups: dict[_K, list[_T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.items())


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(keys with dots between, value) of all that is no mapping with something in it."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
