#!/usr/bin/env python3
"""Put the demo's explanation into README.md, between its markers.

    python scripts/readme.py

The explanation is what `kvtrace explain` prints of reports/vllm-0.32.0-cpu/demo.json, the report
of a `make demo` (names of the machine taken out), up to the rule-outs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "reports" / "vllm-0.32.0-cpu" / "demo.json"
README = ROOT / "README.md"
START, END, CUT = "<!-- demo -->\n", "<!-- /demo -->", "\nNot observed"


def block() -> str:
    """The explanation as an indented block."""
    shown = subprocess.run(
        [sys.executable, "-m", "kvtrace", "explain", str(REPORT)],
        capture_output=True,
        text=True,
        check=True,
        env={"COLUMNS": "110", "NO_COLOR": "1", "PATH": ""},
    ).stdout
    lines = shown.split(CUT)[0].rstrip().splitlines()
    return "\n".join(f"    {line}".rstrip() for line in lines) + "\n"


def rewritten(text: str) -> str:
    before, rest = text.split(START)
    _, after = rest.split(END)
    return f"{before}{START}\n{block()}\n{END}{after}"


if __name__ == "__main__":
    README.write_text(rewritten(README.read_text(encoding="utf-8")), encoding="utf-8")
