#!/usr/bin/env python3
"""Prints how kvtrace read the metadata of kept accuracy runs, by shape: ``metadata_truth.py DIR [--show]``.

DIR is what ``accuracy.py --keep DIR`` left. A shape is: record/container/what/where/covers. Exit codes:
0 nothing was misread, 1 something was (wrong or missed), 2 usage.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ACCURACY = ROOT / "tests" / "accuracy"
for folder in (ROOT, ACCURACY):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import declared  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--show", action="store_true", help="print every entry that is not read right")
    args = parser.parse_args()
    shapes: dict[str, Counter[str]] = {}
    outcomes = sorted(args.folder.glob("*/outcome.json"))
    if not outcomes:
        parser.error(f"no runs in {args.folder}")
    for path in outcomes:
        shape, counts, rest = declared.count(path.parent)
        shapes.setdefault(shape, Counter()).update(counts)
        for one in rest if args.show else []:
            where = f"{path.parent.name:>6} {shape}: {one.answer} {one.way} {one.request}"
            print(f"{where} put there {one.declared}, read {one.said}")
    total: Counter[str] = Counter()
    for shape, counts in sorted(shapes.items()):
        total.update(counts)
        print(f"{shape:<60}" + "".join(f" {answer} {counts[answer]:>4}" for answer in declared.ANSWERS))
    print("metadata: " + " ".join(f"{answer}={total[answer]}" for answer in declared.ANSWERS))
    return 1 if total["wrong"] or total["missed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
