"""The records of a run that speak of requests, and those of chosen steps on the workers.

Kept apart from the ledger, which turns records into tables and drops them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvtrace.ledger.run import RunError
from kvtrace.ledger.scan import of_a_connector
from kvtrace.trace import rows
from kvtrace.trace.format import WORDS
from kvtrace.trace.reader import Documents, Records, Spool, SpoolError, spool_paths
from kvtrace.trace.rows import KIND_OF, Row, kind

_OF_REQUESTS = (
    rows.Arrival, rows.Growth, rows.Lookup, rows.Allocation, rows.Chunk, rows.MetadataEntry, rows.Preemption,
    rows.TransferBegun, rows.TransferDone, rows.Finish,
)  # fmt: skip
"""They have a field ``request``."""
_OF_STEPS = (rows.HookCall, rows.OpCall, rows.Execution, rows.QuietCalls, rows.Effect)
"""They have a field ``step``, in the same word."""
_STEP = rows.HookCall._fields.index("step")


@dataclass
class Source:
    """One spool: its rows about requests (n, 8), and what they refer to."""

    path: Path
    names: dict[int, str]
    documents: Documents
    rows: Records
    ids: set[str] = field(default_factory=set)

    def of_request(self, ident: str) -> list[Row]:
        """The rows of one request, in file order."""
        ids = [number for number, text in self.names.items() if text == ident]
        keep = np.zeros(len(self.rows), dtype=bool)
        for row in _OF_REQUESTS:
            request = self.rows[:, row._fields.index("request")]
            keep |= (kind(self.rows[:, 0]) == KIND_OF[row]) & np.isin(request, ids)
        return [rows.decode(words) for words in self.rows[keep].tolist()]


def sources(run_dir: Path) -> list[Source]:
    """Every spool that can be read.

    Raises:
        RunError: none can.
    """
    found: list[Source] = []
    failure: SpoolError | None = None
    for path in spool_paths(run_dir):
        try:
            found.append(_source(path))
        except SpoolError as error:
            failure = error
    if not found:
        raise RunError(str(failure) if failure else f"{run_dir}: no spool in it")
    return found


def _source(path: Path) -> Source:
    spool = Spool(path)
    wanted = [KIND_OF[row] for row in _OF_REQUESTS]
    kept = [np.empty((0, WORDS), dtype=np.int64)]
    kept += [chunk[np.isin(kind(chunk[:, 0]), wanted)] for chunk in spool.chunks()]
    everyone = np.concatenate(kept)
    outermost = (rows.detail(everyone[:, 0]) == 0) | ~of_a_connector(everyone)
    source = Source(path, spool.names, spool.documents(), everyone[outermost])
    alive: tuple[type[Any], ...] = (rows.Arrival, rows.Chunk, rows.Finish)
    for row in alive:
        numbers = np.unique(rows.of_kind(row, source.rows).request).tolist()
        source.ids.update(spool.names.get(number, "") for number in numbers)
    source.ids.discard("")
    return source


def step_rows(path: Path, steps: Collection[int]) -> tuple[dict[int, str], dict[int, list[Row]]]:
    """(names, rows by step) of what a spool's workers did in these steps (engine tag included).

    Raises:
        SpoolError: the file cannot be read.
    """
    spool = Spool(path)
    wanted, kinds = sorted(steps), [KIND_OF[row] for row in _OF_STEPS]
    found: dict[int, list[Row]] = {}
    for chunk in spool.chunks():
        of_steps = np.isin(kind(chunk[:, 0]), kinds) & np.isin(chunk[:, _STEP], wanted)
        for words in chunk[of_steps].tolist():
            found.setdefault(words[_STEP], []).append(rows.decode(words))
    return spool.names, found
