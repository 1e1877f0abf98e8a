"""What a report alone says of one request: its row, and the findings' events that name it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtrace.errors import KvtraceError
from kvtrace.report.load import read_report
from kvtrace.report.model import Report
from kvtrace.story import find

SCHEMA = "kvtrace.story-of-report/1"
_RUN = "give the run directory that the report came from"


@dataclass
class Summary:
    """One request, as far as a report goes."""

    row: dict[str, Any]  # as in report.json (requests.rows)
    events: list[dict[str, Any]] = field(default_factory=list)
    """A finding's examples that are of this request: finding, title, step, text."""
    remedy: list[str] = field(default_factory=list)  # of the finding that its verdict names

    def document(self) -> dict[str, Any]:
        """As JSON: ``kvtrace.story-of-report/1``."""
        return {"schema": SCHEMA, "request": self.row, "events": self.events, "remedy": self.remedy}


def summarize(path: str | Path, wanted: str, layer: str | None = None, token: int | None = None) -> Summary:
    """The request of a report.json that has no run beside it.

    Raises:
        KvtraceError: no report there, no such request in it, or more is asked for than a report holds.
    """
    report = read_report(path)
    if layer is not None or token is not None:
        asked = "--layer" if layer is not None else "--token"
        raise KvtraceError(f"a report does not hold what {asked} asks for", path, _RUN)
    row = dict(_row(report, wanted))
    events = [
        {"finding": finding["id"], "title": finding["title"], "step": event["step"], "text": event["text"]}
        for finding in report["findings"]
        for event in finding["events"]
        if event["request"] == row["id"]
    ]
    cause = str(row["verdict"])
    remedy = [line for one in report["findings"] if one["id"] == cause for line in one["remedy"]]
    return Summary(row, events, list(dict.fromkeys(remedy)))


def _row(report: Report, wanted: str) -> Any:
    rows = report["requests"]["rows"]
    clients = {row["id"]: row["client"] for row in rows if row["client"]}
    try:
        ident, number = find.find(wanted, [row["id"] for row in rows], clients)
    except KvtraceError as error:
        if len(rows) < report["requests"]["total"] and error.args[0] == "no such request":
            held = f"the report lists {len(rows)} of {report['requests']['total']} requests"
            raise KvtraceError("no such request in this report", held, _RUN) from None
        raise
    return [row for row in rows if row["id"] == ident][number]
