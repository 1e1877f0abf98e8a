"""One worker's store calls, held against the slots that were read: token by token, not by how many.

Whether a token was read is known from the slots. What is concluded from a token that was not read depends
on what was watched: in a step that was watched, of a connector whose reads can be seen, it was not read;
else its metadata is all there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtrace.ledger.ends import SaveEnd
from kvtrace.ledger.intervals import Interval, length, subtract, union
from kvtrace.ledger.model import Swallowed, Trust, Worker
from kvtrace.ledger.reported import Caught, caught_in
from kvtrace.ledger.saves.calls import At, WorkerCalls
from kvtrace.ledger.saves.measured import WHOLE, Measured
from kvtrace.ledger.saves.pipeline import Ends
from kvtrace.ledger.saves.stores import Stores
from kvtrace.ledger.slots.reads import Slots, Touch
from kvtrace.ledger.steps import Array, Executed, locate
from kvtrace.terms import Grade
from kvtrace.trace import hooks


@dataclass(frozen=True)
class Watched:
    """What is known of one worker beside the ends of its hooks."""

    worker: Worker
    table: Measured
    slots: Slots
    ran: Executed

    @property
    def by_position(self) -> bool:
        """Whether its spool says which slots were read, and which steps were watched for that."""
        return len(self.ran.watched) > 0 or self.slots.visible

    def settled(self, steps: Array) -> NDArray[np.bool_]:
        """The steps of which all that they read is known."""
        watched = locate(self.ran.watched, steps)[1]
        if self.slots.visible:
            return watched
        certain = [not self._unsure(step) for step in steps.tolist()]
        result: NDArray[np.bool_] = watched & np.array(certain, dtype=bool)
        return result

    def _unsure(self, step: int) -> bool:
        cells = self.table.steps.get(step)
        return not cells or any(cell.unsure for cell in cells.values())


class PositionCalls(WorkerCalls):
    """As WorkerCalls; an entry's end is that of its tokens that were not read, ``grades`` say how well that
    is seen. ``kept`` is not used: which tokens were read is known."""

    def __init__(self, watched: Watched, stores: Stores, ends: Ends, block: int) -> None:
        super().__init__(watched.worker, watched.table, stores, ends)
        self.block = block
        self.implied = ends.copy()
        self._watched_worker = watched
        self._slots = watched.slots
        self._settled = watched.settled(stores.steps)
        self._reads: dict[tuple[int, tuple[int, ...]], list[Interval]] = {}

    def judge(self, certain: bool, swallowed: Sequence[Swallowed]) -> Trust:
        """``certain`` is not asked: the slots say it."""
        caught = caught_in(self.worker, swallowed, hooks.SAVING)
        trust = Trust(calls=int(self._work.sum()))
        for row in range(len(self.stores.steps)):
            named = self.stores.named[row]
            total = sum(map(length, named.values()))
            for column in range(len(self.worker.kv_layers)):
                left = {at: subtract(parts, self._read(at, column)) for at, parts in named.items()}
                tokens = [length(parts) for parts in left.values()]
                rounded = max(tokens, default=0) < max(1, self.block)
                trust += self._judge_call((row, column), total, sum(tokens), rounded, caught)
                self._judge_seen((row, column))
                if self.ends[row, column] == SaveEnd.MISPLACED:
                    self._misread((row, column), [at for at, parts in left.items() if parts])
        self.void |= self.ends == SaveEnd.RAISED
        return trust + self._judge_unwritten(caught)

    def _judge_seen(self, at: At) -> None:
        """What was read in a step in other layers, and in no metadata: not here, as far as that is known."""
        if self.stores.seen[at[0]] and self.implied[at] == SaveEnd.SAVED:
            known = self._conclusive(at)
            self.implied[at] = SaveEnd.NOTHING_READ if known else SaveEnd.NOT_OBSERVED

    def _judge_unwritten(self, caught: Caught) -> Trust:
        """Calls that read all, caught an exception of their own and wrote no file, as all others did."""
        silent = [at for at in sorted(self.agreed) if self._wrote_nothing(at)]
        raised = [at for at in silent if caught.at(self._step(at), self._layer(at))]
        still = sum(caught.at(self._step(at), self._layer(at)) for at in self.agreed) if caught.facts else 0
        if not raised or len(raised) < len(silent):
            return Trust(caught_agreed=still)
        for at in raised:
            self.lose(at, SaveEnd.CAUGHT)
        return Trust(agreed=-len(raised), unwritten=len(raised), caught_agreed=still - len(raised))

    def _misread(self, at: At, requests: Sequence[int]) -> None:
        """Of these requests other slots were read: those of theirs that were, stand for other tokens."""
        for request in requests:
            columns = self.misread.setdefault(
                (at[0], request), np.zeros(len(self.worker.kv_layers), dtype=bool)
            )
            columns[at[1]] = True

    def _wrote_nothing(self, at: At) -> bool:
        cells = self.table.steps.get(self._step(at), {})
        cell = cells.get(at[1])
        written = [cell] if self.worker.saves_per_layer and cell else list(cells.values())
        return bool(written) and all(one.wrote_nothing for one in written)

    def _read(self, request: int, column: int) -> list[Interval]:
        """Positions of a request that were read in a layer, at whatever time."""
        touches = self._slots.reads.get(request, ())
        alike = tuple(touch.columns >> column & 1 for touch in touches)
        known = self._reads.get((request, alike))
        if known is None:
            parts = [
                part for touch, one in zip(touches, alike, strict=True) if one for part in touch.positions
            ]
            known = self._reads[request, alike] = union(parts)
        return known

    def _judge_call(self, at: At, total: int, missing: int, rounded: bool, caught: Caught) -> Trust:
        """``rounded``: of each request less than a block is missing."""
        work = bool(self._work[at])
        if total and not missing:
            if self.ends[at] not in (SaveEnd.RAISED, SaveEnd.PENDING):
                self.ends[at] = SaveEnd.SAVED
            self.agreed.add(at)
            self.grades[at] = Grade.READ
            return Trust(measured=int(work), agreed=int(work)) if work else Trust()
        if not work:
            # A stage before the hook ended it; that is seen.
            self.grades[at] = Grade.NOT_OBSERVED if self.ends[at] == SaveEnd.NOT_OBSERVED else Grade.READ
            return Trust()
        if not total:
            return Trust()
        if not self._conclusive(at):
            return self._not_seen(at, total, missing)
        return self._lost(at, total, missing, rounded, caught)

    def _conclusive(self, at: At) -> bool:
        """Whether what was not read in a step would have been seen."""
        if not self._settled[at[0]]:
            return False
        step = self._step(at)
        if any((step, column) in self._slots.unknown for column in (at[1],)):
            return False
        # Work in the background that was still to come when the trace ended.
        return not (self.stores.asynchronous and self._slots.last_background_t and self._last(step))

    def _last(self, step: int) -> bool:
        """Whether nothing was read in the background after a step had begun."""
        ran = self._watched_worker.ran
        began = ran.began_t[ran.began_steps == step]
        return bool(len(began)) and self._slots.last_background_t < int(began[0])

    def _not_seen(self, at: At, total: int, missing: int) -> Trust:
        if self._slots.visible and (self._settled[at[0]] or missing < total):
            # A connector whose reads can be seen, and of these tokens none was.
            self.ends[at], self.grades[at] = SaveEnd.NOT_OBSERVED, Grade.NOT_OBSERVED
            return Trust(unknown=1)
        self.grades[at] = Grade.DECLARED
        return Trust(blind=int(self._settled[at[0]]))

    def _lost(self, at: At, total: int, missing: int, rounded: bool, caught: Caught) -> Trust:
        row, column = at
        step = self._step(at)
        handled = bool(caught.facts) and caught.at(step, self._layer(at))
        read = total - missing
        end = SaveEnd.PART_READ if read else SaveEnd.NOTHING_READ
        if handled:
            end = SaveEnd.CAUGHT
        elif self._elsewhere(at, missing):
            end = SaveEnd.MISPLACED
        elif read and rounded:
            end = SaveEnd.NOT_DECLARED  # less than a block: the connector rounds down
        self.ends[at], self.grades[at] = end, Grade.READ
        self.lost.add(at)
        if not read:
            return Trust(measured=1, nothing=1, empty=int(self._empty(row, column)))
        return Trust(measured=1, short=1, short_read=read, short_declared=total)

    def _empty(self, row: int, column: int) -> bool:
        """Whether the call opened files and wrote next to nothing."""
        cells = self.table.steps.get(int(self.stores.steps[row]), {})
        cell = cells.get(column) or cells.get(WHOLE)
        return cell is not None and cell.files > 0 and cell.bytes < int(self.stores.slots[row])

    def _elsewhere(self, at: At, missing: int) -> bool:
        """Whether a step's calls read other slots instead of those that are missing: slots that hold no
        token, or none yet, slots that they had read already, slots of requests that the step does not name;
        or as many as are named, and shifted within their blocks."""
        step = int(self.stores.steps[at[0]])
        layers = range(len(self.worker.kv_layers))
        other = 0
        for column in layers:
            other += self._slots.useless.get((step, column), 0) + self._foreign(at[0], column, step)
            other += self._again(column, step)
        return other >= missing * len(layers) or self._shifted(at, step)

    def _again(self, column: int, step: int) -> int:
        """Slots that one call read more than once."""
        cell = self.table.steps.get(step, {}).get(column)
        return max(0, cell.slots - self._slots.amounts.get((step, column), 0)) if cell else 0

    def _foreign(self, row: int, column: int, step: int) -> int:
        """Slots that were read of requests that the step does not name, and of none that it names."""
        named = self.stores.named[row]
        mine = sum(length(self._read_in(request, column, step)) for request in named)
        seen = self._slots.amounts.get((step, column), 0) - self._slots.useless.get((step, column), 0)
        return max(0, seen - mine)

    def _shifted(self, at: At, step: int) -> bool:
        block = max(1, self.block)
        return any(
            len(parts) == len(read) == 1
            and length(parts) == length(read)
            and bool((read[0][0] - parts[0][0]) % block)
            for request, parts in self.stores.named[at[0]].items()
            for read in [self._read_in(request, at[1], step)]
        )

    def _read_in(self, request: int, column: int, step: int) -> list[Interval]:
        touches = self._slots.reads.get(request, ())
        return union(
            part
            for touch in touches
            if touch.step == step and touch.columns >> column & 1
            for part in touch.positions
        )

    def doubt(self) -> Trust:
        return Trust()


def stale(touches: Sequence[Touch], column: int) -> list[Interval]:
    """Positions that were read in a layer before they were computed."""
    return union(part for touch in touches if touch.columns >> column & 1 for part in touch.stale)


Reads = Mapping[int, Sequence[Touch]]
