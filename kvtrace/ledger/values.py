"""Values out of JSON documents that may hold anything."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def integer(document: Mapping[str, Any], key: str, default: int = 0) -> int:
    value = document.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return default
    try:
        return int(value)
    except (ValueError, OverflowError):
        return default


def optional_integer(document: Mapping[str, Any], key: str) -> int | None:
    value = document.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def text(document: Mapping[str, Any], key: str, default: str = "") -> str:
    value = document.get(key)
    return value if isinstance(value, str) else default


def optional_text(document: Mapping[str, Any], key: str) -> str | None:
    value = document.get(key)
    return value if isinstance(value, str) else None


def flag(document: Mapping[str, Any], key: str) -> bool | None:
    """True or False, None where the document does not say."""
    value = document.get(key)
    return value if isinstance(value, bool) else None


def texts(document: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = document.get(key)
    return tuple(item for item in value if isinstance(item, str)) if isinstance(value, list) else ()


def table(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = document.get(key)
    return value if isinstance(value, dict) else {}
