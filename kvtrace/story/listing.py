"""The requests of a run, one row each: from its report, or all of them from its spools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtrace import causes, ledger
from kvtrace.report.build import request_rows
from kvtrace.report.load import read_report
from kvtrace.story.locate import traced_directory

Row = dict[str, Any]

SORTS: dict[str, Callable[[Row], Any]] = {
    "worst": lambda row: 0,  # as they come
    "best": lambda row: -row["saved"],
    "prompt": lambda row: -row["prompt"],
    "arrival": lambda row: row["first_step"],
    "id": lambda row: row["id"],
}


@dataclass
class Listing:
    """Rows as in ``report.json`` (``requests.rows``), sorted, filtered and cut."""

    rows: list[Row]
    fit: int  # requests that pass the filter
    known: int  # requests that could be listed: a report holds the worst ones only
    total: int
    verdict: str | None
    verdicts: dict[str, int] = field(default_factory=dict)  # verdict -> requests, most first
    ids: list[str] = field(default_factory=list)  # of all that are known, listed or not

    def document(self) -> dict[str, Any]:
        """As JSON: ``kvtrace.requests/1``."""
        return {
            "schema": "kvtrace.requests/1",
            "total": self.total,
            "known": self.known,
            "fit": self.fit,
            "verdicts": self.verdicts,
            "rows": self.rows,
        }


def listing(path: str, verdict: str | None = None, sort: str = "worst", limit: int | None = None) -> Listing:
    """The requests at `path`, a report.json or a run directory.

    Raises:
        KvtraceError: no report or run there that can be read.
    """
    folder = traced_directory(path) if Path(path).is_dir() else None
    if folder is not None:
        rows: list[Row] = [
            dict(row) for row in request_rows(causes.diagnose(ledger.read_run(folder)).requests)
        ]
        total = len(rows)
    else:
        report = read_report(path)
        rows = [dict(row) for row in report["requests"]["rows"]]
        total = report["requests"]["total"]
    fits = [row for row in rows if verdict is None or row["verdict"] == verdict]
    fits.sort(key=SORTS[sort])
    return Listing(
        rows=fits if limit is None else fits[:limit],
        fit=len(fits),
        known=len(rows),
        total=total,
        verdict=verdict,
        verdicts=dict(Counter(row["verdict"] for row in rows).most_common()),
        ids=[row["id"] for row in rows],
    )
