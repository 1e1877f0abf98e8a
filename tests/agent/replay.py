"""Block tables from BLOCKS records, as any reader of a spool makes them."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvtrace.trace import rows
from kvtrace.trace.format import Flag, Kind

Tables = dict[str, dict[int, list[int]]]
"""Request -> KV cache group -> block ids; 0 at places of which no record speaks."""


def replayed(names: dict[int, str], table: np.ndarray, steps: Iterable[int]) -> dict[int, Tables]:
    """The tables after each of ``steps`` (ascending)."""
    given = [rows.decode(words) for words in table[rows.kind(table[:, 0]) == Kind.BLOCKS].tolist()]
    found: dict[int, Tables] = {}
    tables: Tables = {}
    at = 0
    began: set[tuple[str, int]] = set()
    for step in steps:
        while at < len(given) and given[at].step <= step:
            row = given[at]
            req_id = names[row.request]
            if rows.flags(row.head) & Flag.FIRST and (req_id, row.step) not in began:
                began.add((req_id, row.step))
                tables[req_id] = {}
            blocks = tables.setdefault(req_id, {}).setdefault(row.group, [])
            by = 1 if row.count > 0 else -1
            ids = [row.block + by * n for n in range(abs(row.count))]
            blocks.extend([0] * (row.first - len(blocks)))
            blocks[row.first : row.first + len(ids)] = ids
            at += 1
        found[step] = {req_id: {g: list(ids) for g, ids in one.items()} for req_id, one in tables.items()}
    return found
