"""A checksum inside a JSON document: whether the files of a run directory are as they were written."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvtrace.regular import read_regular
from kvtrace.trace.facts import D

KEY = "crc32"


def summed(document: Mapping[str, Any]) -> dict[str, Any]:
    """`document` with the checksum of all that it holds."""
    plain = {name: value for name, value in document.items() if name != KEY}
    return {**plain, KEY: _crc(plain)}


def is_damaged(document: Mapping[str, Any]) -> bool:
    """Whether it differs from its checksum; False where it has none (of an older kvtrace)."""
    return KEY in document and document[KEY] != summed(document)[KEY]


def read_summed(path: Path, most: int) -> dict[str, Any] | None:
    """The object in a JSON file of at most so many bytes; None where it is none, or not as it was written.

    Raises:
        OSError, ValueError, RecursionError: it can't be read.
    """
    data = read_regular(path, most)
    value = json.loads(data.decode("utf-8", "replace")) if len(data) <= most else None
    return value if isinstance(value, dict) and not is_damaged(value) else None


def read_document(
    path: Path, most: int, kind: type[D], unknown: str, missing: Sequence[str] = ()
) -> tuple[D, list[str]]:
    """The document in such a file, and notes on it; all unknown where there is none that can be read.

    Args:
        unknown: what is not known without it, in words.
        missing: the notes where there is no such file.
    """
    try:
        value = read_summed(path, most)
    except FileNotFoundError:
        return kind(), list(missing)
    except (OSError, ValueError, RecursionError):
        return kind(), [f"{path.name} cannot be read: {unknown}"]
    if value is None:
        return kind(), [f"{path.name} is not as it was written and was left out: {unknown}"]
    return kind.from_json(value), []


def _crc(plain: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode())
