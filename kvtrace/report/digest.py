"""A report's checksum: over the document without it, so that a damaged or altered file is noticed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

FIELD = "digest"
T = TypeVar("T")


def digest_of(report: Mapping[str, Any]) -> str:
    """``sha256:`` and the hexadecimal digest of the document, whatever the order of its fields and the spaces
    between them; its own field is left out."""
    import hashlib  # loads a library of its own: only where there is a checksum

    bare = {name: value for name, value in report.items() if name != FIELD}
    text = json.dumps(bare, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return f"sha256:{hashlib.sha256(text.encode('ascii')).hexdigest()}"


def seal(report: T) -> T:
    """Put the checksum into a report that is complete: whoever changes it afterwards seals it again."""
    values: Any = report
    values[FIELD] = digest_of(values)
    return report
