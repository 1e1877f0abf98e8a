"""The records of a run that speak of requests, and those of chosen steps on the workers.

Kept apart from the ledger, which turns records into tables and drops them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvtrace.ledger.model import RunError
from kvtrace.trace.format import COLUMN_INDEX, STEP_SHIFT, Kind
from kvtrace.trace.reader import Documents, Records, Spool, SpoolError, kind, spool_paths

Array = NDArray[np.int64]

REQUEST_KINDS = (
    Kind.REQUEST, Kind.LOOKUP, Kind.ALLOC, Kind.CHUNK, Kind.META, Kind.PREEMPT, Kind.OPEN, Kind.DONE,
    Kind.FINISH,
)  # fmt: skip
_STEP_KINDS = (Kind.HOOK, Kind.OP, Kind.EXEC, Kind.QUIET, Kind.EFFECT)


@dataclass
class Source:
    """One spool: its rows about requests (n, 8), and what they refer to."""

    path: Path
    names: dict[int, str]
    documents: Documents
    rows: Records
    ids: set[str] = field(default_factory=set)

    def of_request(self, ident: str) -> list[tuple[Kind, list[int]]]:
        """The rows of one request, in file order."""
        mine = [number for number, text in self.names.items() if text == ident]
        found: list[tuple[Kind, list[int]]] = []
        kinds = kind(self.rows[:, 0])
        keep = np.zeros(len(self.rows), dtype=bool)
        for one in REQUEST_KINDS:
            keep |= (kinds == one) & np.isin(self.rows[:, COLUMN_INDEX[one]["req"]], mine)
        for row in self.rows[keep].tolist():
            found.append((Kind(row[0] & 0xFF), row))
        return found


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
    wanted = np.array(REQUEST_KINDS, dtype=np.int64)
    kept: list[Records] = []
    for chunk in spool.chunks():
        mine = np.isin(kind(chunk[:, 0]), wanted)
        if mine.any():
            kept.append(chunk[mine])
    rows: Records = np.concatenate(kept) if kept else np.empty((0, 8), dtype=np.int64)
    source = Source(path, spool.names, spool.documents(), rows)
    kinds = kind(rows[:, 0])
    for one in (Kind.REQUEST, Kind.CHUNK, Kind.FINISH):
        numbers = np.unique(rows[kinds == one, COLUMN_INDEX[one]["req"]]).tolist()
        source.ids.update(spool.names.get(number, "") for number in numbers)
    source.ids.discard("")
    return source


def step_rows(path: Path, steps: Collection[int]) -> tuple[dict[int, str], dict[int, list[list[int]]]]:
    """(names, rows by step) of what a spool's workers did in these steps (engine tag included).

    Raises:
        SpoolError: the file cannot be read.
    """
    spool = Spool(path)
    wanted: Array = np.array(sorted(steps), dtype=np.int64)
    found: dict[int, list[list[int]]] = {}
    for chunk in spool.chunks():
        mine = np.isin(kind(chunk[:, 0]), _STEP_KINDS) & np.isin(chunk[:, 3], wanted)
        for row in chunk[mine].tolist():
            found.setdefault(row[3], []).append(row)
    return spool.names, found


def tag_of(step: int) -> int:
    return step >> STEP_SHIFT
