"""A checksum inside a JSON document: whether ``run.json`` and ``rest.json`` are as they were written."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

KEY = "crc32"


def summed(document: Mapping[str, Any]) -> dict[str, Any]:
    """`document` with the checksum of all that it holds."""
    plain = {name: value for name, value in document.items() if name != KEY}
    return {**plain, KEY: _crc(plain)}


def is_damaged(document: Mapping[str, Any]) -> bool:
    """Whether it differs from its checksum; False where it has none (of an older kvtrace)."""
    return KEY in document and document[KEY] != summed(document)[KEY]


def _crc(plain: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode())
