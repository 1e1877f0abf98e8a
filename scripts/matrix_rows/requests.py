"""Rows: kinds of requests, and what may happen to them."""

from __future__ import annotations

from matrix_rows.row import Row

ROWS: tuple[Row, ...] = ()
