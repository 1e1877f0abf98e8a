"""One worker's store calls, held against what was measured of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

import numpy as np
from numpy.typing import NDArray

from kvtrace.ledger.ends import SaveEnd
from kvtrace.ledger.model import Swallowed, Trust, Worker
from kvtrace.ledger.reported import caught_in
from kvtrace.ledger.saves.measured import Cell, Measured
from kvtrace.ledger.saves.pipeline import Ends
from kvtrace.ledger.saves.stores import Stores
from kvtrace.ledger.steps import Array
from kvtrace.terms import Grade
from kvtrace.trace import hooks

LEAST_BYTES = 8
"""Bytes that a slot of one layer takes in a file, at the very least."""

At = tuple[int, int]
"""A store call of one worker: (row of the store step, KV layer)."""


@dataclass(frozen=True)
class Call:
    """A watched store call."""

    at: At
    slots: int  # that it read
    empty_files: bool  # it wrote files that hold next to nothing
    wrote_nothing: bool


class WorkerCalls:
    """One worker's store calls, while they are held against what was measured.

    Attributes:
        ends: as :func:`kvtrace.ledger.saves.pipeline.ends` gives them, corrected.
        kept: of the same shape: slots that were read where fewer than declared, else -1.
        grades: of the same shape: how well the end is seen (Grade).
        implied: of the same shape: the end of what no metadata names, where it was not read in this layer.
        void: of the same shape: what was read in that step did not come to rest.
        misread: (step, row of a request) -> layers in which other slots were read for it.
        agreed: calls that read what they should.
        lost: calls whose KV, or a part of it, is not in the store.
    """

    def __init__(self, worker: Worker, table: Measured, stores: Stores, ends: Ends) -> None:
        self.worker, self.table, self.stores = worker, table, stores
        self.ends = ends.copy()
        self.kept: Array = np.full(ends.shape, -1, dtype=np.int64)
        self.grades: NDArray[np.int8] = np.full(ends.shape, Grade.DECLARED, dtype=np.int8)
        self.implied = self.ends
        self.void: NDArray[np.bool_] = np.zeros(ends.shape, dtype=bool)
        self.misread: dict[tuple[int, int], NDArray[np.bool_]] = {}
        self.agreed: set[At] = set()
        self.lost: set[At] = set()
        self._work = (ends == SaveEnd.SAVED) & (stores.slots[:, None] > 0)

    def stands(self, at: At) -> bool:
        """Whether a call is still taken to have saved."""
        return bool(self.ends[at] == SaveEnd.SAVED)

    def at_rest(self, at: At) -> bool:
        """Whether all that a call read was read back once the run was over, and is the same."""
        return False

    def lose(self, at: At, end: SaveEnd, kept: int = -1) -> None:
        """A call did not do its work, or its KV did not stay."""
        self.ends[at], self.kept[at] = end, kept
        self.void[at] = True
        self.agreed.discard(at)
        self.lost.add(at)

    def forgive(self, at: At) -> None:
        """The KV of a call that was lost is in the store by another one."""
        self.ends[at], self.kept[at] = SaveEnd.SAVED, -1
        self.void[at] = False
        self.lost.discard(at)

    def _step(self, at: At) -> int:
        return int(self.stores.steps[at[0]])

    def _layer(self, at: At) -> str:
        return self.worker.kv_layers[at[1]]

    # -- judging

    def judge(self, certain: bool, swallowed: Sequence[Swallowed]) -> Trust:
        """Hold each watched call against the metadata.

        Args:
            certain: a call that is seen to read nothing did read nothing.
            swallowed: exceptions that connectors handled themselves.
        """
        caught = caught_in(self.worker, swallowed, hooks.SAVING)
        trust = Trust(calls=int(self._work.sum())) + self._judge_implied()
        full, less = self._watched()
        caught = caught.as_usual(len(less), len(self.worker.kv_layers))
        self.agreed |= {call.at for call in full}
        silent = [call.at for call in full if call.wrote_nothing]
        raised = [at for at in silent if caught.sure.at(self._step(at), self._layer(at))]
        all_write = len(raised) == len(silent)
        if all_write:
            # Read, and lost on the way to the file: calls without an exception do write.
            for at in raised:
                self.lose(at, SaveEnd.CAUGHT)
        unwritten = len(raised) if all_write else 0
        trust += Trust(measured=len(full), agreed=len(full) - unwritten, unwritten=unwritten)
        if caught.facts:
            still = sum(caught.at(self._step(at), self._layer(at)) for at in self.agreed)
            trust += Trust(caught_agreed=still)
        usual = caught.calls * 2 >= len(less)
        for call in less:
            handled = bool(caught.facts) and (usual or caught.at(self._step(call.at), self._layer(call.at)))
            trust += self._judge_short(call, handled, certain, all_write)
        return trust

    def _judge_implied(self) -> Trust:
        """Calls in steps whose metadata names no store: they are what was measured."""
        agreed = 0
        for row in np.flatnonzero(self.stores.implied).tolist():
            cells = self.table.steps.get(int(self.stores.steps[row]))
            for column in np.flatnonzero(self._work[row]).tolist():
                cell = self._cell(row, column, cells) if cells else None
                read = -1 if cell is None else cell.slots
                if read <= 0:
                    self.ends[row, column] = SaveEnd.NOT_OBSERVED
                    continue
                agreed += 1
                self.agreed.add((row, column))
                if read < int(self.stores.slots[row]):
                    self.ends[row, column], self.kept[row, column] = SaveEnd.NOT_OBSERVED, read
        return Trust(measured=agreed, agreed=agreed)

    def _watched(self) -> tuple[list[Call], list[Call]]:
        """The calls that read all that their metadata names, and those that read less."""
        full: list[Call] = []
        less: list[Call] = []
        for row, step in enumerate(self.stores.steps.tolist()):
            cells = self.table.steps.get(step)
            if not cells or self.stores.implied[row]:
                continue
            least = int(self.stores.whole[row])
            for at, cell in self._cells(row, cells):
                written = [cell] if self.worker.saves_per_layer else list(cells.values())
                nowhere = all(one.wrote_nothing for one in written)
                if cell.slots > 0 and cell.slots >= least:
                    full.append(Call(at, cell.slots, False, nowhere))
                    continue
                empty = cell.files > 0 and cell.bytes < int(self.stores.slots[row]) * LEAST_BYTES
                short = cell.slots > 0 or empty or (cell.slots == 0 and cell.bytes <= 0)
                if not short or not self._complete(step, cell):
                    continue  # the rest may have been read in a call that was not watched
                if not least and not cell.slots and not empty:
                    self.ends[at] = SaveEnd.NOT_OBSERVED  # less than a block: rounded away, or lost
                    continue
                less.append(Call(at, max(0, cell.slots), empty, nowhere))
        return full, less

    def _cells(self, row: int, cells: Mapping[int, Cell]) -> Iterator[tuple[At, Cell]]:
        for column in np.flatnonzero(self._work[row]).tolist():
            cell = self._cell(row, column, cells)
            if cell is not None:
                yield (row, column), cell

    def _cell(self, row: int, column: int, cells: Mapping[int, Cell]) -> Cell | None:
        cell = cells.get(column)
        if cell is not None or self.worker.saves_per_layer:
            return cell
        step = int(self.stores.steps[row])
        return _untouched(cells) if self.table.called(step, hooks.WAIT_SAVE) else None

    def _complete(self, step: int, cell: Cell) -> bool:
        """Whether all calls of a step that may read this layer were watched."""
        connector = self.worker.connector
        waits = connector is None or connector.does(hooks.WAIT_SAVE)
        complete = not waits or self.table.called(step, hooks.WAIT_SAVE)
        return complete and (not self.worker.saves_per_layer or cell.by(hooks.SAVE_LAYER))

    def _judge_short(self, call: Call, handled: bool, certain: bool, all_write: bool) -> Trust:
        """A call that read less than it should.

        Args:
            handled: the connector handled an exception of its own in it.
            all_write: calls that read all do write.
        """
        if not call.slots and not (certain or call.empty_files or handled):
            if not self.stores.asynchronous:
                self.ends[call.at] = SaveEnd.NOT_OBSERVED
            return Trust(blind=1)
        end = SaveEnd.CAUGHT if handled else SaveEnd.PART_READ if call.slots else SaveEnd.NOTHING_READ
        nothing_stayed = not call.slots or (handled and call.wrote_nothing and all_write)
        self.lose(call.at, end, -1 if nothing_stayed else call.slots)
        if not call.slots:
            return Trust(measured=1, nothing=1, empty=int(call.empty_files))
        declared = int(self.stores.slots[call.at[0]])
        return Trust(measured=1, short=1, short_read=call.slots, short_declared=declared)

    def doubt(self) -> Trust:
        """No watched call of this worker did its work: the others can't be taken as declared."""
        unknown = 0
        for row, step in enumerate(self.stores.steps.tolist()):
            if not self.stores.slots[row]:
                continue
            cells = self.table.steps.get(step, {})
            for column in np.flatnonzero(self.ends[row] == SaveEnd.SAVED).tolist():
                if column not in cells and (row, column) not in self.lost:
                    self.ends[row, column] = SaveEnd.NOT_OBSERVED
                    unknown += 1
        return Trust(unknown=unknown)


def _untouched(cells: Mapping[int, Cell]) -> Cell | None:
    """A layer without a record of its own, in a step whose save hook was watched; None where that
    call did something that names no layer."""
    if any(cell.slots < 0 for cell in cells.values()):
        return None
    called = reduce(or_, (cell.called for cell in cells.values()), 0)
    if any(cell.slots > 0 for cell in cells.values()):
        return Cell(0, called=called)
    size, files = sum(cell.bytes for cell in cells.values()), sum(cell.files for cell in cells.values())
    return Cell(0, bytes=size, files=files, called=called)
