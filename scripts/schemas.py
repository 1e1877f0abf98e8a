#!/usr/bin/env python3
"""Write the published JSON Schemas, from the types in kvtrace/report/model.py and kvtrace/gate/baseline.py.

python scripts/schemas.py
"""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
WIDTH = 110


def text(value: Any, indent: int = 0) -> str:
    """JSON with a line for whatever fits in one."""
    line = json.dumps(value)
    inner, outer = "\n" + " " * (indent + 2), "\n" + " " * indent
    if not value or not isinstance(value, (dict, list)) or (indent and len(line) + indent < WIDTH):
        return line
    if isinstance(value, list) and isinstance(value[0], str):
        words = ", ".join(map(json.dumps, value))
        return "[" + inner + inner.join(textwrap.wrap(words, WIDTH - indent - 2)) + outer + "]"
    if isinstance(value, list):
        return "[" + ",".join(inner + text(one, indent + 2) for one in value) + outer + "]"
    rows = (f"{inner}{json.dumps(key)}: {text(one, indent + 2)}" for key, one in value.items())
    return "{" + ",".join(rows) + outer + "}"


def files() -> dict[Path, str]:
    """Each published schema, and the file that it stands in."""
    from kvtrace.gate.baseline import baseline_schema
    from kvtrace.report.model import report_schema
    from kvtrace.verify.document import verify_schema

    package = ROOT / "kvtrace"
    return {
        package / "report" / "schema" / "kvtrace.report.2.json": text(report_schema()) + "\n",
        package / "gate" / "schema" / "kvtrace.baseline.1.json": text(baseline_schema()) + "\n",
        package / "verify" / "schema" / "kvtrace.verify.1.json": text(verify_schema()) + "\n",
    }


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content, encoding="utf-8")
