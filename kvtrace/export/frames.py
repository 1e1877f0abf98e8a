"""``kvtrace.load``: a run as pandas frames, for notebooks and scripts."""

from __future__ import annotations

import html
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import pandas as pd

from kvtrace.errors import KvtraceError
from kvtrace.export.books import of_run
from kvtrace.export.frame import empty, with_run
from kvtrace.export.parts import parts_of_records
from kvtrace.export.run import Opened, open_run
from kvtrace.export.selection import Wanted, parse_steps
from kvtrace.export.tables import BY_NAME, EVENTS, FINDINGS, LEDGER, REQUESTS, STEPS
from kvtrace.report.load import read_report
from kvtrace.report.model import Report, RequestRow
from kvtrace.story.locate import traced_directory
from kvtrace.words import clean, count, plural

_SHOWN = 12
"""Rows of a table in a notebook."""


def load(
    path: str | Path, *, steps: str | tuple[int, int] = "", layers: str = "", request: str = ""
) -> TraceFrames:
    """The run at `path`, as pandas frames.

    Args:
        path: a run directory of ``kvtrace run``, or a report.json; the latter alone has no events and steps.
        steps: ``"100:200"`` or ``(100, 200)``: only these, both included. The ledger and the findings are
            those of the whole run.
        layers: ``"0,5-8"``, or parts of names: of what belongs to a layer only these.
        request: id of the client or the engine, or its unique beginning: only this one, and its steps.

    Raises:
        KvtraceError: nothing there that can be read; no such step, layer or request.
    """
    wanted = Wanted(parse_steps(steps if isinstance(steps, str) else "{}:{}".format(*steps)), layers, request)
    if traced_directory(path) is None and Path(path).is_file():
        if wanted != Wanted():
            raise KvtraceError("a report without its run", clean(str(path)), "a part needs the run directory")
        return TraceFrames(read_report(path))
    run = open_run(path, wanted)
    return TraceFrames(run.report, run)


class TraceFrames:
    """One run. Its frames are made when they are first asked for; columns and units: tables.md."""

    def __init__(self, report: Report, run: Opened | None = None) -> None:
        self.report = report
        """The report, as in report.json."""
        self._run = run

    @cached_property
    def requests(self) -> pd.DataFrame:
        """A row a request; of a report without its run the worst ones only."""
        rows: Sequence[RequestRow] = (
            self.report["requests"]["rows"] if self._run is None else self._run.requests
        )
        return self._whole(of_run(REQUESTS, self.report, rows))

    @cached_property
    def ledger(self) -> pd.DataFrame:
        """Token-layers by outcome, cause and grade."""
        return self._whole(of_run(LEDGER, self.report, ()))

    @cached_property
    def findings(self) -> pd.DataFrame:
        """Causes: found, ruled out, not observed."""
        return self._whole(of_run(FINDINGS, self.report, ()))

    @property
    def events(self) -> pd.DataFrame:
        """A row a record of the spools: bound it with ``steps=`` where a run is long."""
        return self._of_records[EVENTS.name]

    @property
    def steps(self) -> pd.DataFrame:
        """A row a step and side: the scheduler's, and each worker's."""
        return self._of_records[STEPS.name]

    @cached_property
    def _of_records(self) -> dict[str, pd.DataFrame]:
        if self._run is None:
            raise KvtraceError(
                "a report without its run",
                "events and steps are read from the spools",
                "load the run directory",
            )
        found: dict[str, list[pd.DataFrame]] = {EVENTS.name: [], STEPS.name: []}
        for part in parts_of_records(self._run):
            found[part.table].append(self._whole(part.rows, part.host))
        return {
            name: pd.concat(rows, ignore_index=True) if rows else empty(BY_NAME[name])
            for name, rows in found.items()
        }

    def _whole(self, rows: pd.DataFrame, host: str | None = None) -> pd.DataFrame:
        run = self._run.key if self._run is not None else self.report["run"]["name"]
        return with_run(rows, run, self.report["run"]["host"] if host is None else host)

    def __repr__(self) -> str:
        amount = plural(self.report["requests"]["total"], "request")
        return f"<kvtrace run {clean(self.report['run']['name'], 80)!r}: {amount}>"

    def _repr_html_(self) -> str:
        """What a notebook shows: the verdict, the ledger and the findings."""
        run = self.report["run"]
        vllm = f"vLLM {run['vllm']}" if run["vllm"] else ""
        facts = ", ".join(
            filter(None, (run["name"], vllm, f"{count(self.report['requests']['total'])} requests"))
        )
        found = self.findings[self.findings["status"] == "found"]
        return "\n".join(
            (
                "<div>",
                f"<p><b>{html.escape(clean(self.report['verdict']))}</b><br>{html.escape(clean(facts))}</p>",
                _table(self.ledger[["ledger", "connector", "outcome", "cause", "grade", "tokens"]]),
                _table(found[["severity", "id", "tokens", "requests", "title"]]),
                "<p>Frames: <code>.events .steps .requests .ledger .findings</code></p>",
                "</div>",
            )
        )


def _table(rows: pd.DataFrame) -> str:
    return str(rows.to_html(index=False, na_rep="", max_rows=_SHOWN, border=0))
