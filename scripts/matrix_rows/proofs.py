"""What a row must show beside: that what it is about did happen, said by the recorded run itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvtrace.ledger.read import read_run

Report = Mapping[str, Any]


def ranks(report: Report, trace: Path) -> str:
    found = sorted({rank for engine in report["run"]["engines"] for rank in engine["ranks"]})
    return f"ranks {', '.join(map(str, found))}" if len(found) > 1 else ""


def engines(report: Report, trace: Path) -> str:
    found = report["run"]["engines"]
    return f"{len(found)} engines" if len(found) > 1 else ""


def loaded(report: Report, trace: Path) -> str:
    count = report["ledger"]["loads"]["tokens"].get("loaded", 0)
    return f"{count:g} tokens loaded" if count else ""


def aborted(report: Report, trace: Path) -> str:
    left = [row for row in report["requests"]["rows"] if row["status"] == "FINISHED_ABORTED"]
    return f"{len(left)} requests aborted" if left else ""


def preempted(report: Report, trace: Path) -> str:
    count = sum(one.preemptions for one in read_run(trace).requests)
    return f"{count} preemptions" if count else ""


PROOFS: dict[str, Callable[[Report, Path], str]] = {
    "aborted": aborted,
    "engines": engines,
    "loaded": loaded,
    "preempted": preempted,
    "ranks": ranks,
}
"""Name -> (report, run directory) -> what shows it; "" where nothing does."""
