"""Rows of the tables: names as attributes, values as they are."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from functools import cache
from typing import Any

import pandas as pd


def rows(table: pd.DataFrame) -> Iterator[Any]:
    """The rows as named tuples without the index: as ``itertuples`` gives them, in a tenth of the time."""
    yield from map(_row(tuple(table.columns))._make, table.to_numpy(object).tolist())


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows, each as a dictionary of its own."""
    names = list(table.columns)
    return [dict(zip(names, row, strict=True)) for row in table.to_numpy(object).tolist()]


@cache
def _row(names: tuple[str, ...]) -> type[Any]:
    return namedtuple("Row", names, rename=True)
