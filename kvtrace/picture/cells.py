"""The kind of each cell: what became of the prompt tokens of its step, and where there are none what was
called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kvtrace.ledger.run import Engine, Span
from kvtrace.ledger.steps import Array, locate
from kvtrace.picture import collect, kinds
from kvtrace.picture.collect import Marks, WorkerMarks
from kvtrace.picture.picture import CellKind

Cells = NDArray[np.uint8]
"""Numbers of kinds.KINDS."""

_MERGE: Cells = np.array(
    [[kinds.NUMBER[kinds.worse(one, other)] for other in kinds.KINDS] for one in kinds.KINDS], dtype=np.uint8
)
_AGAIN: Cells = np.array(
    [kinds.NUMBER[kinds.AGAIN if kind == kinds.QUIET else kind] for kind in kinds.KINDS], dtype=np.uint8
)
"""What a kind becomes in a step with prompt tokens of which the ledger counts none."""
_BY_MARK = (
    (collect.RAISED, kinds.RAISED),
    (collect.READ, kinds.READ),
    (collect.WORK, kinds.DECLARED),
    (collect.NO_FORWARD, kinds.IDLE),
    (collect.CALLED, kinds.QUIET),
    (collect.FULL, kinds.REPLAY),
    (collect.NO_CONNECTOR, kinds.NO_CONNECTOR),
    (collect.NO_METADATA, kinds.NOT_BOUND),
    (collect.OTHER_SKIP, kinds.NOT_AROUND),
    (collect.RAN, kinds.NOT_CALLED),
    (collect.EXECUTED, kinds.NO_CALL),
)
"""What a mark says of a cell without prompt tokens: the first one counts."""
_LOADS_BY_MARK = (
    (collect.LOAD_RAISED, kinds.LOAD_RAISED),
    (collect.LOADED, kinds.LOADED),
    (collect.LOAD_WORK, kinds.LOAD_DECLARED),
    (collect.LOAD_CALLED, kinds.LOAD_IDLE),
    (collect.EXECUTED, kinds.NO_LOAD),
)
"""The same of a cell in a map of loads."""
_OF_LOADS = collect.LOADED | collect.LOAD_WORK | collect.LOAD_RAISED


@dataclass(frozen=True)
class Grid:
    """One engine: ``cells`` of shape (pairs, steps), the pairs as the ledger counts them; ``prompt``: prompt
    tokens computed in each step."""

    steps: Array
    cells: Cells
    prompt: Array
    offsets: Sequence[int]
    """Where each worker's pairs begin; one more for the end."""


def grid(
    engine: Engine, steps: Array, seen: Sequence[WorkerMarks], spans: Iterable[Span], prompt: Array
) -> Grid:
    """The cells of an engine.

    Args:
        steps: sorted, with the engine's tag.
        spans: of the engine's requests.
        prompt: prompt tokens computed in each step.
    """
    offsets = [0]
    for worker in engine.workers:
        offsets.append(offsets[-1] + len(worker.kv_layers))
    outcomes: Cells = np.zeros((offsets[-1], len(steps)), dtype=np.uint8)
    for span in spans:
        at, known = locate(steps, np.array([span.step], dtype=np.int64))
        if not known[0]:
            continue
        column, kind = int(at[0]), kinds.NUMBER[kinds.of_outcome(span.outcome)]
        members = [pair for pair in span.pairs if pair < offsets[-1]]
        before = outcomes[members, column]
        outcomes[members, column] = np.where(before == 0, kind, _MERGE[before, kind])
    for one, start, end in zip(seen, offsets, offsets[1:], strict=False):
        mine = outcomes[start:end]
        called = _called(one.marks[: end - start], _BY_MARK)
        called[:, prompt > 0] = _AGAIN[called[:, prompt > 0]]
        mine[:] = np.where(mine == 0, called, mine)
    return Grid(steps, outcomes, prompt, offsets)


def loads(saves: Grid, seen: Sequence[WorkerMarks]) -> Grid | None:
    """The cells of the same steps and layers with what was loaded; None where nothing was to be loaded."""
    if not any((one.marks & _OF_LOADS).any() for one in seen):
        return None
    cells: Cells = np.zeros_like(saves.cells)
    for one, start, end in zip(seen, saves.offsets, saves.offsets[1:], strict=False):
        cells[start:end] = _called(one.marks[: end - start], _LOADS_BY_MARK)
    return replace(saves, cells=cells)


def _called(marks: Marks, by_mark: Iterable[tuple[int, CellKind]]) -> Cells:
    found: Cells = np.zeros(marks.shape, dtype=np.uint8)
    for mark, kind in reversed(tuple(by_mark)):
        found[(marks & mark) != 0] = kinds.NUMBER[kind]
    return found
