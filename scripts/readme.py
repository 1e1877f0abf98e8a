#!/usr/bin/env python3
"""Put the demo's explanation into README.md, between its markers.

    python scripts/readme.py

The explanation is what `kvtrace explain` prints of reports/demo/report.json, the report
of a `make demo` (names of the machine taken out), up to the rule-outs. `--from RUN` renews that
report from the run directory of a demo first.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "reports" / "demo" / "report.json"
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


def renew(run_dir: Path) -> None:
    """Write the demo's report from a run directory, without what names the machine."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from reference_reports import normalise

    from kvtrace.report.build import build_report

    seen = build_report(run_dir)
    report = normalise(seen, (str(run_dir), str(ROOT)))
    report["run"]["seconds"] = round(seen["run"]["seconds"], 1)
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--from"]:
        renew(Path(sys.argv[2]).resolve())
    README.write_text(rewritten(README.read_text(encoding="utf-8")), encoding="utf-8")
