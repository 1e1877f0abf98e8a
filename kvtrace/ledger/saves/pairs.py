"""One engine's (layer, rank) pairs, and the evidence of every step that matters in each."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvtrace.ledger.contents.compare import Returned
from kvtrace.ledger.coverage import WorkerCoverage
from kvtrace.ledger.ends import Blind, SaveEnd
from kvtrace.ledger.intervals import Interval
from kvtrace.ledger.reported import Caught, caught_in_saving
from kvtrace.ledger.requests import Request
from kvtrace.ledger.run import Engine, Swallowed, Trust, Worker
from kvtrace.ledger.saves.calls import At, Call, WorkerCalls
from kvtrace.ledger.saves.files import overwritten_by_rank, rewritten
from kvtrace.ledger.saves.misplaced import strangers
from kvtrace.ledger.saves.pipeline import ends
from kvtrace.ledger.saves.stores import Stores, stores_of
from kvtrace.ledger.saves.useless_reads import OtherSlots, other_slots
from kvtrace.ledger.saves.watched import Watched, settled_steps
from kvtrace.ledger.saves.windows import out_of_window, windows_of
from kvtrace.ledger.slots.accounts import Account
from kvtrace.ledger.slots.reads import Slots, Touch
from kvtrace.ledger.steps import NEVER_RAN, Array, Executed, Mask, Steps, StepState, step_states
from kvtrace.ledger.values import replace
from kvtrace.terms import Grade


@dataclass(frozen=True)
class SaveEvidence:
    """What was seen of the workers and of the saves; tables of workers by Worker.key."""

    executed: Mapping[tuple[int, str], Executed]
    coverage: Mapping[tuple[int, str], WorkerCoverage]
    watched: Mapping[tuple[int, str], Watched]
    swallowed: Sequence[Swallowed]
    unknown: Steps
    """Steps of which it is not known what they stored."""
    unfinished: Mapping[int, Mapping[str, SaveEnd]]
    """Row of a request -> worker's spool ("" all) -> how its asynchronous save ended, where not well."""
    proved: Mapping[int, Sequence[Returned]] = field(default_factory=dict)
    """Row of a request -> what came back, in this or a later request, with the KV that was computed."""
    kept: Mapping[int, Sequence[Returned]] = field(default_factory=dict)
    """Of this what came back to a request of the same engine."""
    unequal: Mapping[int, Sequence[Returned]] = field(default_factory=dict)
    """The same of what came back as other KV."""
    given_away: frozenset[tuple[str, int]] = frozenset()
    """(worker's spool, engine; 0: any) whose KV may be copied out of sight: its address was given out, or it
    was handed to native code that is not known."""
    agent_failed: bool = False
    """Of what was not seen to be stored nothing is known."""


class StoreResult(NamedTuple):
    """What a read of a token, or the call that was to store it, came to. ``sent_to``: the peer of what was
    only sent; ``blind``: why it is not observed."""

    end: SaveEnd
    grade: Grade
    sent_to: str = ""
    blind: Blind = Blind.NO


@dataclass(frozen=True)
class Read:
    """Positions of a request that were read alike in some pairs, or in whose place other slots were.

    Attributes:
        pairs: a bit each.
        result: how these tokens ended, by this read alone.
        stale: positions that were read before they were computed.
        overdue: an earlier step asked for it: it stands for none of the tokens that its step computed.
    """

    step: int
    pairs: int
    positions: tuple[Interval, ...]
    result: StoreResult
    stale: tuple[Interval, ...] = ()
    overdue: bool = False


_READ = (SaveEnd.SAVED, Grade.READ)
_ENDS = {
    Account.OVERWRITTEN: (SaveEnd.OVERWRITTEN, Grade.WRITTEN),
    Account.WRITTEN: (SaveEnd.SAVED, Grade.WRITTEN),
    Account.REFUSED: (SaveEnd.PUT_FAILED, Grade.WRITTEN),
    Account.EMPTY: (SaveEnd.NOT_AT_REST, Grade.WRITTEN),
    Account.LOST_LATER: (SaveEnd.LOST_LATER, Grade.WRITTEN),
}
"""How a token ends of whose bytes this is known; of any other account: _READ."""
_OTHERS = StoreResult(SaveEnd.MISPLACED, Grade.READ)
_TOO_LATE = StoreResult(SaveEnd.READ_LATE, Grade.READ)
_NOT_KNOWN = StoreResult(SaveEnd.NOT_OBSERVED, Grade.NOT_OBSERVED, blind=Blind.UNSEEN)


class Stored(NamedTuple):
    """A store call, as far as its tokens need to know it: see :class:`~kvtrace.ledger.saves.calls.Call`."""

    end: SaveEnd
    grade: Grade
    unnamed_end: SaveEnd
    void: bool
    blind: Blind


UNSEEN = Stored(SaveEnd.NOT_OBSERVED, Grade.NOT_OBSERVED, SaveEnd.NOT_OBSERVED, False, Blind.UNSEEN)
"""A call of a pair of which no worker is known."""


@dataclass(frozen=True)
class Pairs:
    """The pairs of an engine: its workers in order, each with its KV layers in order; then those of which
    no worker is known."""

    live: Mask  # whether the pair's worker has a connector
    worker: Array  # index of the pair's worker
    layer: Array  # number of its layer; ranks that hold a part of the same layer share it
    calls: Mapping[int, Array]  # store step -> per pair the number of its call in ``kinds``
    kinds: Sequence[Stored]
    misread: Mapping[int, Mapping[int, int]]
    """Row of a request -> store step -> pairs, a bit each, in which other slots were read for it."""
    reads: Mapping[int, tuple[Read, ...]]  # row of a request -> what was read of it
    settled: Steps  # steps of which all workers are known to have read nothing else
    states: Mapping[int, NDArray[np.int8]]  # chunk step -> StepState per worker
    spools: tuple[str, ...]  # of the workers, in order
    only_loads: bool  # nobody can expect this connector to save
    out_of_sight: bool  # KV may be copied unseen, and no metadata names a store; or the agent failed
    decode_unknown: bool  # whether decode tokens are stored is not known

    def __len__(self) -> int:
        return len(self.live)

    def spool(self, pair: int) -> str:
        """The spool of a pair's worker, "?" where none is known."""
        worker = int(self.worker[pair])
        return self.spools[worker] if worker < len(self.spools) else "?"

    def call(self, step: int, pair: int) -> Stored:
        """The store call of a step that stores something, in a pair."""
        return self.kinds[int(self.calls[step][pair])]


def pairs_of(engine: Engine, requests: Mapping[int, Request], evidence: SaveEvidence) -> tuple[Pairs, Trust]:
    """An engine's pairs, and what the ends of its store calls rest on.

    Args:
        requests: those of the engine, by row.
    """
    ran = [evidence.executed.get(worker.key, NEVER_RAN) for worker in engine.workers]
    watched = [evidence.watched[worker.key] for worker in engine.workers]
    stores = stores_of(requests)
    calls, trust = _calls(engine, stores, evidence)
    steps = np.unique(np.array([c.step for r in requests.values() for c in r.chunks], dtype=np.int64))
    states = [
        step_states(of_worker, worker.stop_reason, steps)
        for worker, of_worker in zip(engine.workers, ran, strict=True)
    ]
    owners = [i for i, worker in enumerate(engine.workers) for _ in worker.kv_layers]
    # Layers of no known worker: the ledger still has their pairs, and says that nothing was seen.
    missing = max(0, engine.pairs - len(owners))
    if missing:
        states.append(np.full(len(steps), StepState.NOT_RECORDED, dtype=np.int8))
    numbers, kinds = _numbered(engine, stores, calls, missing)
    state = np.stack(states, axis=1) if states else np.empty((len(steps), 0), dtype=np.int8)
    live = [engine.workers[i].connector_live is not False for i in owners]
    pairs = Pairs(
        live=np.array(live + [True] * missing, dtype=bool),
        worker=np.array(owners + [len(engine.workers)] * missing, dtype=np.int64),
        layer=_layer_numbers(engine, missing),
        calls=dict(zip(stores.steps.tolist(), numbers, strict=True)),
        kinds=kinds,
        misread=_misread(watched, stores, calls),
        reads=_reads(watched, requests, evidence, engine, _otherwise(watched, calls)),
        settled=settled_steps(watched, steps),
        states=dict(zip(steps.tolist(), state, strict=True)),
        spools=tuple(worker.spool for worker in engine.workers),
        only_loads=engine.only_loads,
        out_of_sight=evidence.agent_failed
        or (
            engine.store_entries == 0
            and any((w.spool, of) in evidence.given_away for w in engine.workers for of in (0, engine.tag))
        ),
        decode_unknown=engine.names_no_store and engine.decode_measured is not False,
    )
    return pairs, trust


# --- store calls


def _calls(engine: Engine, stores: Stores, evidence: SaveEvidence) -> tuple[list[dict[At, Call]], Trust]:
    """All store calls of each worker, with what the workers know of each other's."""
    gathering = []
    for worker in engine.workers:
        ran = evidence.executed.get(worker.key, NEVER_RAN)
        reached = ends(worker, ran, evidence.coverage[worker.key])
        watched = evidence.watched[worker.key]
        windows = windows_of(engine, worker)
        gathering.append(WorkerCalls(watched, stores, reached, engine, windows, evidence.unknown))
    calls = [one.gathered(evidence.swallowed) for one in gathering]
    replicated = _replicated(engine)
    gone, trust = (set[tuple[int, At]](), Trust()) if replicated else overwritten_by_rank(gathering, calls)
    whole = {
        (row, one.watched.worker.kv_layers[column])
        for one, of_worker in zip(gathering, calls, strict=True)
        for (row, column), call in (of_worker.items() if replicated else ())
        if call.complete
    }
    for index, (one, of_worker) in enumerate(zip(gathering, calls, strict=True)):
        for at, call in of_worker.items():
            replica = (at[0], one.watched.worker.kv_layers[at[1]]) in whole
            if replica or (index, at) in gone:
                of_worker[at] = dataclasses.replace(call, by_replica=replica, overwritten=(index, at) in gone)
        trust = sum((call.trust * n for call, n in Counter(of_worker.values()).items()), trust)
    return calls, trust


def _replicated(engine: Engine) -> bool:
    """Whether every rank holds the same KV (MLA): one of them saves for all."""
    groups = engine.token_groups
    return bool(groups) and all("MLA" in group.kind for group in groups)


def _numbered(
    engine: Engine, stores: Stores, calls: Sequence[Mapping[At, Call]], missing: int
) -> tuple[list[Array], list[Stored]]:
    """Of each store step the numbers of its calls, pair by pair; and the calls that differ."""
    known: dict[Stored, int] = {UNSEEN: 0}
    of_call: dict[Call, int] = {}
    found: list[Array] = []
    for row in range(len(stores.steps)):
        numbers = []
        for worker, of_worker in zip(engine.workers, calls, strict=True):
            for column in range(len(worker.kv_layers)):
                call = of_worker[row, column]
                number = of_call.get(call)
                if number is None:
                    unseen = SaveEnd.NOT_OBSERVED in (call.end[0], call.unnamed_end)
                    blind = call.blind if unseen else Blind.NO
                    stored = Stored(*call.end, call.unnamed_end, call.void, blind)
                    number = of_call[call] = known.setdefault(stored, len(known))
                numbers.append(number)
        found.append(np.array(numbers + [0] * missing, dtype=np.int64))
    return found, list(known)


def _misread(
    workers: Sequence[Watched], stores: Stores, calls: Sequence[Mapping[At, Call]]
) -> dict[int, dict[int, int]]:
    """Of which requests calls read other slots: those of theirs that were read stand for other tokens."""
    found: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    first = 0
    for one, of_worker in zip(workers, calls, strict=True):
        for (row, column), call in of_worker.items():
            if call.end[0] == SaveEnd.MISPLACED:
                step = int(stores.steps[row])
                for request in {*call.unread_of, *strangers(one.slots, stores, row, column)}:
                    found[request][step] |= 1 << (first + column)
        first += len(one.worker.kv_layers)
    return dict(found)


_OTHERWISE = (SaveEnd.NOTHING_READ, SaveEnd.PART_READ, SaveEnd.MISPLACED)


def _otherwise(workers: Sequence[Watched], calls: Sequence[Mapping[At, Call]]) -> int:
    """The pairs, a bit each, in which a call read other slots than its step names, or not all of them, or
    reads come later than what they are for: whose those stand for, bytes at rest do not say."""
    found = first = 0
    for one, of_worker in zip(workers, calls, strict=True):
        short = {column for (_, column), call in of_worker.items() if call.end[0] in _OTHERWISE}
        every = range(len(one.worker.kv_layers)) if one.table.later else ()
        for column in short.union(every):
            found |= 1 << (first + column)
        first += len(one.worker.kv_layers)
    return found


# --- reads


def _reads(
    workers: Sequence[Watched],
    requests: Mapping[int, Request],
    evidence: SaveEvidence,
    engine: Engine,
    otherwise: int,
) -> dict[int, tuple[Read, ...]]:
    """What all workers read, by the request's row; pairs in the order of the workers.

    Args:
        otherwise: pairs in which calls read other slots than their steps name.
    """
    found: dict[int, list[Read]] = defaultdict(list)
    first = 0
    pending = {row for row, one in evidence.unfinished.items() if SaveEnd.PENDING in one.values()}
    for one in workers:
        caught = caught_in_saving(one.worker, evidence.swallowed)
        others = other_slots(one, requests, engine, pending)
        reads = [*_missed(others), *_too_late(one.slots), *_out_of_windows(one, engine)]
        for row, touch in rewritten(one.slots.reads, requests):
            # Of these bytes at rest do not say under whose name they are.
            unnamed = -1 if requests[row].gave_back(touch.step) else otherwise >> first
            reads += [
                (row, _at_most_read(part) if part.pairs & unnamed else part)
                for read in reads_of(touch, one.worker, caught)
                for part in _told_apart(read, others)
            ]
        for row, read in reads:
            found[row].append(replace(read, pairs=read.pairs << first))
        first += len(one.worker.kv_layers)
    return {row: tuple(reads) for row, reads in found.items()}


def _missed(others: OtherSlots) -> Iterator[tuple[int, Read]]:
    """(row of a request, its positions in whose place other slots were read)."""
    for (step, row, column), parts in others.missed.items():
        yield row, Read(step, 1 << column, tuple(parts), _OTHERS)


def _too_late(slots: Slots) -> Iterator[tuple[int, Read]]:
    """(row of a request, its positions that were read, or may have been, after their blocks went to another
    one)."""
    for row, reads in slots.late.items():
        for step, columns, positions in reads:
            yield row, Read(step, columns, positions, _TOO_LATE)
    for row, reads in slots.perhaps_late.items():
        for step, columns, positions in reads:
            yield row, Read(step, columns, positions, _NOT_KNOWN)


def _out_of_windows(watched: Watched, engine: Engine) -> Iterator[tuple[int, Read]]:
    """(row of a request, what was out of its layers' windows and nobody read, where all in them was read)."""
    windows = windows_of(engine, watched.worker)
    for row in watched.slots.reads if windows else ():
        for column in windows:
            parts = out_of_window(watched.slots, row, column, windows)
            if parts:
                yield row, Read(0, 1 << column, tuple(parts), _NOT_KNOWN)


def reads_of(touch: Touch, worker: Worker, caught: Caught) -> Iterator[Read]:
    """A touch as reads; ``pairs`` are the worker's layers. Whose tokens one stands for that came too late for
    another request is not known."""
    alone = StoreResult(*_ENDS.get(touch.account, _READ), touch.sent_to)
    result = _NOT_KNOWN if touch.late_for else alone
    read = Read(touch.step, touch.columns, touch.positions, result, touch.stale, touch.overdue)
    failed = _calls_of(caught, touch.step, worker) & touch.columns if result[:2] == _READ else 0
    ended = failed and failed & _calls_of(caught.ended, touch.step, worker)
    surely = ended if touch.account == Account.OPEN else 0
    for pairs, grade in ((surely, Grade.READ), (failed & ~surely, Grade.NOT_OBSERVED)):
        if pairs:
            yield replace(read, pairs=pairs, result=result._replace(end=SaveEnd.CAUGHT, grade=grade))
    if touch.columns & ~failed:
        yield replace(read, pairs=touch.columns & ~failed)


def _at_most_read(read: Read) -> Read:
    result = read.result
    if result.end != SaveEnd.SAVED:
        return read
    return replace(read, result=result._replace(grade=min(result.grade, Grade.READ)))


def _calls_of(caught: Caught, step: int, worker: Worker) -> int:
    """The worker's layers, a bit each, in whose call of a step one of these came."""
    layers = enumerate(worker.kv_layers) if caught.facts else ()
    return sum(1 << layer for layer, name in layers if caught.at(step, name))


def _told_apart(read: Read, others: OtherSlots) -> Iterator[Read]:
    """A read of a worker that was seen to read other slots than those of its tokens: what it read in such a
    step stands for other tokens, and whose a read in others is, is not known. That the metadata names them
    proves nothing: it may name the wrong ones itself."""
    if not others.steps or read.result.blind:
        yield read
        return
    wrong = 0 if read.overdue else read.pairs & others.steps.get(read.step, 0)
    if wrong:
        yield replace(read, pairs=wrong, result=_OTHERS)
    if read.pairs & ~wrong:
        yield replace(read, pairs=read.pairs & ~wrong, result=_NOT_KNOWN)


def _layer_numbers(engine: Engine, missing: int) -> Array:
    numbers: dict[str, int] = {}
    found = [numbers.setdefault(name, len(numbers)) for worker in engine.workers for name in worker.kv_layers]
    return np.array(found + list(range(len(numbers), len(numbers) + missing)), dtype=np.int64)
