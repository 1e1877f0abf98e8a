"""Which positions of an accepted load were written into a layer, by the slots that were touched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from kvtrace.ledger.intervals import Interval, intersect, subtract, union
from kvtrace.ledger.run import Worker
from kvtrace.ledger.slots.reads import NOTHING, Slots, covered, in_layer
from kvtrace.ledger.steps import NEVER, NEVER_RAN, Executed, holds


@dataclass(frozen=True)
class Missing:
    """What of a load was not written into one layer.

    Attributes:
        positions: that no write of any time covers.
        late: that were written only after the layer's attention had begun, or in a later step.
        certain: a write would have been seen.
        read: what no write covers was read by the load, before it was used.
        whole: whether that is all that was to be written there.
        steps_later: whether hooks wrote all that is late in later steps than the one that used it.
    """

    positions: list[Interval]
    late: list[Interval]
    certain: bool
    read: bool = False
    whole: bool = False
    steps_later: bool = False


@dataclass(frozen=True)
class Written:
    """What all workers were seen to write; by Worker.key.

    Attributes:
        hidden: spools of processes in which a load may have written what can't be followed.
        unrecorded: of these the ones in which it may have done so with no record of it.
    """

    slots: Mapping[tuple[int, str], Slots] = field(default_factory=dict)
    executed: Mapping[tuple[int, str], Executed] = field(default_factory=dict)
    hidden: frozenset[str] = frozenset()
    unrecorded: frozenset[str] = frozenset()

    def ran(self, worker: Worker) -> Executed:
        return self.executed.get(worker.key, NEVER_RAN)

    def known(self, worker: Worker) -> bool:
        """Whether this worker's writes can be seen at all."""
        return bool(self._of(worker).writes)

    def beside(
        self, worker: Worker, row: int, step: int, loads: Mapping[int, int]
    ) -> tuple[list[Interval], Set[int]]:
        """What a step wrote beside a load: positions before it of the same request, and other requests (rows)
        that load nothing in it. Blocks before a load may be shared with those that computed them.

        Args:
            loads: rows of those that load in the step, and where their loads begin.
        """
        slots = self._of(worker)
        rows = slots.written_in.get(step, frozenset())
        of_row = {one: covered(touch for touch in slots.writes[one] if touch.step == step) for one in rows}
        before = {one: intersect(of_row[one], [(0, loads[one])]) for one in rows & loads.keys()}
        shared = union(part for parts in before.values() for part in parts)
        return before.get(row, []), {one for one in rows - loads.keys() if subtract(of_row[one], shared)}

    def missing(
        self, worker: Worker, row: int, wanted: Interval, steps: Sequence[int], used: int = NEVER
    ) -> list[Missing]:
        """What of a request's load is missing in each of the worker's KV layers.

        Args:
            row: of the request.
            wanted: the accepted positions.
            steps: in which they may have been written.
            used: the step whose attention reads them.
        """
        slots, ran = self._of(worker), self.ran(worker)
        touches = [*slots.writes.get(row, ()), *slots.aimed.get(row, ())]
        watched = bool(steps) and all(holds(ran.watched_loads, step) for step in steps)
        alike: dict[tuple[int, ...], Missing] = {}
        found = []
        for column in range(len(worker.kv_layers)):
            seen = watched and not self._blind(worker, column, steps)
            begin = self._due(worker, column, row, wanted)
            # In most loads all layers are touched alike.
            key = (seen, begin, *(touch.columns >> column & 1 for touch in touches))
            if key not in alike:
                whole = [(begin, wanted[1])] if begin < wanted[1] else []
                alike[key] = self._missing(worker, column, row, whole, (min(steps, default=0), used), seen)
            found.append(alike[key])
        return found

    def _missing(
        self, worker: Worker, column: int, row: int, whole: list[Interval], steps: Interval, seen: bool
    ) -> Missing:
        """Of one layer. ``steps``: the first that may have written, and the one that reads; ``seen``: a write
        would have been."""
        first, used = steps
        touches = [t for t in in_layer(self._of(worker).writes.get(row, ()), column) if t.step >= first]
        in_time = covered(
            one
            for one in touches
            if one.step < used or (not one.late and (one.step == used or one.given_out))
        )
        left = subtract(whole, covered(touches))
        read = self._read_only(worker, column, row, left)
        certain = (self.known(worker) or read) and seen
        # What was written in time, too, may have been so out of sight.
        late = subtract(subtract(whole, left), in_time) if seen else []
        by_hooks = covered(one for one in touches if one.step > used and not one.background)
        return Missing(left, late, certain, read, left == whole, not subtract(late, by_hooks))

    def _blind(self, worker: Worker, column: int, steps: Sequence[int]) -> bool:
        """Whether slots may have been written in a layer in these steps or later, and not known which."""
        since = self._of(worker).blind_writes.get(column, 0)
        return since >= min(steps) or worker.spool in self.unrecorded

    def _due(self, worker: Worker, column: int, row: int, wanted: Interval) -> int:
        """Where the positions begin that are to be written: a layer with a window has no blocks for what it
        has left."""
        return max(wanted[0], self._of(worker).outside.get((row, column), 0))

    def _read_only(self, worker: Worker, column: int, row: int, left: list[Interval]) -> bool:
        """Whether the load read what it did not write: it can be seen, and it filled something else."""
        if not left or worker.spool in self.hidden:
            return False
        return not subtract(left, covered(in_layer(self._of(worker).aimed.get(row, ()), column)))

    def over_since(self, workers: Sequence[Worker], row: int, wanted: Interval) -> int:
        """When the last slot of a load was written, 0 where not all of them were, in every layer."""
        last = 0
        for worker in workers:
            touches = self._of(worker).writes.get(row, ())
            for column in range(len(worker.kv_layers)):
                here = in_layer(touches, column)
                begin = self._due(worker, column, row, wanted)
                if begin < wanted[1] and subtract([(begin, wanted[1])], covered(here)):
                    return 0
                last = max([last, *(one.t for one in here)])
        return last

    def steps_after(self, workers: Sequence[Worker], t: int) -> int:
        """How many steps each of the workers began after that, at the least."""
        return min((int((self.ran(worker).began_t > t).sum()) for worker in workers), default=0)

    def _of(self, worker: Worker) -> Slots:
        return self.slots.get(worker.key, NOTHING)
