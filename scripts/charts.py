#!/usr/bin/env python3
"""Make the charting library of the HTML page anew: kvtrace/render/html/charts.min.js and its licences.

Apache ECharts, cut down to what the page uses (scripts/charts/entry.js) and minified. The result is
committed: nobody needs Node.js to use, build or test kvtrace. For a newer version, change VERSIONS and
run this.

Exit codes: 0 written, 2 npm is missing or failed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "kvtrace" / "render" / "html"
VERSIONS = {"echarts": "6.1.0", "zrender": "6.1.0", "tslib": "2.3.0", "esbuild": "0.25.0"}
BANNER = (
    "/*! Apache ECharts {echarts} (Apache-2.0, https://echarts.apache.org), with zrender {zrender} "
    "(BSD-3-Clause), parts of d3 (BSD-3-Clause), tslib {tslib} (0BSD); licences: charts.licences.txt */"
)
LICENCES = (
    ("Apache ECharts", "echarts/NOTICE"),
    ("Apache ECharts", "echarts/LICENSE"),
    ("zrender", "zrender/LICENSE"),
    ("tslib", "tslib/LICENSE.txt"),
)


def main() -> int:
    npm = shutil.which("npm")
    if npm is None:
        print("charts: npm is not in PATH; install Node.js", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        there = Path(name)
        (there / "package.json").write_text(json.dumps({"private": True, "dependencies": VERSIONS}))
        shutil.copy(ROOT / "scripts" / "charts" / "entry.js", there)
        made = there / "charts.min.js"
        build = [
            "node_modules/.bin/esbuild", "entry.js", "--bundle", "--minify", "--format=iife",
            "--global-name=kvCharts",
            "--charset=ascii", "--legal-comments=none",
            f"--banner:js={BANNER.format(**VERSIONS)}", f"--outfile={made}",
        ]  # fmt: skip
        for command in ([npm, "install", "--no-audit", "--no-fund", "--no-package-lock"], build):
            if subprocess.run(command, cwd=there, check=False).returncode:
                print(f"charts: failed: {' '.join(command[:2])}", file=sys.stderr)
                return 2
        script = made.read_text(encoding="utf-8")
        if "</script" in script.lower() or "<!--" in script:
            print("charts: the library cannot stand inside a page as it is", file=sys.stderr)
            return 2
        (TARGET / "charts.min.js").write_text(script, encoding="utf-8")
        texts = [f"{title}\n\n{(there / 'node_modules' / file).read_text()}" for title, file in LICENCES]
        (TARGET / "charts.licences.txt").write_text(("\n" + "-" * 80 + "\n").join(texts), encoding="utf-8")
    print(f"charts: {len(script) / 1e3:.0f} kB, ECharts {VERSIONS['echarts']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
