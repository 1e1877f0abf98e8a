"""What watched save calls really did, by worker, step and KV layer.

An ``EFFECT`` record says what one call read of one layer's KV tensor and wrote to files. Here
they become one cell per worker, step and KV layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from kvtrace.ledger.run import Worker
from kvtrace.ledger.scan import SpoolScan
from kvtrace.ledger.steps import Array
from kvtrace.trace import hooks, rows
from kvtrace.trace.format import STEP_MASK, STEP_SHIFT, Flag

WHOLE = -1
"""The column of what a call did without a layer to its name."""
_NO_LAYER = -2
_MOST = 1 << 40
"""A corrupt record can name any number: bounded, so that sums stay sums."""
_SAVING = frozenset(hook.code for hook in hooks.SAVING)


@dataclass(frozen=True, slots=True)
class Cell:
    """What was measured of one layer in one step of one worker."""

    slots: int = -1  # KV slots read, -1 where none could be watched
    unsure: bool = False  # of some call it can't be said what it read
    bytes: int = 0  # in files opened for writing
    files: int = 0
    targets: Mapping[int, int] = field(default_factory=dict)  # digest of a file's path -> latest time


@dataclass(frozen=True)
class MeasuredCells:
    """The cells of one worker: step -> column of its KV layers (or WHOLE) -> cell."""

    steps: Mapping[int, Mapping[int, Cell]] = field(default_factory=dict)
    most: int = 0  # the greatest number of slots that any call of a save hook was seen to read
    elsewhere: bool = False  # a hook that is not for saving was seen to read

    @property
    def later(self) -> bool:
        """Whether other hooks read, and no save hook ever did: that these read nothing in a step says nothing
        of its tokens."""
        return self.elsewhere and not self.most


def measure(scans: Sequence[SpoolScan], workers: Sequence[Worker]) -> dict[tuple[int, str], MeasuredCells]:
    """The cells of each worker, by Worker.key."""
    by_spool = {scan.name: scan for scan in scans}
    return {worker.key: _measured(by_spool[worker.spool], worker) for worker in workers}


def _measured(scan: SpoolScan, worker: Worker) -> MeasuredCells:
    steps = rows.columns(rows.Effect, scan.effects).step
    table = scan.effects[(steps >> STEP_SHIFT == worker.key[0]) & (steps & STEP_MASK != 0)]
    effect = rows.columns(rows.Effect, table)
    marks, saving = rows.flags(effect.head), np.isin(rows.code(effect.head), list(_SAVING))
    stores, loads = marks & Flag.STORE != 0, marks & Flag.LOAD != 0
    counts = saving & (stores | ~loads)
    # A connector inside another one is measured twice: the outer one counts.
    index = worker.connector.ordinal & 0xFF if worker.connector else -1
    own = rows.detail(effect.head) == index
    if own.any():
        counts &= own
    of_layer = {name: column for column, name in enumerate(worker.kv_layers)}
    idents, at = np.unique(effect.layer, return_inverse=True)
    columns = [_column(scan.names.get(ident, ""), of_layer) for ident in idents.tolist()]
    column = np.array(columns, np.int64)[at]
    counts &= column > _NO_LAYER
    order = np.lexsort((column[counts], effect.step[counts]))
    return MeasuredCells(
        steps=_cells(rows.columns(rows.Effect, table[counts][order]), column[counts][order]),
        most=int(effect.slots[stores & saving].max(initial=0)),
        elsewhere=bool((effect.slots[stores & ~saving] > 0).any()),
    )


def _column(name: str, of_layer: Mapping[str, int]) -> int:
    return of_layer.get(name, _NO_LAYER) if name else WHOLE


def _cells(effect: rows.Effect, column: Array) -> dict[int, dict[int, Cell]]:
    """Of records that are in the order of their steps and columns."""
    cells: dict[int, dict[int, Cell]] = defaultdict(dict)
    starts = np.flatnonzero(np.diff(effect.step, prepend=-1) | np.diff(column, prepend=_NO_LAYER))
    known, wrote = effect.slots >= 0, (effect.target != 0) & (effect.files > 0)
    sums = [
        np.add.reduceat(np.clip(of, 0, _MOST), starts).tolist() if len(starts) else []
        for of in (effect.slots, effect.bytes, effect.files, known, ~known, wrote)
    ]
    targets = zip(effect.target[wrote].tolist(), effect.t[wrote].tolist(), strict=True)
    alike: dict[tuple[int, bool, int, int], Cell] = {}  # most are, and are kept once
    for step, here, slots, size, files, some, unsure, number in zip(
        effect.step[starts].tolist(), column[starts].tolist(), *sums, strict=True
    ):
        latest: dict[int, int] = {}
        for target, t in islice(targets, number):
            latest[target] = max(t, latest.get(target, t))
        cell = Cell(slots if some else -1, unsure > 0, size, files, latest)
        if not latest:
            cell = alike.setdefault((cell.slots, cell.unsure, cell.bytes, cell.files), cell)
        cells[step][here] = cell
    return cells
