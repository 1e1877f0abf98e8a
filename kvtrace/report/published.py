"""The published JSON Schema of reports, as it lies beside this file.

Reading a report takes this; the types in :mod:`kvtrace.report.model`, of which it is made, take far longer to
load. A test holds the two together.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, Final

from kvtrace.errors import KvtraceError

SCHEMA: Final = "kvtrace.report/2"


class ReportError(KvtraceError):
    """A path holds no report that can be read, or a trace makes none."""


@cache
def published_schema() -> dict[str, Any]:
    """What :func:`kvtrace.report.model.report_schema` makes."""
    place = Path(__file__).parent / "schema" / "kvtrace.report.2.json"
    schema: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
    return schema
