"""Rows of the tables: names as attributes, values as they are."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from functools import cache
from typing import Any

import pandas as pd


def rows(table: pd.DataFrame) -> Iterator[Any]:
    """The rows as named tuples without the index; as ``itertuples`` gives them, column by column."""
    columns = [table.iloc[:, at].tolist() for at in range(table.shape[1])]
    yield from map(_row(tuple(table.columns))._make, zip(*columns, strict=True))


@cache
def _row(names: tuple[str, ...]) -> type[Any]:
    return namedtuple("Row", names, rename=True)
