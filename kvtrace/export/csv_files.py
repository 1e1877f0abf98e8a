"""A run as CSV: a file a table, a header line, cells with a comma or a quote in quotes (RFC 4180).

A text that begins as a formula does in a spreadsheet (``=``, ``+``, ``-``, ``@``) gets a ``'`` before it.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import pandas as pd

from kvtrace.export.folder import Output
from kvtrace.export.frame import with_run
from kvtrace.export.parts import parts
from kvtrace.export.run import Opened
from kvtrace.export.tables import PARTITIONS, TABLES
from kvtrace.ledger import Progress

_FORMULA = ("=", "+", "-", "@")


def write_csv(run: Opened, output: Output, progress: Progress) -> dict[str, int]:
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
            rows = _no_formulas(with_run(part.rows, run.key, part.host))
            rows.to_csv(files[part.table], header=False, index=False, lineterminator="\r\n")
            counts[part.table] += len(rows)
    return counts


def _no_formulas(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with nothing in them that a spreadsheet takes for a formula."""
    for name in rows.select_dtypes("string").columns:
        risky = rows[name].str.startswith(_FORMULA, na=False)
        if risky.any():
            rows[name] = rows[name].mask(risky, "'" + rows[name])
    return rows
