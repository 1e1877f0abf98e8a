"""One worker's store calls, held against the slots that were read: token by token, not by how many.

Whether a token was read is known from the slots. What is concluded from a token that was not read depends
on what was watched: in a step that was watched, of a connector whose reads can be seen, it was not read;
else its metadata is all there is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvtrace.ledger.ends import SaveEnd
from kvtrace.ledger.intervals import Interval, intersect, length, subtract
from kvtrace.ledger.model import Swallowed, Trust
from kvtrace.ledger.reported import Caught, caught_in, caught_in_saving
from kvtrace.ledger.saves.accounts import Account
from kvtrace.ledger.saves.calls import LEAST_BYTES, At, WorkerCalls
from kvtrace.ledger.saves.measured import WHOLE
from kvtrace.ledger.saves.misplaced import read_elsewhere, strangers
from kvtrace.ledger.saves.pipeline import Ends
from kvtrace.ledger.saves.stores import Stores
from kvtrace.ledger.saves.watched import Watched
from kvtrace.ledger.saves.windows import left_out
from kvtrace.ledger.slots.reads import Touch, covered, in_layer
from kvtrace.ledger.steps import locate
from kvtrace.terms import Grade
from kvtrace.trace import hooks

_LESS = (SaveEnd.CAUGHT, SaveEnd.NOTHING_READ, SaveEnd.PART_READ)


@dataclass(frozen=True)
class _Call:
    """A store call of one layer: tokens that its step's metadata names, and how many of them were not read.
    ``rounded``: of each request less than a block; ``elsewhere``: other slots were read instead."""

    total: int
    missing: int
    rounded: bool
    elsewhere: bool


class PositionCalls(WorkerCalls):
    """As WorkerCalls; an entry's end is that of its tokens that were not read, ``grades`` say how well that
    is seen. ``kept`` is not used: which tokens were read is known."""

    def __init__(
        self, watched: Watched, stores: Stores, ends: Ends, block: int, windows: Mapping[int, int]
    ) -> None:
        super().__init__(watched.worker, watched.table, stores, ends)
        self.block = block
        self._windows = windows
        self.implied = ends.copy()
        self._failing = False
        self._without_exception: dict[At, SaveEnd] = {}
        self._watched_worker = watched
        self._slots = watched.slots
        self._calls_watched = locate(watched.ran.watched, stores.steps)[1]
        self._settled = watched.settled(stores.steps)
        self._reads: dict[tuple[int, tuple[int, ...]], list[Interval]] = {}

    def judge(self, certain: bool, swallowed: Sequence[Swallowed]) -> Trust:
        """``certain`` is not asked: the slots say it."""
        caught = caught_in(self.worker, swallowed, hooks.SAVING)
        self._failing = bool(caught_in_saving(self.worker, swallowed).facts)
        trust = Trust(calls=int(self._work.sum()))
        for row in range(len(self.stores.steps)):
            trust += self._judge_step(row, caught)
        self._settle_caught(caught)
        self.void |= self.ends == SaveEnd.RAISED
        return trust

    def at_rest(self, at: At) -> bool:
        row, column = at
        step = self._step(at)
        touches = [
            touch
            for request in {*self.stores.named[row], *self.stores.seen[row]}
            for touch in in_layer(self._slots.reads.get(request, ()), column)
            if touch.step == step
        ]
        return bool(touches) and all(touch.account == Account.WRITTEN for touch in touches)

    def _judge_step(self, row: int, caught: Caught) -> Trust:
        named = self.stores.named[row]
        total = sum(map(length, named.values()))
        left = [
            {request: self._left(request, column, parts) for request, parts in named.items()}
            for column in range(len(self.worker.kv_layers))
        ]
        short = [[length(parts) for parts in one.values()] for one in left]
        missing = sum(map(sum, short))
        elsewhere = missing > 0 and read_elsewhere(self._watched_worker, self.stores, row, missing)
        trust = Trust()
        for column, tokens in enumerate(short):
            at = (row, column)
            if self._skewed(at):
                trust += self._lost_skewed(at, total)
                self._judge_seen(at)
                continue
            rounded = max(tokens, default=0) < max(1, self.block) and sum(tokens) < total
            # Of whole blocks that are read twice, or for other requests too, a remainder is still left out.
            call = _Call(total, sum(tokens), rounded, elsewhere and not rounded)
            trust += self._judge_call(at, call, caught)
            if self.ends[at] == SaveEnd.MISPLACED:
                own = [request for request, parts in left[column].items() if parts]
                self._misread(self._step(at), column, [*own, *strangers(self._slots, self.stores, at)])
            self._judge_seen(at)
        return trust

    def _left(self, request: int, column: int, parts: list[Interval]) -> list[Interval]:
        """Of positions that are named: what was not read of them, without what a window has left."""
        left = subtract(parts, self._read(request, column))
        return subtract(left, left_out(self._slots, request, column, self._windows)) if left else left

    def _settle_caught(self, caught: Caught) -> None:
        """Exceptions that come again and again are known of the first calls alone: where they are as many as
        the calls that did less, and none of those that did their work, these are theirs. Fewer of them, of
        a kind that may be ordinary control flow, explain nothing."""
        known = [at for at in self._without_exception if self.ends[at] == SaveEnd.CAUGHT]
        less = [at for at in self.lost if self.ends[at] in _LESS]
        layers = len(self.worker.kv_layers)
        usual = caught.as_usual(len(less), layers)
        for at in known:
            if not self._at(usual, at):
                self.ends[at] = self._without_exception[at]
        unknown = caught.layer_calls(layers) > caught.known_calls(layers)
        often = caught.layer_calls(layers) >= len(less)
        fine = any(self._at(caught, at) for at in self.agreed)
        if (known or not self.agreed) and unknown and often and not fine:
            for at in less:
                self.ends[at] = SaveEnd.CAUGHT

    def _at(self, caught: Caught, at: At) -> bool:
        return caught.at(self._step(at), self._layer(at))

    def _skewed(self, at: At) -> bool:
        """Whether a step names whole blocks, the last ones of requests as far as they are filled, and its
        calls read slots of whole blocks that begin within blocks."""
        bounds = [bound for parts in self.stores.named[at[0]].values()
                  for bound in [bound for part in sorted(parts) for bound in part][:-1]]  # fmt: skip
        whole = bounds and self.block > 1 and not any(bound % self.block for bound in bounds)
        return bool(whole and self._work[at]) and (self._step(at), at[1]) in self._slots.skewed

    def _lost_skewed(self, at: At, total: int) -> Trust:
        self.ends[at], self.grades[at] = SaveEnd.MISPLACED, Grade.READ
        self.lost.add(at)
        step = self._step(at)
        self._misread(step, at[1], [*self.stores.named[at[0]], *self._slots.read_in.get(step, ())])
        return Trust(measured=1, short=1, short_read=0, short_declared=total)

    def _judge_seen(self, at: At) -> None:
        """What was read in a step in other layers, and in no metadata: not here, as far as that is known."""
        if self.stores.seen[at[0]] and self.implied[at] == SaveEnd.SAVED:
            known = self._conclusive(at)
            self.implied[at] = SaveEnd.NOTHING_READ if known else SaveEnd.NOT_OBSERVED

    def _misread(self, step: int, column: int, requests: Iterable[int]) -> None:
        """Of these requests other slots were read: those of theirs that were, stand for other tokens."""
        for request in requests:
            columns = self.misread.setdefault(
                (step, request), np.zeros(len(self.worker.kv_layers), dtype=bool)
            )
            columns[column] = True

    def _read(self, request: int, column: int) -> list[Interval]:
        """Positions of a request that were read in a layer, at whatever time."""
        touches = [one for one in self._slots.reads.get(request, ()) if not one.late_for]
        alike = tuple(touch.columns >> column & 1 for touch in touches)
        known = self._reads.get((request, alike))
        if known is None:
            known = self._reads[request, alike] = covered(in_layer(touches, column))
        return known

    def _judge_call(self, at: At, call: _Call, caught: Caught) -> Trust:
        work = bool(self._work[at])
        if call.total and not call.missing:
            if self.ends[at] not in (SaveEnd.RAISED, SaveEnd.PENDING):
                self.ends[at] = SaveEnd.SAVED
            self.agreed.add(at)
            self.grades[at] = Grade.READ
            return Trust(measured=int(work), agreed=int(work)) if work else Trust()
        if not work:
            # A stage before the hook ended it; that is seen.
            self.grades[at] = Grade.NOT_OBSERVED if self.ends[at] == SaveEnd.NOT_OBSERVED else Grade.READ
            return Trust()
        if not call.total:
            return Trust()
        if not self._conclusive(at):
            return self._not_seen(at, call)
        return self._lost(at, call, caught)

    def _conclusive(self, at: At) -> bool:
        """Whether what was not read in a step would have been seen."""
        step = self._step(at)
        if (step, at[1]) in self._slots.none:
            return True  # it picked what to read, and picked nothing
        if not self._settled[at[0]]:
            return False
        if (step, at[1]) in self._slots.unknown or self._copies_later or self._cut_short(step):
            return False
        # Work in the background may still have been to come when the trace ended: it is taken up in order.
        slots = self._slots
        return not slots.last_background_t or slots.last_background_step >= step or at[0] < self._latest_read

    @cached_property
    def _copies_later(self) -> bool:
        """Whether a hook was seen to read, for the first time, what the metadata of two or more steps before
        had named: of the steps behind a watched one only the next is known to be watched as well."""
        return self._lag > 1

    def _cut_short(self, step: int) -> bool:
        """Whether the trace ends in a step of whose tokens the next one was to read, as of others."""
        return self._lag > 0 and step >= int(self._watched_worker.ran.began_steps.max(initial=0))

    @cached_property
    def _lag(self) -> int:
        """How many steps after the metadata had named it a hook was seen to read something for the first
        time, at the most."""
        most = 0
        for request, at in self.stores.rows_of.items():
            steps = self.stores.steps[at].tolist()
            touches = self._slots.reads.get(request, ())
            for touch in touches:
                row = bisect_right(steps, touch.step) - 1
                lag = touch.step - steps[row]
                if row < 0 or lag <= most or touch.background or self._read_null(touch.step):
                    continue
                late = intersect(list(touch.positions), self.stores.named[at[row]][request])
                if late and subtract(late, _read_before(touch, touches)):
                    most = lag
        return most

    def _read_null(self, step: int) -> bool:
        """Whether the null block was read in a step, which is in no block table: by wrong numbers, so that
        what else was read with it says nothing of whose it is."""
        columns = range(len(self.worker.kv_layers)) if not self._windows else ()
        return any(self._slots.null.get((step, column), 0) >= max(1, self.block) for column in columns)

    @cached_property
    def _latest_read(self) -> int:
        """Row of the latest step of whose tokens any were read; -1 for none."""
        columns = range(len(self.worker.kv_layers))
        for row in range(len(self.stores.steps) - 1, -1, -1):
            for request, parts in self.stores.named[row].items():
                if any(subtract(parts, self._read(request, column)) != parts for column in columns):
                    return row
        return -1

    def _not_seen(self, at: At, call: _Call) -> Trust:
        # A connector whose reads can be seen, and of these tokens none was; or one whose saving work raises.
        watched = bool(self._calls_watched[at[0]])
        seen = self._slots.visible and (watched or call.missing < call.total)
        if seen or self._failing:
            self.ends[at], self.grades[at] = SaveEnd.NOT_OBSERVED, Grade.NOT_OBSERVED
            return Trust(unknown=1)
        self.grades[at] = Grade.DECLARED
        return Trust(blind=int(self._settled[at[0]]))

    def _lost(self, at: At, call: _Call, caught: Caught) -> Trust:
        row, column = at
        handled = bool(caught.facts) and self._at(caught, at)
        read = call.total - call.missing
        end = SaveEnd.PART_READ if read else SaveEnd.NOTHING_READ
        if handled:
            self._without_exception[at] = end
            end = SaveEnd.CAUGHT
        elif call.elsewhere:
            end = SaveEnd.MISPLACED
        elif read and call.rounded:
            end = SaveEnd.NOT_DECLARED  # less than a block: the connector rounds down
        self.ends[at], self.grades[at] = end, Grade.READ
        self.lost.add(at)
        if not read:
            return Trust(measured=1, nothing=1, empty=int(self._empty(row, column)))
        return Trust(measured=1, short=1, short_read=read, short_declared=call.total)

    def _empty(self, row: int, column: int) -> bool:
        """Whether the call opened files and wrote next to nothing."""
        cells = self.table.steps.get(int(self.stores.steps[row]), {})
        cell = cells.get(column) or cells.get(WHOLE)
        return cell is not None and cell.files > 0 and cell.bytes < int(self.stores.slots[row]) * LEAST_BYTES

    def doubt(self) -> Trust:
        return Trust()


def _read_before(touch: Touch, touches: Sequence[Touch]) -> list[Interval]:
    """Positions of the same request that earlier steps had read in all layers of a read."""
    return covered(
        one for one in touches if one.step < touch.step and one.columns & touch.columns == touch.columns
    )
