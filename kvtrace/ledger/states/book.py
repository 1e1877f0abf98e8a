"""From the records of the states that were touched to the book of states: whose each was, by its block, and
how far its request was by then."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvtrace.ledger.reported import UNFOLLOWED, agent_failed
from kvtrace.ledger.requests import Request, by_engine
from kvtrace.ledger.run import Engine, Worker
from kvtrace.ledger.scan import SpoolScan
from kvtrace.ledger.slots.sets import parse
from kvtrace.ledger.slots.tables import BlockTables, Given, Holder, computed_by
from kvtrace.ledger.slots.touches import during_which
from kvtrace.ledger.states.outcome import Loaded, States, Taken
from kvtrace.ledger.steps import NEVER_RAN, Executed
from kvtrace.trace import hooks, rows
from kvtrace.trace.facts import WatchLimitsFact
from kvtrace.trace.format import STEP_MASK, STEP_SHIFT, Flag

_AHEAD = frozenset(hook.code for hook in (hooks.BIND_METADATA, hooks.START_LOAD, hooks.PREEMPTIONS))
"""They run before the forward of their step."""
_BEHIND = frozenset(hook.code for hook in (hooks.WAIT_SAVE, hooks.GET_FINISHED))
"""They run after it. Of other hooks, and of work in the background, it is not known."""


class _Cell(NamedTuple):
    """A request (its row) and a layer of a worker."""

    row: int
    layer: str


def book_of_states(
    engines: Sequence[Engine],
    requests: Sequence[Request],
    scans: Sequence[SpoolScan],
    given: Mapping[int, Sequence[Given]],
) -> States | None:
    """The book over all engines with a connector; None where none of them has a layer with a state.

    Args:
        given: BLOCKS records by engine tag.
    """
    by_name, of_engine = {scan.name: scan for scan in scans}, by_engine(requests)
    taken: list[Taken] = []
    loaded: list[Loaded] = []
    layers: set[str] = set()
    pairs, counted = 0, 0
    for engine in engines:
        workers = [one for one in engine.workers if one.state_layers]
        if engine.configured is None or not workers:
            continue
        every = of_engine.get(engine.tag, {})
        own = {row: one for row, one in every.items() if finishing(one)}
        layers.update(layer for one in workers for layer in one.state_layers)
        pairs += sum(len(one.state_layers) for one in workers)
        counted += len(own)
        for worker in workers:
            seen = _StatesSeen(engine, worker, by_name[worker.spool], given.get(engine.tag, ()), every)
            for row, request in own.items():
                taken += [seen.taken(_Cell(row, layer), request) for layer in worker.state_layers]
                if accepted(request) is not None:
                    loaded += [seen.loaded(_Cell(row, layer), request) for layer in worker.state_layers]
    if not pairs:
        return None
    saves, loads = (dict(Counter(end.value for end in ends)) for ends in (taken, loaded))
    return States(len(layers), pairs, counted, saves, loads)


def finishing(request: Request) -> list[int]:
    """The steps that computed the end of its prompt: several where it was preempted after it."""
    return [chunk.step for chunk in request.chunks if chunk.end >= request.prompt > 0]


def accepted(request: Request) -> tuple[int, bool] | None:
    """The step that went on from tokens of the connector's, and whether these came asynchronously; None where
    there is none."""
    for lookup in reversed(request.lookups):
        if lookup.accepted:
            steps = [chunk.step for chunk in request.chunks if chunk.step >= lookup.step]
            return (steps[0], lookup.asynchronous) if steps else None
    return None


class _StatesSeen:
    """What one worker's spool says of states."""

    def __init__(
        self, engine: Engine, worker: Worker, scan: SpoolScan, given: Sequence[Given],
        requests: Mapping[int, Request],
    ) -> None:  # fmt: skip
        groups = engine.facts.kv_groups
        self._requests = requests
        self._group = {layer: at for at, group in enumerate(groups) for layer in group.layers}
        longest = engine.facts.max_model_len
        self._one = {at for at, group in enumerate(groups) if longest and (group.block_size or 0) >= longest}
        """Groups in which a request has one state at a time: no prefix cache keeps states of the past."""
        ran = scan.executed.get(engine.tag, NEVER_RAN)
        self._watched = frozenset(ran.watched.tolist()) & frozenset(ran.watched_loads.tolist())
        limits = scan.facts_of(WatchLimitsFact)
        self._followed = not agent_failed([scan]) and not any(one.kind in UNFOLLOWED for one in limits)
        """Whether no way was met in this process that can't be followed."""
        self._began = sorted(ran.began_steps.tolist())
        self._layers = frozenset(worker.state_layers)
        self._tables = BlockTables(given, requests, [group.block_size or 0 for group in groups])
        self._parts: dict[str, int] = {}
        self._at_end: dict[_Cell, set[int]] = defaultdict(set)
        self._elsewhere: dict[_Cell, set[int]] = defaultdict(set)
        self._some: set[_Cell] = set()
        """Of which a piece of a part was read."""
        self._given: dict[_Cell, set[int]] = defaultdict(set)
        self._some_given: set[_Cell] = set()
        self._unknown: set[tuple[int, str]] = set()
        self._sure: dict[int, bool] = {}
        """Step -> whether all of its watched calls are known to have touched nothing else."""
        for record, during in _in_order(scan, engine.tag, ran):
            self._add(record, scan.names, during)

    # --- records --------------------------------------------------------------------------

    def _add(self, record: rows.StatesTouched, names: Mapping[int, str], during: int) -> None:
        if not record.layer:
            step = record.step or during
            self._sure[step] = self._sure.get(step, True) and bool(record.part)
            return
        layer = names.get(record.layer, "")
        if layer not in self._layers:
            return
        self._parts[layer] = record.parts
        marks = rows.flags(record.head)
        if not record.blocks or (marks & Flag.STORE and marks & Flag.LOAD):
            self._unknown |= {(during, layer), (record.step or during, layer)}
            return
        self._tables.until(during)
        blocks = parse(names.get(record.blocks, ""))
        add = self._read if marks & Flag.STORE else self._wrote
        for whole, runs in ((True, blocks.full), (False, blocks.partly)):
            for block in (block for first, end in runs for block in range(first, end)):
                for holder in self._tables.holders(self._group.get(layer, -1), block):
                    add(record, _Cell(holder.row, layer), holder, during, whole)

    def _read(
        self, record: rows.StatesTouched, cell: _Cell, holder: Holder, during: int, whole: bool
    ) -> None:
        request, code = self._requests[cell.row], rows.code(record.head)
        before = computed_by(request, holder, during, included=code in _BEHIND)
        after = computed_by(request, holder, during, included=code not in _AHEAD)
        if not after:
            return  # nothing of this request stands there yet
        if not whole:
            self._some.add(cell)
            return
        alone = self._group[cell.layer] in self._one and not holder.place
        at_end = alone and before == after == request.prompt
        (self._at_end if at_end else self._elsewhere)[cell].add(record.part)

    def _wrote(
        self, record: rows.StatesTouched, cell: _Cell, holder: Holder, during: int, whole: bool
    ) -> None:
        goes_on = accepted(self._requests[cell.row])
        in_time = goes_on is not None and (
            during < goes_on[0] or (during == goes_on[0] and rows.code(record.head) in _AHEAD)
        )
        if not in_time or during < holder.since:
            return
        if whole:
            self._given[cell].add(record.part)
        else:
            self._some_given.add(cell)

    # --- what became of a state -----------------------------------------------------------

    def taken(self, cell: _Cell, request: Request) -> Taken:
        at_end, elsewhere = self._at_end.get(cell, set()), self._elsewhere.get(cell, set())
        if self._all(at_end, cell.layer):
            return Taken.TAKEN
        if self._all(elsewhere, cell.layer):
            return Taken.ELSEWHERE
        if not self._nothing_else(cell, request):
            return Taken.UNKNOWN
        return Taken.PARTLY if at_end or elsewhere or cell in self._some else Taken.NOT

    def loaded(self, cell: _Cell, request: Request) -> Loaded:
        known = self._given.get(cell, set())
        if self._all(known, cell.layer):
            return Loaded.GIVEN
        goes_on = accepted(request)
        assert goes_on is not None
        step, asynchronous = goes_on
        if (
            asynchronous
            or not self._followed
            or step not in self._watched
            or not self._sure_in(step, cell.layer)
        ):
            return Loaded.UNKNOWN
        return Loaded.PARTLY if known or cell in self._some_given else Loaded.NOT

    def _all(self, parts: set[int], layer: str) -> bool:
        return bool(parts) and len(parts) == self._parts.get(layer)

    def _nothing_else(self, cell: _Cell, request: Request) -> bool:
        """Whether no more of its state can have been read than was seen, from the end of its prompt to the
        next forward. A connector that holds the blocks back may read them at any time later."""
        held = request.grown or any(one.store for one in request.transfers)
        if held or not self._followed or self._group.get(cell.layer, -1) not in self._one:
            return False
        for step in finishing(request):
            if step not in self._watched or not self._sure_in(step, cell.layer):
                return False
            at = bisect_right(self._began, step)
            following = self._began[at] if at < len(self._began) else 0
            if not self._sure.get(following, True) or (following, cell.layer) in self._unknown:
                return False
        return True

    def _sure_in(self, step: int, layer: str) -> bool:
        return self._sure.get(step, False) and (step, layer) not in self._unknown


def _in_order(scan: SpoolScan, tag: int, ran: Executed) -> Iterator[tuple[rows.StatesTouched, int]]:
    """The records of one engine, each with the step that was under way, in order of these, then of time."""
    record = rows.columns(rows.StatesTouched, scan.states)
    of = record.step >> STEP_SHIFT
    during = during_which(ran, record.t, record.step)
    here = ((of == tag) | ((record.step & STEP_MASK) == 0)) & (during > 0)
    order = np.lexsort((record.t[here], during[here]))
    table = scan.states[here][order]
    for words, step in zip(table.tolist(), during[here][order].tolist(), strict=True):
        yield rows.StatesTouched._make(words), step
