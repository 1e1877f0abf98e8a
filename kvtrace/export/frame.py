"""pandas frames with the types of the export's columns: one place where values become cells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from kvtrace.export.tables import DTYPES, PARTITIONS, TEXT, TableSpec
from kvtrace.words import clean

Cells = Any
"""An array of pandas', with a place for what is missing."""


def cells(values: Any, kind: str) -> Cells:
    """`values` as a column of that type; None is missing."""
    dtype: Any = DTYPES[kind]
    return pd.array(values, dtype=dtype)


def same(value: Any, count: int, kind: str) -> Cells:
    """`count` times the same value."""
    return cells(np.full(count, value, dtype=object if kind == TEXT else None), kind)


def frame(columns: Mapping[str, Cells]) -> pd.DataFrame:
    """A frame of these columns, in their order."""
    made: pd.DataFrame = pd.DataFrame(dict(columns))
    return made


def with_run(rows: pd.DataFrame, run: str, host: str) -> pd.DataFrame:
    """`rows` with the columns of their run and host before them."""
    columns = {name: same(shown(text), len(rows), TEXT) for name, text in (("run", run), ("host", host))}
    return frame({**columns, **{name: rows[name].array for name in rows.columns}})


def empty(table: TableSpec) -> pd.DataFrame:
    """No rows, with the columns and types of a table, the partitions' first."""
    return frame({one.name: cells([], one.type) for one in (*PARTITIONS, *table.columns)})


def shown(text: str) -> str | None:
    """A text of the trace on one line, with nothing in it that a terminal would obey; None for none."""
    return clean(text) or None
