#!/usr/bin/env python3
"""kvtrace on every way to run vLLM's CPU build: topologies, kinds of requests, models.

    python scripts/matrix.py [--only NAME ...] [--section NAME] [--kind healthy|planted] [--out DIR] [--again]
    python scripts/matrix.py --list | --page

Each row (scripts/matrix_rows) runs healthy and with a planted fault, untraced and traced. What came of it
goes into reports/matrix/SECTION.json, a row at a time; reports/matrix.md is written from all files there.
``--out``: folder of the runs, kept (default: .cache/matrix-runs, of a row the newest). ``--kind``:
of a long row one half, and the other one in another call. ``--again``: no engine; the recorded runs are
explained anew. ``--page``: nothing but the page.

Exit codes: 0 every row asked for is right, or does not run on this build; 1 not; 2 usage.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
for place in (ROOT, ROOT / "scripts", ROOT / "scenarios"):
    if str(place) not in sys.path:
        sys.path.insert(0, str(place))

from matrix_rows import measure, tables, verdict  # noqa: E402
from matrix_rows.page import page  # noqa: E402
from matrix_rows.proofs import PROOFS  # noqa: E402
from matrix_rows.row import Row  # noqa: E402
from vllm_env import CACHE  # noqa: E402

from kvtrace.errors import KvtraceError  # noqa: E402
from kvtrace.report.build import build_report  # noqa: E402

KEPT = ROOT / "reports" / "matrix"
PAGE = ROOT / "reports" / "matrix.md"


def judge(row: Row, out: Path) -> dict[str, Any]:
    """What came of a row whose runs lie in ``out``."""
    kinds = {}
    for kind in measure.KINDS:
        untraced, traced = (measure.Run(row, kind, yes, out) for yes in (False, True))
        outcomes = untraced.outcome(), traced.outcome()
        report = None
        problem = ""
        if not outcomes[0]["error"]:
            try:
                report = build_report(traced.trace)
            except (KvtraceError, AssertionError, OSError) as error:
                problem = f"no report: {type(error).__name__}: {error}"
        found = verdict.of_kind(row, row.connector(kind), *outcomes, report, traced.states())
        if problem:
            found.wrong.append(problem)
        if kind == "healthy" and report is not None:
            found.proofs = {name: PROOFS[name](report, traced.trace) for name in row.shows}
        kinds[kind] = found
    return verdict.of_row(row, kinds)


def read(section: str) -> dict[str, Any]:
    file = KEPT / f"{section}.json"
    return dict(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def keep(section: str, kept: dict[str, Any]) -> None:
    """Writes one row beside those that are there, in the order of the tables."""
    rows = {**read(section), kept["name"]: kept}
    order = [row.name for row in tables.SECTIONS[section] if row.name in rows]
    KEPT.mkdir(parents=True, exist_ok=True)
    text = json.dumps({name: rows[name] for name in order}, indent=1, ensure_ascii=False)
    (KEPT / f"{section}.json").write_text(text + "\n", encoding="utf-8")


def write_page() -> None:
    sections = []
    for name, rows in tables.SECTIONS.items():
        kept = read(name)
        missing = [row.title for row in rows if row.name not in kept]
        sections.append((tables.TITLES[name], list(kept.values()), missing))
    PAGE.write_text(page(sections, _versions()), encoding="utf-8")


def _versions() -> list[str]:
    """The section of vLLM versions, which a script of its own measures."""
    file = KEPT / "versions.json"
    if not file.is_file():
        return []
    import version_matrix

    return version_matrix.section(version_matrix.read_columns(file))


def run(asked: list[tuple[str, Row]], args: argparse.Namespace) -> int:
    """Measures rows and keeps what came of them; returns how many are wrong."""
    sections = {row.name: section for section, row in asked}
    rows: Iterable[Row] = [row for _, row in asked]
    out, wrong = args.out.resolve(), 0
    for row in rows if args.again else measure.run_all(rows, out, say, args.kind):
        if (args.again or len(args.kind) < len(measure.KINDS)) and not measure.is_whole(row, out):
            say(f"{row.name}: not all of its runs are there")
            continue
        kept = judge(row, out)
        keep(sections[row.name], kept)
        wrong += bool(kept["wrong"])
        said = kept["cannot"] and f"does not run on this build: {kept['cannot']}"
        say(f"{row.name}: {said or '; '.join(kept['wrong']) or 'right'}")
    write_page()
    return wrong


def say(text: str) -> None:
    print(f"matrix: {text}", flush=True)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="rows")
    parser.add_argument("--section", choices=sorted(tables.SECTIONS))
    parser.add_argument("--out", type=Path, default=CACHE / "matrix-runs", help="folder of the runs")
    parser.add_argument("--again", action="store_true", help="no engine: explain the runs there anew")
    parser.add_argument("--kind", nargs="*", choices=measure.KINDS, default=measure.KINDS, help="of its runs")
    parser.add_argument("--list", action="store_true", help="the rows")
    parser.add_argument("--page", action="store_true", help="write the page, nothing else")
    return parser.parse_args()


def main() -> int:
    args = options()
    try:
        asked = tables.wanted(args.section, args.only)
    except tables.UnknownRow as error:
        print(f"matrix.py: {error}", file=sys.stderr)
        return 2
    if args.list:
        for section, row in asked:
            print(f"{section:<12}{row.name:<28}{row.how:<10}{row.title}")
        return 0
    if args.page:
        write_page()
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    return 1 if run(asked, args) else 0


if __name__ == "__main__":
    sys.exit(main())
