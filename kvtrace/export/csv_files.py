"""A run as CSV: a file a table, a header line, cells with a comma or a quote in quotes (RFC 4180).

A text that begins as a formula does in a spreadsheet (``=``, ``+``, ``-``, ``@``) gets a ``'`` before it.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import pandas as pd

from kvtrace.export.folder import Output
from kvtrace.export.frame import frame, same, shown
from kvtrace.export.parts import Part, Progress, parts, silent
from kvtrace.export.run import Opened
from kvtrace.export.tables import PARTITIONS, TABLES, TEXT

_FORMULA = ("=", "+", "-", "@")


def write_csv(run: Opened, output: Output, progress: Progress = silent) -> dict[str, int]:
    """Writes ``TABLE.csv`` for each table into the output's folder; rows written, by table.

    Raises:
        SpoolError: a spool vanished.
        OSError: the disk is full, ...
    """
    counts = dict.fromkeys((table.name for table in TABLES), 0)
    with ExitStack() as stack:
        files: dict[str, TextIO] = {}
        for table in TABLES:
            path = output.file(Path(f"{table.name}.csv"))
            files[table.name] = stack.enter_context(open(path, "w", encoding="utf-8", newline=""))
            header = ",".join(column.name for column in (*PARTITIONS, *table.columns))
            files[table.name].write(header + "\r\n")
        for part in parts(run, progress):
            rows = _with_run(run, part)
            rows.to_csv(files[part.table], header=False, index=False, lineterminator="\r\n")
            counts[part.table] += len(rows)
    return counts


def _with_run(run: Opened, part: Part) -> pd.DataFrame:
    """The rows with all columns, and with nothing in them that a spreadsheet takes for a formula."""
    count = len(part.rows)
    columns = {"run": same(shown(run.key), count, TEXT), "host": same(shown(part.host), count, TEXT)}
    for name in part.rows.columns:
        column = part.rows[name]
        if column.dtype == "string":
            risky = column.str.startswith(_FORMULA, na=False)
            if risky.any():
                column = column.mask(risky, "'" + column)
        columns[name] = column.array
    return frame(columns)
