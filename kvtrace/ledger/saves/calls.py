"""What is known of each store call, and how it ended: a step's stores in one layer of one worker.

Whether a token was read is known from the slots. What is concluded from a token that was not read depends on
what can be seen: where a read of it would have been seen, it was not read; else its metadata is all there is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kvtrace.ledger.ends import Blind, SaveEnd
from kvtrace.ledger.intervals import Interval, intersect, length, subtract
from kvtrace.ledger.reported import Caught, caught_in, caught_in_saving
from kvtrace.ledger.run import Engine, Swallowed, Trust
from kvtrace.ledger.saves.measured import WHOLE
from kvtrace.ledger.saves.misplaced import read_elsewhere
from kvtrace.ledger.saves.pipeline import Ends
from kvtrace.ledger.saves.stores import Stores
from kvtrace.ledger.saves.watched import Watched
from kvtrace.ledger.saves.windows import out_of_window
from kvtrace.ledger.slots.reads import Touch, covered, in_layer
from kvtrace.ledger.steps import Steps, locate
from kvtrace.terms import Grade
from kvtrace.trace import hooks

LEAST_BYTES = 8
"""Bytes that a slot of one layer takes in a file, at the very least."""

At = tuple[int, int]
"""A store call of one worker: (row of the store step, KV layer)."""


@dataclass(frozen=True, eq=False)
class Call:
    """All that is known of one store call. Layers that fared alike in a step share one.

    Attributes:
        reached: how far it came, as the hooks tell.
        named: tokens that the step's metadata names; unread: of these, tokens that were never read.
        rounded: of each request less than a block was not read.
        blind: why what was not read may have been read all the same.
        visible: reads of this worker's can be seen, and here is none where one should be.
        failing: exceptions are known to end the work of this connector's saves.
        caught: the connector handled an exception of its own in it.
        elsewhere: other slots were read in place of what was not.
        by_replica: another rank with the same KV read all of it.
        overwritten: what was written was overwritten then, by another rank.
    """

    reached: SaveEnd
    named: int = 0
    unread: int = 0
    rounded: bool = False
    blind: Blind = Blind.NO
    visible: bool = False
    failing: bool = False
    caught: bool = False
    elsewhere: bool = False
    by_replica: bool = False
    overwritten: bool = False
    partly: bool = False  # of slots a part was read, and of none all
    empty: bool = False  # it opened files and wrote next to nothing
    watched: bool = False  # its step was
    unknown: bool = False  # slots were read in its step, by whatever hook, and it is not known which
    slots: int = 0  # that the step is to store, of all requests, implied ones included
    unread_of: tuple[int, ...] = ()  # rows of the requests of which something was not read

    @property
    def complete(self) -> bool:
        return self.named > 0 and not self.unread

    @property
    def worked(self) -> bool:
        """The hook in which the connector saves ran, with something to store."""
        return self.reached == SaveEnd.SAVED and self.slots > 0

    @property
    def short(self) -> bool:
        """It is seen to have read less than it should."""
        return self.worked and bool(self.unread) and not self.blind

    @cached_property
    def end(self) -> tuple[SaveEnd, Grade]:
        """How the tokens ended that its step names and that were not read; and how well that is seen."""
        end, grade = self._as_read
        if self.by_replica and self.short:
            end = SaveEnd.SAVED
        return (SaveEnd.OVERWRITTEN_BY_RANK if self.overwritten and end == SaveEnd.SAVED else end), grade

    @property
    def _as_read(self) -> tuple[SaveEnd, Grade]:
        if self.complete:
            open_end = self.reached in (SaveEnd.RAISED, SaveEnd.PENDING)
            return (self.reached if open_end else SaveEnd.SAVED), Grade.READ
        if not self.worked:  # a stage before the hook ended it; that is seen, where nothing else was read
            open_end = self.reached in (SaveEnd.RAISED, SaveEnd.PENDING)
            end = SaveEnd.NOT_OBSERVED if self.unknown and not open_end else self.reached
            return end, Grade.NOT_OBSERVED if end == SaveEnd.NOT_OBSERVED else Grade.READ
        if self.blind or not self.named:
            silent = self.named > 0 and (self.visible or self.failing)
            return (SaveEnd.NOT_OBSERVED, Grade.NOT_OBSERVED) if silent else (SaveEnd.SAVED, Grade.DECLARED)
        return self._lost, Grade.READ

    @property
    def _lost(self) -> SaveEnd:
        if self.caught:
            return SaveEnd.CAUGHT
        if self.elsewhere and not self.rounded:
            return SaveEnd.MISPLACED
        if self.unread == self.named:
            return SaveEnd.PART_READ if self.partly else SaveEnd.NOTHING_READ
        return SaveEnd.NOT_DECLARED if self.rounded else SaveEnd.PART_READ

    @property
    def unnamed_end(self) -> SaveEnd:
        """How tokens ended that the step read in another layer, and that no metadata names."""
        if not self.worked:
            return self.reached
        return SaveEnd.NOT_OBSERVED if self.blind else SaveEnd.NOTHING_READ

    @property
    def void(self) -> bool:
        """What was read in it did not come to rest."""
        return self.end[0] in (SaveEnd.RAISED, SaveEnd.OVERWRITTEN, SaveEnd.OVERWRITTEN_BY_RANK)

    @property
    def trust(self) -> Trust:
        """What the ledger rests on here."""
        calls = int(self.worked)
        if not self.worked or not self.named:
            return Trust(calls=calls)
        if self.complete:
            return Trust(calls=calls, measured=1, agreed=1)
        if self.blind:
            known = self._as_read[0] != SaveEnd.NOT_OBSERVED
            return Trust(calls=calls, blind=int(known and self.watched))
        if self.unread == self.named and not self.partly:
            return Trust(calls=calls, measured=1, nothing=1, empty=int(self.empty))
        read = self.named - self.unread
        short = Trust(calls=calls, measured=1, short=1, short_read=read, short_declared=self.named)
        return replace(short, parts=int(self.partly))


class WorkerCalls:
    """One worker's store calls, gathered.

    Args:
        reached: as :func:`kvtrace.ledger.saves.pipeline.ends` gives it.
        windows: index of a KV layer -> tokens of its window.
        unknown: steps of which it is not known what they stored.
    """

    def __init__(
        self, watched: Watched, stores: Stores, reached: Ends, engine: Engine, windows: Mapping[int, int],
        unknown: Steps,
    ) -> None:  # fmt: skip
        self.watched, self.stores, self.reached = watched, stores, reached
        self._block, self._windows = max(1, engine.block_size), windows
        self._understood = not engine.unreadable_steps
        self._unread_steps = engine.watched_steps.union(unknown.sorted.tolist())
        self._no_order = engine.no_order
        self._slots = watched.slots
        self._layers = range(len(watched.worker.kv_layers))
        self._steps_watched = locate(watched.ran.watched, stores.steps)[1]
        self._blind_steps = watched.blind(stores.steps)
        self._last_step = int(watched.ran.began_steps.max(initial=0))

    def gathered(self, swallowed: Sequence[Swallowed]) -> dict[At, Call]:
        """Every call, without what other workers know of it.

        Args:
            swallowed: exceptions that connectors handled themselves.
        """
        failing = bool(caught_in_saving(self.watched.worker, swallowed).facts)
        found = {at: one for row in range(len(self.stores.steps)) for at, one in self._of_step(row, failing)}
        by_exception = self._by_exception(found, swallowed)
        return {at: replace(one, caught=True) if at in by_exception else one for at, one in found.items()}

    def _of_step(self, row: int, failing: bool) -> Iterator[tuple[At, Call]]:
        named = self.stores.named[row]
        total = sum(map(length, named.values()))
        unread = self._unread_in(named)
        missing = sum(sum(tokens.values()) for tokens in unread)
        elsewhere = missing > 0 and read_elsewhere(self.watched, self.stores, row, missing)
        # In a step of which not all is understood the rest may be no order: the blocks of all who run.
        in_part = self._slots.visible and int(self.stores.steps[row]) in self._unread_steps
        doubtful = self._no_order or in_part
        alike: dict[tuple[int, ...], Call] = {}
        for column, tokens in zip(self._layers, unread, strict=True):
            at, left_out = (row, column), sum(tokens.values())
            reached, blind = SaveEnd(int(self.reached[at])), self._blind(at)
            if left_out and (doubtful or (elsewhere and not self._understood)):
                blind = blind or Blind.METADATA_UNREAD  # what is not understood may name those that were read
            empty = left_out == total and self._empty(at)
            here = int(self.stores.steps[row]), column
            unknown, partly = here in self._slots.unknown, here in self._slots.partly
            key = (reached, blind, empty, unknown, partly, *tokens.values())
            if key not in alike:
                alike[key] = Call(
                    reached,
                    total,
                    left_out,
                    # Of whole blocks that are read twice, or for others too, a remainder is still left out.
                    rounded=max(tokens.values(), default=0) < self._block and left_out < total,
                    blind=blind,
                    visible=self._slots.visible and (bool(self._steps_watched[row]) or left_out < total),
                    failing=failing,
                    elsewhere=elsewhere,
                    partly=partly,
                    empty=empty,
                    watched=not self._blind_steps[row],
                    unknown=unknown,
                    slots=int(self.stores.slots[row]),
                    unread_of=tuple(request for request, n in tokens.items() if n),
                )
            yield at, alike[key]

    def _unread_in(self, named: Mapping[int, list[Interval]]) -> list[dict[int, int]]:
        """Of each layer, how many of the positions that a step names were not read, by request."""
        touches = [touch for request in named for touch in self._touches(request)]
        alike: dict[tuple[int, ...], dict[int, int]] = {}
        found = []
        for column in self._layers:
            # Layers in which the same reads were seen have the same ones left.
            key = (self._windows.get(column, 0), *(touch.columns >> column & 1 for touch in touches))
            if key not in alike:
                alike[key] = {row: length(self._unread(row, column, of)) for row, of in named.items()}
            found.append(alike[key])
        return found

    def _unread(self, request: int, column: int, parts: list[Interval]) -> list[Interval]:
        """Of positions that are named: what was not read of them, without what is out of a window."""
        missing = subtract(parts, self._read_of(request, column))
        return subtract(missing, out_of_window(self._slots, request, column, self._windows))

    def _touches(self, request: int) -> list[Touch]:
        return [one for one in self._slots.reads.get(request, ()) if not one.late_for]

    def _read_of(self, request: int, column: int) -> list[Interval]:
        """Positions of a request that were read in a layer, at whatever time."""
        return covered(in_layer(self._touches(request), column))

    def _empty(self, at: At) -> bool:
        """Whether the call opened files and wrote next to nothing."""
        cells = self.watched.table.steps.get(int(self.stores.steps[at[0]]), {})
        cell = cells.get(at[1]) or cells.get(WHOLE)
        least = int(self.stores.slots[at[0]]) * LEAST_BYTES
        return cell is not None and cell.files > 0 and cell.bytes < least

    # --- exceptions

    def _by_exception(self, calls: Mapping[At, Call], swallowed: Sequence[Swallowed]) -> set[At]:
        """The calls that did less than they should and caught an exception of their own.

        Of exceptions that come again and again the first calls alone are known: where they are as many as the
        calls that did less, and none of those that did their work, these are theirs. Fewer of them, of a kind
        that may be ordinary control flow, explain nothing.
        """
        worker, layers = self.watched.worker, len(self._layers)
        caught = caught_in(worker, swallowed, hooks.SAVING)
        if not caught.facts:
            return set()

        def of(these: Caught, at: At) -> bool:
            return these.at(int(self.stores.steps[at[0]]), worker.kv_layers[at[1]])

        short = {at for at, one in calls.items() if one.short}
        known = {at for at in short if of(caught, at)}
        less = {at for at in short if at in known or calls[at].end[0] in _LESS}
        fine = [at for at, one in calls.items() if one.complete]
        most = caught.layer_calls(layers)
        again = most > caught.known_calls(layers) and most >= len(less)
        if (known or not fine) and again and not any(of(caught, at) for at in fine):
            return less
        usual = caught.as_usual(len(less), layers)
        return {at for at in known if of(usual, at)}

    # --- what cannot be seen

    def _blind(self, at: At) -> Blind:
        """Why it can't be told that what was not read in a call was not read at all."""
        step = int(self.stores.steps[at[0]])
        if (step, at[1]) in self._slots.none or (step, at[1]) in self._slots.partly:
            return Blind.NO  # it picked what to read, and picked nothing, or a part of each slot
        if self._blind_steps[at[0]] or (step, at[1]) in self._slots.unknown:
            return Blind.UNSEEN
        if self._lag > 1:  # of the steps behind a watched one only the next is known to be watched as well
            return Blind.UNSEEN
        to_come = self._lag > 0 and step >= self._last_step
        # Work in the background may still have been to come: it is taken up in order.
        behind = 0 <= self._slots.last_background < step
        return Blind.UNSEEN if to_come or (behind and at[0] >= self._latest_read) else Blind.NO

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
                if row < 0 or touch.background or touch.step - steps[row] <= most:
                    continue
                late = intersect(list(touch.positions), self.stores.named[at[row]][request])
                if late and subtract(late, _read_before(touch, touches)):
                    most = touch.step - steps[row]
            if self._slots.last_background < 0:  # else a thread may have been too late
                gone = (step for step, _, _ in self._slots.late.get(request, ()) if step > steps[0])
                most = max([most, *(step - steps[bisect_right(steps, step) - 1] for step in gone)])
        return most

    @cached_property
    def _latest_read(self) -> int:
        """Row of the latest step of whose tokens any were read; -1 for none."""
        for row in range(len(self.stores.steps) - 1, -1, -1):
            for request, parts in self.stores.named[row].items():
                if any(subtract(parts, self._read_of(request, column)) != parts for column in self._layers):
                    return row
        return -1


_LESS = (SaveEnd.CAUGHT, SaveEnd.NOTHING_READ, SaveEnd.PART_READ)


def _read_before(touch: Touch, touches: Sequence[Touch]) -> list[Interval]:
    """Positions of the same request that earlier steps had read in all layers of a read."""
    return covered(
        one for one in touches if one.step < touch.step and one.columns & touch.columns == touch.columns
    )
