"""Rows of the tables: names as attributes, values as they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd


def rows(table: pd.DataFrame) -> Iterator[Any]:
    """The rows as named tuples without the index."""
    yield from table.itertuples(index=False, name="Row")
