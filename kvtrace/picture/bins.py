"""Cells, made few: workers that look alike are one map, long runs have several steps in a cell."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvtrace.ledger.run import Engine
from kvtrace.ledger.steps import Array
from kvtrace.picture import kinds
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


@dataclass(frozen=True)
class Columns:
    """The columns before binning: a step each, and one for each row of dummy runs between steps."""

    number: Array  # the step's number, 0 for dummy runs
    weight: Array  # how many steps or runs
    of_step: Array  # index into the grid's steps, -1 for dummy runs


def columns(steps: Array, seen: Sequence[WorkerMarks]) -> Columns:
    """Steps in their order; dummy runs stand where they ran."""
    gaps: Counter[int] = Counter()
    for one in seen:
        began = one.t0[one.t0 > 0]
        index = np.flatnonzero(one.t0 > 0)
        after = np.searchsorted(began, one.dummies)
        places = [int(index[at]) if at < len(index) else len(steps) for at in after.tolist()]
        for place, runs in Counter(places).items():
            gaps[place] = max(gaps[place], runs)
    found: list[tuple[int, int, int]] = []
    for at, step in enumerate([*(steps & STEP_MASK).tolist(), None]):
        if gaps[at]:
            found.append((0, gaps[at], -1))
        if step is not None:
            found.append((step, 1, at))
    return Columns(*np.array(found, dtype=np.int64).reshape(-1, 3).T)


def looks(engine: Engine, grid: Grid, seen: Sequence[WorkerMarks], there: Columns) -> list[AlikeWorkers]:
    """The workers of an engine, those that look alike together."""
    found: dict[tuple[tuple[str, ...], bytes], AlikeWorkers] = {}
    dummy, absent = kinds.NUMBER[kinds.DUMMY], kinds.NUMBER[kinds.NOTHING]
    for number, worker in enumerate(engine.workers):
        start, end = grid.offsets[number], grid.offsets[number + 1]
        if start == end:
            continue
        cells = grid.cells[start:end][:, there.of_step]
        cells[:, there.of_step < 0] = dummy if len(seen[number].dummies) else absent
        key = worker.kv_layers, cells.tobytes()
        found.setdefault(key, AlikeWorkers([], worker.kv_layers, cells)).workers.append(number)
    return list(found.values())


def drawn(engine: Engine, grid: Grid, seen: Sequence[WorkerMarks], there: Columns, look: AlikeWorkers) -> Map:
    """One map of saves, with as few steps in a cell as its size allows."""
    total = len(there.number)
    per = max(1, -(-total // MOST_COLUMNS))
    while True:
        rows, row_of, mixes = _packed(look.cells, there.weight, per)
        if sum(map(len, rows)) + sum(map(len, mixes)) <= MOST_NUMBERS or per >= total:
            break
        per *= 2
    starts = np.arange(0, total, per)
    first = seen[look.workers[0]]
    numbers = there.number
    ends = np.minimum(starts + per, total) - 1
    return Map(
        engine=engine.tag,
        workers=[engine.workers[at].process for at in look.workers],
        layers=list(look.layers),
        total=int(sum(there.number > 0)),
        per=per,
        row_of=row_of,
        rows=rows,
        mixes=mixes,
        first=_least(numbers, starts),
        last=[int(numbers[low : high + 1].max()) for low, high in zip(starts, ends, strict=True)],
        steps=_sums(there.weight, starts),
        prompt=_sums(_of_steps(grid.prompt, there), starts),
        decode=_sums(np.maximum(_of_steps(first.tokens - grid.prompt, there), 0), starts),
        forward_ms=_means(first.spent, there, starts),
        hooks_ms=_means(first.in_hooks, there, starts),
        counts=_counts(look.cells, there.weight),
    )


def _packed(cells: Cells, weight: Array, per: int) -> tuple[list[list[int]], list[int], list[list[int]]]:
    """(rows, row of each layer, mixes) of a map; see :class:`~kvtrace.picture.picture.Map`."""
    distinct, row_of = np.unique(cells, axis=0, return_inverse=True)
    starts = np.arange(0, cells.shape[1], per)
    present = np.unique(distinct).tolist()
    parts = [np.add.reduceat((distinct == kind) * weight, starts, axis=1) for kind in present]
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


def _of_steps(values: Array, there: Columns) -> Array:
    found: Array = np.where(there.of_step >= 0, values[there.of_step], 0)
    return found


def _sums(values: Array, starts: Array) -> list[int]:
    sums: list[int] = np.add.reduceat(values, starts).tolist()
    return sums


def _least(numbers: Array, starts: Array) -> list[int]:
    """The first step of each cell, 0 where it has dummy runs alone."""
    least = np.minimum.reduceat(np.where(numbers > 0, numbers, STEP_MASK), starts)
    found: list[int] = np.where(least == STEP_MASK, 0, least).tolist()
    return found


def _means(ns: Array, there: Columns, starts: Array) -> list[float]:
    """Milliseconds a step."""
    values = _of_steps(ns, there)
    ran = np.add.reduceat((values > 0).astype(np.int64), starts)
    sums = np.add.reduceat(values.astype(float), starts)
    return [round(float(one), 3) for one in sums / np.maximum(ran, 1) / 1e6]


def _counts(cells: Cells, weight: Array) -> list[list[int]]:
    totals = [(int(((cells == kind) * weight).sum()), int(kind)) for kind in np.unique(cells)]
    return [[kind, total] for total, kind in sorted(totals, reverse=True)]
