"""Cells, made few: workers that look alike are one map, long runs have several steps in a cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtrace.ledger.run import Engine
from kvtrace.ledger.steps import Array
from kvtrace.picture.cells import Cells, Grid
from kvtrace.picture.collect import WorkerMarks
from kvtrace.picture.picture import Map
from kvtrace.trace.format import STEP_MASK

MOST_COLUMNS = 400
MOST_NUMBERS = 60_000
"""Of one map: numbers in its rows and mixes. With more, its cells become wider."""


@dataclass(frozen=True)
class AlikeWorkers:
    """Workers whose cells are the same: ``cells`` of shape (layers, columns)."""

    workers: list[int]
    layers: tuple[str, ...]
    cells: Cells


def looks(engine: Engine, grid: Grid) -> list[AlikeWorkers]:
    """The workers of an engine, those that look alike together."""
    found: dict[tuple[tuple[str, ...], bytes], AlikeWorkers] = {}
    for number, worker in enumerate(engine.workers):
        start, end = grid.offsets[number], grid.offsets[number + 1]
        if start == end:
            continue
        cells = grid.cells[start:end]
        key = worker.kv_layers, cells.tobytes()
        found.setdefault(key, AlikeWorkers([], worker.kv_layers, cells)).workers.append(number)
    return list(found.values())


def drawn(engine: Engine, grid: Grid, seen: Sequence[WorkerMarks], look: AlikeWorkers) -> Map:
    """One map of saves, with as few steps in a cell as its size allows."""
    total = len(grid.steps)
    per = max(1, -(-total // MOST_COLUMNS))
    while True:
        starts = np.arange(0, total, per)
        rows, row_of, mixes = _packed(look.cells, starts)
        if sum(map(len, rows)) + sum(map(len, mixes)) <= MOST_NUMBERS or per >= total:
            break
        per *= 2
    first = seen[look.workers[0]]
    numbers = (grid.steps & STEP_MASK).tolist()
    counts = zip(*(part.tolist() for part in np.unique(look.cells, return_counts=True)), strict=True)
    return Map(
        workers=[engine.workers[at].process for at in look.workers],
        layers=list(look.layers),
        total=total,
        per=per,
        row_of=row_of,
        rows=rows,
        mixes=mixes,
        first=numbers[::per],
        last=[*numbers[per - 1 : -1 : per], numbers[-1]],
        prompt=_sums(grid.prompt, starts),
        decode=_sums(np.maximum(first.tokens - grid.prompt, 0), starts),
        forward_ms=_means(first.spent, starts),
        hooks_ms=_means(first.in_hooks, starts),
        counts=sorted(([kind, times] for kind, times in counts), key=lambda one: (-one[1], -one[0])),
    )


def _packed(cells: Cells, starts: Array) -> tuple[list[list[int]], list[int], list[list[int]]]:
    """(rows, row of each layer, mixes) of a map; see :class:`~kvtrace.picture.picture.Map`."""
    distinct, row_of = np.unique(cells, axis=0, return_inverse=True)
    present = np.unique(distinct).tolist()
    parts = [np.add.reduceat((distinct == kind).astype(np.int64), starts, axis=1) for kind in present]
    stacked = np.stack(parts, axis=2).reshape(-1, len(present))
    table, mix_of = np.unique(stacked, axis=0, return_inverse=True)
    mixes = []
    for counts in table.tolist():
        pairs = [(n, kind) for n, kind in zip(counts, present, strict=True) if n]
        mixes.append([value for n, kind in sorted(pairs, reverse=True) for value in (kind, n)])
    grid = mix_of.reshape(len(distinct), len(starts))
    return [_runs(row) for row in grid], row_of.reshape(-1).tolist(), mixes


def _runs(row: Array) -> list[int]:
    """(length, value) of equal neighbours, alternately."""
    changes = np.flatnonzero(np.diff(row)) + 1
    starts = np.concatenate([[0], changes])
    lengths = np.diff(np.concatenate([starts, [len(row)]]))
    pairs: list[int] = np.stack([lengths, row[starts]], axis=1).reshape(-1).tolist()
    return pairs


def _sums(values: Array, starts: Array) -> list[int]:
    sums: list[int] = np.add.reduceat(values, starts).tolist()
    return sums


def _means(ns: Array, starts: Array) -> list[float]:
    """Milliseconds a step."""
    ran = np.add.reduceat((ns > 0).astype(np.int64), starts)
    sums = np.add.reduceat(ns.astype(float), starts)
    return [round(float(one), 3) for one in sums / np.maximum(ran, 1) / 1e6]
