#!/usr/bin/env python3
"""Put the demo's report into README.md (the short answer) and reports/demo/explained.md (with the evidence).

    python scripts/readme.py

Both are what `kvtrace explain` prints of reports/demo/report.json, the report of a `make demo` (names of
the machine taken out): README.md has the default, between its markers, the sample report has `-v`.
`--from RUN` renews that report from the run directory of a demo first.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPORT = ROOT / "reports" / "demo" / "report.json"
README = ROOT / "README.md"
SAMPLE = REPORT.with_name("explained.md")
START, END = "<!-- demo -->\n", "<!-- /demo -->"

INTRODUCTION = """\
<!-- made by python scripts/readme.py from reports/demo/report.json -->
# A sample report

What `kvtrace explain -v reports/demo/report.json` prints: a run of `make demo` with vLLM's ExampleConnector.
[concepts.md](../../docs/concepts.md) explains the words.

"""


def explained(columns: int, *options: str) -> str:
    """The explanation of the demo's report, as a terminal of so many columns shows it."""
    return subprocess.run(
        [sys.executable, "-m", "kvtrace", "explain", *options, str(REPORT.relative_to(ROOT))],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env={"COLUMNS": str(columns), "NO_COLOR": "1", "PATH": ""},
    ).stdout


def short() -> str:
    """The answer on one screen of 80 columns."""
    return explained(80)


def block(text: str) -> str:
    """As an indented block of Markdown."""
    return "\n".join(f"    {line}".rstrip() for line in text.rstrip().splitlines()) + "\n"


def rewritten(text: str) -> str:
    """``text`` of the README with the demo's short answer between its markers."""
    before, rest = text.split(START)
    _, after = rest.split(END)
    return f"{before}{START}\n{block(short())}\n{END}{after}"


def sample() -> str:
    """The text of reports/demo/explained.md."""
    return INTRODUCTION + block(explained(110, "-v"))


def renew(run_dir: Path) -> None:
    """Write the demo's report from a run directory, without what names the machine."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from reference_reports import normalise

    from kvtrace.report.build import build_report
    from kvtrace.report.digest import seal

    seen = build_report(run_dir)
    report = normalise(seen, (str(run_dir), str(ROOT)))
    report["run"]["seconds"] = round(seen["run"]["seconds"], 1)
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps(seal(report), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--from"]:
        renew(Path(sys.argv[2]).resolve())
    README.write_text(rewritten(README.read_text(encoding="utf-8")), encoding="utf-8")
    SAMPLE.write_text(sample(), encoding="utf-8")
