"""All rows, by section."""

from __future__ import annotations

from collections.abc import Iterable

from matrix_rows import models, requests, topologies
from matrix_rows.row import Row

SECTIONS: dict[str, tuple[Row, ...]] = {
    "topologies": topologies.ROWS,
    "requests": requests.ROWS,
    "models": models.ROWS,
}

TITLES = {
    "topologies": "Topologies",
    "requests": "Kinds of requests",
    "models": "Models",
}


class UnknownRow(Exception):
    """No row has this name; the message is one line."""


def wanted(section: str | None, only: Iterable[str]) -> list[tuple[str, Row]]:
    """(section, row) of those asked for, in the order of the tables. Raises :class:`UnknownRow`."""
    rows = [(name, row) for name, table in SECTIONS.items() if section in (None, name) for row in table]
    names = set(only)
    if unknown := sorted(names - {row.name for _, row in rows}):
        raise UnknownRow(f"no row named {', '.join(unknown)}")
    return [(name, row) for name, row in rows if not names or row.name in names]
