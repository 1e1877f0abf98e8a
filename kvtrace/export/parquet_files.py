"""A run as Parquet: a folder a table, and in it the run, host and rank as folders (hive style).

``OUT/events/run=nightly-1f2e3d4c/host=node7/rank=0/worker-r0-4711-9f3c.parquet``: DuckDB, Ray Data, Spark and
pyarrow read a fleet's runs in one OUT as one table. pyarrow is imported here only.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from kvtrace.export.folder import Output
from kvtrace.export.parts import TablePart, parts
from kvtrace.export.run import Opened
from kvtrace.export.tables import BOOL, BY_NAME, FLOAT, INT, RANK, TABLES, TEXT, TableSpec
from kvtrace.ledger import Progress

ROW_GROUP = 1 << 16
"""Rows that are gathered before they are written: what a reader can leave out as a whole."""


def write_parquet(run: Opened, output: Output, progress: Progress) -> dict[str, int]:
    """Writes all tables into the output's folder; rows written, by table.

    Raises:
        ImportError: there is no pyarrow.
        SpoolError: a spool vanished.
        OSError: the disk is full, ...
    """
    counts = dict.fromkeys((table.name for table in TABLES), 0)
    for table in TABLES:
        output.replaces(Path(table.name) / _folder("run", run.key))
    with ExitStack() as stack:
        files: dict[tuple[str, str, int], _ParquetFile] = {}
        source = ""
        for part in parts(run, progress):
            if part.source != source:  # a spool is read: its files are whole
                stack.close()
                files, source = {}, part.source
            ranks = part.rows[RANK].to_numpy(dtype=np.int64)
            for rank in np.unique(ranks).tolist():
                key, rows = (part.table, part.host, rank), part.rows[ranks == rank]
                if key not in files:
                    path = output.file(_place(run, part, rank))
                    files[key] = stack.enter_context(closing(_ParquetFile(path, part.table)))
                files[key].add(rows)
                counts[part.table] += len(rows)
    return counts


def _place(run: Opened, part: TablePart, rank: int) -> Path:
    folders = (_folder("run", run.key), _folder("host", part.host), _folder(RANK, str(rank)))
    return Path(part.table, *folders, f"{quote(part.source, safe='')[:120]}.parquet")


def _folder(column: str, value: str) -> str:
    """``host=node7``; what a folder's name may not hold is percent-encoded, as readers expect it."""
    return f"{column}={quote(value[:80], safe='') or 'unknown'}"


def schema(table: TableSpec) -> Any:
    """The Arrow schema of a table; each field's metadata has its unit and meaning."""
    import pyarrow as pa

    types = {TEXT: pa.string(), INT: pa.int64(), FLOAT: pa.float64(), BOOL: pa.bool_()}
    return pa.schema(
        [
            pa.field(one.name, types[one.type], metadata={"unit": one.unit, "meaning": one.meaning})
            for one in table.columns
        ]
    )


class _ParquetFile:
    """One file, written a row group at a time."""

    def __init__(self, path: Path, table: str) -> None:
        import pyarrow.parquet as pq

        self._schema = schema(BY_NAME[table])
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")
        self._held: list[Any] = []
        self._rows = 0

    def add(self, rows: Any) -> None:
        import pyarrow as pa

        table = pa.Table.from_pandas(rows[self._schema.names], schema=self._schema, preserve_index=False)
        self._held.append(table.replace_schema_metadata(None))
        self._rows += len(rows)
        if self._rows >= ROW_GROUP:
            self._write()

    def _write(self) -> None:
        import pyarrow as pa

        if self._held:
            self._writer.write_table(pa.concat_tables(self._held).combine_chunks(), row_group_size=ROW_GROUP)
        self._held, self._rows = [], 0

    def close(self) -> None:
        self._write()
        self._writer.close()
