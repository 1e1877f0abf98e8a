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


@dataclass(frozen=True)
class Example:
    """One of a finding's examples that is of this request."""

    finding: str
    title: str
    step: int
    text: str


@dataclass
class Summary:
    """One request, as far as a report goes."""

    row: dict[str, Any]  # as in report.json (requests.rows)
    events: list[Example] = field(default_factory=list)
    remedy: list[str] = field(default_factory=list)  # of the finding that its verdict names
    layers: int = 0
    ranks: int = 0

    def document(self) -> dict[str, Any]:
        """As JSON: ``kvtrace.story-of-report/1``."""
        events = [vars(event) for event in self.events]
        return {"schema": SCHEMA, "request": self.row, "events": events, "remedy": self.remedy}


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
        Example(finding["id"], finding["title"], event["step"], event["text"])
        for finding in report["findings"]
        for event in finding["events"]
        if event["request"] == row["id"]
    ]
    cause = str(row["verdict"])
    remedy = [line for one in report["findings"] if one["id"] == cause for line in one["remedy"]]
    engine = next((one for one in report["run"]["engines"] if one["tag"] == row["engine"]), None)
    found = Summary(row, events, list(dict.fromkeys(remedy)))
    if engine is not None:
        found.layers, found.ranks = engine["kv_layers"], len(engine["ranks"])
    return found


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
