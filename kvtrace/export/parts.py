"""The rows of a run, table by table, in frames of bounded size: what CSV and Parquet are written from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from kvtrace.export.books import of_run
from kvtrace.export.events import event_rows, step_rows
from kvtrace.export.run import Opened
from kvtrace.export.tables import EVENTS, FINDINGS, LEDGER, REQUESTS, STEPS
from kvtrace.ledger import Progress, unwatched


@dataclass(frozen=True)
class TablePart:
    """Some rows of a table, of one host; ``source`` is the spool's stem, or "run"."""

    table: str
    host: str
    source: str
    rows: pd.DataFrame
    """The table's columns, with ``rank`` before them."""


def parts(run: Opened, progress: Progress) -> Iterator[TablePart]:
    """All tables of a run; those of its records a chunk at a time.

    Raises:
        SpoolError: a spool vanished.
    """
    for table in (REQUESTS, LEDGER, FINDINGS):
        yield TablePart(table.name, run.host, "run", of_run(table, run.report, run.requests))
    yield from parts_of_records(run, progress)


def parts_of_records(run: Opened, progress: Progress = unwatched) -> Iterator[TablePart]:
    """The tables of its records alone.

    Raises:
        SpoolError: a spool vanished.
    """
    for process in run.processes:
        for chunk, names in run.chunks(process, progress):
            if len(chunk):
                yield TablePart(EVENTS.name, process.host, process.stem, event_rows(chunk, names, process))
                yield TablePart(STEPS.name, process.host, process.stem, step_rows(chunk, names, process))
