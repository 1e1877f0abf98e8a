"""One engine's (layer, rank) pairs, and how every step that matters went in each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvtrace.ledger.coverage import WorkerCoverage
from kvtrace.ledger.ends import SaveEnd
from kvtrace.ledger.intervals import Interval, intersect, subtract
from kvtrace.ledger.model import Engine, Swallowed, Trust, Worker
from kvtrace.ledger.reported import Caught, caught_in_saving
from kvtrace.ledger.requests import Request
from kvtrace.ledger.saves.accounts import Account
from kvtrace.ledger.saves.check import check
from kvtrace.ledger.saves.instead import Instead, read_instead
from kvtrace.ledger.saves.pipeline import Ends, ends
from kvtrace.ledger.saves.stores import leading, stores_of
from kvtrace.ledger.saves.watched import Watched
from kvtrace.ledger.saves.windows import left_out, windows_of
from kvtrace.ledger.slots.reads import Slots, Touch
from kvtrace.ledger.steps import NEVER_RAN, Array, Executed, Mask, Steps, StepState, step_states
from kvtrace.ledger.values import replace
from kvtrace.terms import Grade


@dataclass(frozen=True)
class Evidence:
    """What was seen of the workers and of the saves; tables of workers by Worker.key."""

    executed: Mapping[tuple[int, str], Executed]
    coverage: Mapping[tuple[int, str], WorkerCoverage]
    watched: Mapping[tuple[int, str], Watched]
    swallowed: Sequence[Swallowed]
    unknown: Steps
    """Steps of which it is not known what they stored."""
    unfinished: Mapping[int, Mapping[str, SaveEnd]]
    """Row of a request -> worker's spool ("" all) -> how its asynchronous save ended, where not well."""
    proved: Mapping[int, Sequence[tuple[int, tuple[Interval, ...]]]] = field(default_factory=dict)
    """Row of a request -> (pairs, a bit each; positions) that came back, in this or a later request, with the
    KV that was computed."""
    given_away: frozenset[str] = frozenset()
    """Spools of workers whose KV may be copied out of sight: its address was given out, or it was handed to
    native code that is not known."""


@dataclass(frozen=True)
class Read:
    """Positions of a request that were read alike in some pairs. ``stale``: before they were computed;
    ``sent_to``: the peer of what was sent."""

    step: int
    pairs: int  # a bit each
    positions: tuple[Interval, ...]
    stale: tuple[Interval, ...]
    end: SaveEnd = SaveEnd.SAVED
    grade: Grade = Grade.READ
    sent_to: str = ""


@dataclass(frozen=True)
class Pairs:
    """The pairs of an engine: its workers in order, each with its KV layers in order; then those of which
    no worker is known."""

    live: Mask  # whether the pair's worker has a connector
    worker: Array  # index of the pair's worker
    layer: Array  # number of its layer; ranks that hold a part of the same layer share it
    ends: Mapping[int, NDArray[np.int8]]  # store step -> SaveEnd per pair
    kept: Mapping[int, Array]  # store step -> slots measured per pair where fewer than declared, else -1
    declared: Mapping[int, int]  # store step -> slots that its metadata names, of all requests
    grades: Mapping[int, NDArray[np.int8]]  # store step -> Grade of the end per pair
    implied: Mapping[int, NDArray[np.int8]]  # store step -> SaveEnd of what no metadata names
    void: Mapping[int, Mask]  # store step -> pairs in which what was read did not come to rest
    misread: Mapping[tuple[int, int], int]
    """(store step, row of a request) -> pairs, a bit each, in which other slots were read for it."""
    reads: Mapping[int, tuple[Read, ...]]  # row of a request -> what was read of it
    settled: Steps  # steps of which all workers are known to have read nothing else
    states: Mapping[int, NDArray[np.int8]]  # chunk step -> StepState per worker
    spools: tuple[str, ...]  # of the workers, in order
    given_away: bool  # no metadata names a store, and its KV may be copied out of sight
    decode_unknown: bool  # whether decode tokens are stored is not known

    def __len__(self) -> int:
        return len(self.live)

    def spool(self, pair: int) -> str:
        """The spool of a pair's worker, "?" where none is known."""
        worker = int(self.worker[pair])
        return self.spools[worker] if worker < len(self.spools) else "?"


def pairs_of(engine: Engine, requests: Mapping[int, Request], evidence: Evidence) -> tuple[Pairs, Trust]:
    """An engine's pairs, and what the ends of its store calls rest on.

    Args:
        requests: those of the engine, by row.
    """
    keys = [worker.key for worker in engine.workers]
    ran = [evidence.executed.get(key, NEVER_RAN) for key in keys]
    unfinished = any(evidence.unfinished.get(row) for row in requests)
    stores = stores_of(requests, engine.block_size, unfinished)
    declared = [
        ends(worker, of_worker, evidence.coverage[worker.key])
        for worker, of_worker in zip(engine.workers, ran, strict=True)
    ]
    watched = [evidence.watched[worker.key] for worker in engine.workers]
    checked = check(engine, stores, declared, watched, evidence.swallowed)
    steps = np.unique(np.array([c.step for r in requests.values() for c in r.chunks], dtype=np.int64))
    states = [
        step_states(of_worker, worker.stop_reason, steps)
        for worker, of_worker in zip(engine.workers, ran, strict=True)
    ]
    owners = [i for i, worker in enumerate(engine.workers) for _ in worker.kv_layers]
    # Layers of no known worker: the ledger still has their pairs, and says that nothing was seen.
    missing = max(0, engine.pairs - len(owners))
    assumed = len(engine.workers)
    if missing:
        states.append(np.full(len(steps), StepState.NOT_RECORDED, dtype=np.int8))
    n = len(stores.steps)
    unseen = np.full((n, missing), SaveEnd.NOT_OBSERVED, np.int8)
    end = np.concatenate([*checked.ends, unseen], axis=1)
    kept = np.concatenate([*checked.kept, np.full((n, missing), -1, np.int64)], axis=1)
    grade = np.concatenate([*checked.grades, np.full((n, missing), Grade.NOT_OBSERVED, np.int8)], axis=1)
    implied = np.concatenate([*checked.implied, unseen], axis=1)
    void = np.concatenate([*checked.void, np.zeros((n, missing), bool)], axis=1)
    state = np.stack(states, axis=1) if states else np.empty((len(steps), 0), dtype=np.int8)
    live = [engine.workers[i].connector_live is not False for i in owners]
    pairs = Pairs(
        live=np.array(live + [True] * missing, dtype=bool),
        worker=np.array(owners + [assumed] * missing, dtype=np.int64),
        layer=_layer_numbers(engine, missing),
        ends=dict(zip(stores.steps.tolist(), end, strict=True)),
        kept=dict(zip(stores.steps.tolist(), kept, strict=True)),
        declared=dict(zip(stores.steps.tolist(), stores.slots.tolist(), strict=True)),
        grades=dict(zip(stores.steps.tolist(), grade, strict=True)),
        implied=dict(zip(stores.steps.tolist(), implied, strict=True)),
        void=dict(zip(stores.steps.tolist(), void, strict=True)),
        misread=_misread(watched, checked.misread),
        reads=_as_named(_reads(watched, requests, evidence.swallowed, engine), end),
        settled=settled_steps(watched, steps),
        states=dict(zip(steps.tolist(), state, strict=True)),
        spools=tuple(worker.spool for worker in engine.workers),
        given_away=engine.store_entries == 0
        and any(worker.spool in evidence.given_away for worker in engine.workers),
        decode_unknown=bool(engine.implied_entries)
        and engine.implied_entries == engine.store_entries
        and engine.decode_measured is not False,
    )
    return pairs, checked.trust


_OTHERWISE = (SaveEnd.NOTHING_READ, SaveEnd.PART_READ, SaveEnd.MISPLACED)
_ENDS = {
    Account.OPEN: (SaveEnd.SAVED, Grade.READ),
    Account.PARTLY: (SaveEnd.SAVED, Grade.READ),
    Account.WRITTEN: (SaveEnd.SAVED, Grade.WRITTEN),
    Account.SENT: (SaveEnd.SAVED, Grade.READ),
    Account.REFUSED: (SaveEnd.PUT_FAILED, Grade.WRITTEN),
    Account.NOTHING: (SaveEnd.DROPPED, Grade.READ),
    Account.EMPTY: (SaveEnd.NOT_AT_REST, Grade.WRITTEN),
    Account.LOST_LATER: (SaveEnd.LOST_LATER, Grade.WRITTEN),
}


def _reads(
    workers: Sequence[Watched],
    requests: Mapping[int, Request],
    swallowed: Sequence[Swallowed],
    engine: Engine,
) -> dict[int, tuple[Read, ...]]:
    """What all workers read, by the request's row; pairs in the order of the workers."""
    found: dict[int, list[Read]] = defaultdict(list)
    shared = leading(requests)
    first = 0
    for one in workers:
        caught = caught_in_saving(one.worker, swallowed)
        instead = read_instead(one, requests, engine)
        for row, read in [*_missed(instead), *_too_late(one.slots)]:
            found[row].append(replace(read, pairs=read.pairs << first))
        for row, read in _outside(one, engine):
            found[row].append(replace(read, pairs=read.pairs << first))
        for row, touches in one.slots.reads.items():
            for touch in touches:
                for part in _ended(touch, one.worker, caught, shared.get(row, 0)):
                    part = replace(part, end=SaveEnd.MISPLACED) if touch.late_for else part
                    for stood in _stood_for(part, instead):
                        found[row].append(replace(stood, pairs=stood.pairs << first))
        first += len(one.worker.kv_layers)
    return {row: tuple(reads) for row, reads in found.items()}


def _as_named(reads: Mapping[int, tuple[Read, ...]], ends: Ends) -> dict[int, tuple[Read, ...]]:
    """The reads; where calls were seen to read other slots than their steps name, or not all of them, bytes
    that came to rest do not say under whose name: that was read, no more.

    Args:
        ends: of each store step and pair.
    """
    otherwise = np.logical_or.reduce(np.isin(ends, _OTHERWISE), axis=0)
    pairs = sum(1 << at for at in np.flatnonzero(otherwise).tolist())

    def less(one: Read) -> Read:
        doubted = one.grade == Grade.WRITTEN and one.end == SaveEnd.SAVED and one.pairs & pairs
        return replace(one, grade=Grade.READ) if doubted else one

    return {row: tuple(map(less, of_row)) for row, of_row in reads.items()}


def _missed(instead: Instead) -> Iterator[tuple[int, Read]]:
    """(row of a request, its positions in whose place other slots were read)."""
    for (step, row, column), parts in instead.holes.items():
        yield row, Read(step, 1 << column, tuple(parts), (), SaveEnd.MISPLACED, Grade.READ)


def _outside(watched: Watched, engine: Engine) -> Iterator[tuple[int, Read]]:
    """(row of a request, what its layers' windows had left and nobody read, where all in them was read)."""
    windows = windows_of(engine, watched.worker)
    for row in watched.slots.reads if windows else ():
        for column in windows:
            parts = left_out(watched.slots, row, column, windows)
            if parts:
                yield row, Read(0, 1 << column, tuple(parts), (), SaveEnd.NOT_OBSERVED, Grade.NOT_OBSERVED)


def _too_late(slots: Slots) -> Iterator[tuple[int, Read]]:
    """(row of a request, its positions that were read after their blocks went to another one)."""
    for row, reads in slots.late.items():
        for step, columns, positions in reads:
            yield row, Read(step, columns, positions, (), SaveEnd.MISPLACED, Grade.READ)


def _stood_for(read: Read, instead: Instead) -> Iterator[Read]:
    """A read of a worker that was seen to read other slots than those of its tokens: what it read in such a
    step stands for other tokens, and for which it read in others is not known. That the metadata names them
    proves nothing: it may name the wrong ones itself."""
    unknown = read.pairs if instead.steps else 0
    if not unknown or read.end > SaveEnd.SAVED:
        yield read
        return
    wrong = read.pairs & instead.steps.get(read.step, 0)
    if wrong:
        yield replace(read, pairs=wrong, end=SaveEnd.MISPLACED, grade=Grade.READ)
    if unknown & ~wrong:
        yield replace(read, pairs=unknown & ~wrong, end=SaveEnd.NOT_OBSERVED, grade=Grade.NOT_OBSERVED)
    if read.pairs & ~unknown & ~wrong:
        yield replace(read, pairs=read.pairs & ~unknown & ~wrong)


def _ended(touch: Touch, worker: Worker, caught: Caught, shared: int) -> Iterator[Read]:
    """A touch by what became of it; ``pairs`` are the worker's layers.

    Args:
        shared: leading positions that another request has as well: what is not stored again is not lost.
    """
    end, grade = _ENDS[touch.account]
    positions = touch.positions
    if touch.account == Account.NOTHING:
        put = tuple(intersect(list(positions), [(0, shared)]))
        yield Read(touch.step, touch.columns, put, ())
        positions = tuple(subtract(list(positions), [(0, shared)]))
    failed = 0
    if end == SaveEnd.SAVED and grade == Grade.READ and caught.facts:
        layers = [layer for layer, name in enumerate(worker.kv_layers) if caught.at(touch.step, name)]
        failed = sum(1 << layer for layer in layers) & touch.columns
        if failed:
            seen = Grade.READ if touch.account == Account.OPEN else Grade.NOT_OBSERVED
            yield Read(touch.step, failed, positions, touch.stale, SaveEnd.CAUGHT, seen)
    if touch.columns & ~failed:
        yield Read(touch.step, touch.columns & ~failed, positions, touch.stale, end, grade, touch.sent_to)


def _misread(
    workers: Sequence[Watched], misread: Sequence[Mapping[tuple[int, int], Mask]]
) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = defaultdict(int)
    first = 0
    for one, of_worker in zip(workers, misread, strict=True):
        for (step, request), columns in of_worker.items():
            for column in np.flatnonzero(columns).tolist():
                found[step, request] |= 1 << (first + column)
        first += len(one.worker.kv_layers)
    return dict(found)


def settled_steps(workers: Sequence[Watched], steps: Array) -> Steps:
    """The steps of which it is known what every worker read."""
    if not workers:
        return Steps()
    return Steps(steps[np.logical_and.reduce([one.settled(steps) for one in workers])])


def _layer_numbers(engine: Engine, missing: int) -> Array:
    numbers: dict[str, int] = {}
    found = [numbers.setdefault(name, len(numbers)) for worker in engine.workers for name in worker.kv_layers]
    return np.array(found + list(range(len(numbers), len(numbers) + missing)), dtype=np.int64)
