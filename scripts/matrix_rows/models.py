"""Rows: tiny models of other architectures, with random weights."""

from __future__ import annotations

from matrix_rows.row import Row

ROWS: tuple[Row, ...] = ()
