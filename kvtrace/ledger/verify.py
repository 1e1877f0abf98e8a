"""Declared against measured: what the sampled hook calls read, held against the metadata.

A call that was seen to read what its metadata names agrees; one that read less, or nothing, books
the difference to a cause; one that was not sampled is taken as declared. From the silence of a
connector of which no call was ever seen to read anything something is concluded only where every
watched call says that nothing can have happened out of sight (threads of its own, native code).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvtrace.ledger import effects
from kvtrace.ledger.effects import SAVE, WAIT, WHOLE, Cell, Measured
from kvtrace.ledger.model import Engine, Swallowed, Trust, Worker
from kvtrace.ledger.requests import Request
from kvtrace.ledger.scan import Array

NATIVE_COPY = frozenset(
    {
        "OffloadingConnector", "SimpleCPUOffloadConnector", "LMCacheConnectorV1", "LMCacheMPConnector",
        "MooncakeStoreConnector", "HF3FSKVConnector", "FlexKVConnectorV1", "NixlConnector",
        "NixlPullConnector", "NixlPushConnector", "MooncakeConnector", "MoRIIOConnector", "P2pNcclConnector",
        "HiSparseConnector", "MultiConnector",
    }
)  # fmt: skip
"""Connectors known to hand pointers to native code or streams of their own: nothing follows from
seeing no tensor operation of theirs."""


_MAX_SHARED = 16
_LEAST_BYTES = 8
"""Bytes that a slot of one layer takes in a file, at the very least."""


@dataclass(frozen=True)
class Codes:
    """The ledger's outcome codes that are read and written here."""

    saved: int
    not_observed: int
    swallowed: int
    nothing: int
    short: int
    shared: int
    lost: int


@dataclass
class Stores:
    """What the metadata names in each store step of an engine; arrays over the steps."""

    steps: Array
    slots: Array  # of all requests
    whole: Array  # ... of these in whole blocks, entry by entry: a worker may round down to them
    implied: NDArray[np.bool_]  # named by no metadata: measured
    asynchronous: bool
    alone: list[Request | None]  # the request, in the steps that store for one only

    @classmethod
    def of(cls, requests: Sequence[Request], steps: Array, block: int) -> Stores:
        at = {step: i for i, step in enumerate(steps.tolist())}
        slots, whole = np.zeros(len(steps), np.int64), np.zeros(len(steps), np.int64)
        implied = np.zeros(len(steps), bool)
        storing: list[dict[int, Request]] = [{} for _ in range(len(steps))]
        asynchronous = False
        for request in requests:
            asynchronous |= bool(request.saves)
            for entry in request.entries:
                i = at[entry.step]
                # A corrupt record can name any number: bounded, so that sums stay sums.
                size = min(max(0, entry.slots), 1 << 40)
                slots[i] += size
                if size:
                    storing[i][id(request)] = request
                whole[i] += size // max(1, block) * max(1, block)
                implied[i] |= entry.implied
                asynchronous |= entry.asynchronous
        alone = [next(iter(of.values())) if len(of) == 1 else None for of in storing]
        return cls(steps, slots, whole, implied, asynchronous, alone)


@dataclass
class _Pair:
    """A store call that was watched and did less than it should."""

    row: int
    column: int
    slots: int
    empty_files: bool
    unwritten: bool


@dataclass(frozen=True)
class _Calls:
    """An engine's store calls while they are judged. Lists have one item a worker, in order; a call is
    (row, KV layer)."""

    engine: Engine
    tables: list[Measured]
    stores: Stores
    columns: list[NDArray[np.int8]]
    agreed: list[set[tuple[int, int]]]
    lost: list[set[tuple[int, int]]]
    codes: Codes
    trust: Trust

    def stands(self, worker: int, row: int, pair: int) -> bool:
        return bool(self.columns[worker][row, pair] == self.codes.saved)

    def lose(self, worker: int, row: int, pair: int, code: int) -> None:
        """A call did its work, and its KV is not in the file any more."""
        self.columns[worker][row, pair] = code
        self.agreed[worker].discard((row, pair))
        self.lost[worker].add((row, pair))


def check(
    engine: Engine,
    stores: Stores,
    columns: list[NDArray[np.int8]],
    codes: Codes,
    measured: Mapping[tuple[int, str], Measured],
    swallowed: list[Swallowed],
    trust: Trust,
) -> list[Array]:
    """Correct the outcomes of an engine's store calls by what was measured.

    Args:
        columns: one array (store steps, KV layers) a worker, in order; changed in place.
        trust: counts are added.

    Returns:
        Of the same shapes: slots that were read where fewer than declared, else -1.
    """
    kept: list[Array] = [np.full(column.shape, -1, dtype=np.int64) for column in columns]
    tables = [measured.get(worker.key) or Measured() for worker in engine.workers]
    # What a connector copies in other hooks need not be copied in those for saving.
    seen = any(table.most > 0 for table in tables) and not any(table.elsewhere for table in tables)
    silent = not stores.asynchronous and bool(tables) and all(table.silent for table in tables)
    replicated = _replicated(engine)
    agreed: list[set[tuple[int, int]]] = []
    lost: list[set[tuple[int, int]]] = []
    for worker, table, column, short in zip(engine.workers, tables, columns, kept, strict=True):
        certain = seen or (silent and not _native(worker))
        good, bad = _worker(engine, worker, table, stores, column, short, codes, swallowed, trust, certain)
        agreed.append(good)
        lost.append(bad)
    always_shared = False
    if replicated:
        _forgive(engine, columns, kept, agreed, lost, codes)
    else:
        calls = _Calls(engine, tables, stores, columns, agreed, lost, codes, trust)
        always_shared = _shared(calls)
        _overwritten(calls)
    for table, column, good, bad in zip(tables, columns, agreed, lost, strict=True):
        # Calls that were not watched share their files too, and nobody knows who won.
        if always_shared or (bad and not good):
            _doubt(table, stores, column, bad, codes, trust)
    return kept


def _replicated(engine: Engine) -> bool:
    """Whether every rank holds the same KV (MLA): one of them saves for all."""
    groups = engine.facts.kv_groups
    return bool(groups) and all("MLA" in group.kind for group in groups)


def _native(worker: Worker) -> bool:
    return worker.connector is not None and worker.connector.cls in NATIVE_COPY


def _worker(
    engine: Engine,
    worker: Worker,
    table: Measured,
    stores: Stores,
    column: NDArray[np.int8],
    short: Array,
    codes: Codes,
    swallowed: list[Swallowed],
    trust: Trust,
    certain: bool,
) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """(calls that agree, calls that lost tokens), as (row, KV layer).

    ``certain``: a call that is seen to read nothing did read nothing.
    """
    good: set[tuple[int, int]] = set()
    bad: set[tuple[int, int]] = set()
    weak: list[_Pair] = []
    unwritten: list[tuple[int, int]] = []  # read all, caught an exception, and wrote nothing
    plain = False  # whether a call without an exception wrote nothing either
    caught = effects.caught(worker, swallowed)
    work = (column == codes.saved) & (stores.slots[:, None] > 0)
    trust.calls += int(work.sum())
    per_layer = worker.connector is None or worker.connector.saves_per_layer
    waits = worker.connector is None or "wait_for_save" not in worker.connector.noop
    for row, step in enumerate(stores.steps.tolist()):
        cells = table.steps.get(step)
        if not cells:
            if stores.implied[row]:
                column[row, work[row]] = codes.not_observed
            continue
        hooks = table.hooks(step)
        slots = int(stores.slots[row])
        least = int(stores.whole[row])
        for pair in np.flatnonzero(work[row]).tolist():
            cell = cells.get(pair)
            if cell is None and not per_layer and hooks >> WAIT & 1:
                cell = _untouched(cells)
            if stores.implied[row]:
                read = -1 if cell is None else cell.slots
                if read <= 0:
                    column[row, pair] = codes.not_observed
                else:
                    good.add((row, pair))
                    trust.measured += 1
                    trust.agreed += 1
                    if read < slots:
                        column[row, pair], short[row, pair] = codes.not_observed, read
                continue
            if cell is None:
                continue
            if cell.slots > 0 and cell.slots >= least:
                good.add((row, pair))
                written = [cell] if per_layer else list(cells.values())
                if all(one.bytes <= 0 and not one.files for one in written):
                    if caught.at(step, worker.kv_layers[pair]):
                        unwritten.append((row, pair))
                    else:
                        plain = True
                trust.measured += 1
                trust.agreed += 1
                continue
            complete = bool(hooks >> WAIT & 1) or not waits
            if per_layer:
                complete = complete and bool(cell.hooks >> SAVE & 1)
            if not complete:
                continue  # the rest may have been read in a call that was not watched
            empty = cell.files > 0 and cell.bytes < slots * _LEAST_BYTES
            if cell.slots <= 0 and not empty and (cell.slots < 0 or cell.bytes > 0):
                continue  # it wrote something, or nothing could be watched
            written = [cell] if per_layer else list(cells.values())
            nowhere = all(one.bytes <= 0 and not one.files for one in written)
            if not least and not cell.slots and not empty:
                column[row, pair] = codes.not_observed  # less than a block: rounded away, or lost
                continue
            weak.append(_Pair(row, pair, max(0, cell.slots), empty, nowhere))
    if unwritten and not plain:
        # Read, and lost on the way to the file: calls without an exception do write.
        for row, pair in unwritten:
            good.discard((row, pair))
            bad.add((row, pair))
            column[row, pair] = codes.swallowed
        trust.agreed -= len(unwritten)
        trust.unwritten += len(unwritten)
    if caught.facts:
        trust.caught_agreed += sum(
            caught.at(int(stores.steps[row]), worker.kv_layers[pair]) for row, pair in good
        )
    usual = caught.calls * 2 >= len(weak)
    native = _native(worker)
    for call in weak:
        row, pair = call.row, call.column
        layer = worker.kv_layers[pair]
        raised = bool(caught.facts) and (usual or caught.at(int(stores.steps[row]), layer))
        if not call.slots and not (certain or call.empty_files or raised):
            trust.blind += 1
            if not (native or stores.asynchronous):
                column[row, pair] = codes.not_observed
            continue
        trust.measured += 1
        if call.slots:
            trust.short += 1
            trust.short_read += call.slots
            trust.short_declared += int(stores.slots[row])
        else:
            trust.nothing += 1
            trust.empty += call.empty_files
        bad.add((row, pair))
        column[row, pair] = codes.swallowed if raised else codes.short if call.slots else codes.nothing
        if call.slots and not (raised and call.unwritten and not plain):
            short[row, pair] = call.slots
    return good, bad


def _untouched(cells: Mapping[int, Cell]) -> Cell | None:
    """A layer without a record of its own, in a step whose save hook was watched; None where that
    call did something that names no layer."""
    if any(cell.slots < 0 for cell in cells.values()):
        return None
    read = any(cell.slots > 0 for cell in cells.values())
    size, files = sum(cell.bytes for cell in cells.values()), sum(cell.files for cell in cells.values())
    hooks = 0
    for cell in cells.values():
        hooks |= cell.hooks
    return Cell(0, bytes=0 if read else size, files=0 if read else files, hooks=hooks)


def _forgive(
    engine: Engine,
    columns: list[NDArray[np.int8]],
    kept: list[Array],
    agreed: list[set[tuple[int, int]]],
    lost: list[set[tuple[int, int]]],
    codes: Codes,
) -> None:
    """KV that every rank holds alike is saved where one rank saved it."""
    stored = {
        (row, engine.workers[i].kv_layers[pair]) for i, calls in enumerate(agreed) for row, pair in calls
    }
    for worker, column, short, bad in zip(engine.workers, columns, kept, lost, strict=True):
        for row, pair in sorted(bad):
            if (row, worker.kv_layers[pair]) in stored:
                column[row, pair], short[row, pair] = codes.saved, -1
                bad.discard((row, pair))


def _shared(calls: _Calls) -> bool:
    """Ranks that write one file for the same layer in the same step: the last one's KV stays.

    Returns whether every step with files of several ranks showed it.
    """
    shared = False
    apart = False
    workers, trust = calls.engine.workers, calls.trust
    common = [_common(table) for table in calls.tables]
    for row, step in enumerate(calls.stores.steps.tolist()):
        writers: dict[tuple[int, str], list[tuple[int, int, int]]] = defaultdict(list)
        for i, (worker, table) in enumerate(zip(workers, calls.tables, strict=True)):
            for pair, cell in table.steps.get(step, {}).items():
                if pair == WHOLE or not calls.stands(i, row, pair):
                    continue
                for target, t in cell.targets.items():
                    if target in common[i]:
                        continue
                    writers[(target, worker.kv_layers[pair])].append((t, i, pair))
        for several in writers.values():
            if len({i for _, i, _ in several}) < 2:
                apart = True
                continue
            shared = True
            layer = workers[several[0][1]].kv_layers[several[0][2]]
            trust.shared_files += 1
            if len(trust.shared) < _MAX_SHARED:
                ranks = tuple(sorted({workers[i].rank for _, i, _ in several}))
                trust.shared.append((step, layer, ranks))
            for _, i, pair in sorted(several)[:-1]:
                calls.lose(i, row, pair, calls.codes.shared)
    return shared and not apart


def _overwritten(calls: _Calls) -> None:
    """A file that a later step writes anew for a prompt with other tokens: the first one's KV is gone.

    Only where the file is all that both calls wrote, and holds as many bytes for a slot both times:
    one that grows keeps what was in it.
    """
    stores, trust = calls.stores, calls.trust
    for i, (worker, table) in enumerate(zip(calls.engine.workers, calls.tables, strict=True)):
        common = _common(table)
        held: dict[tuple[int, int], tuple[int, float]] = {}  # (layer, file) -> (row, bytes of a slot)
        for row, step in enumerate(stores.steps.tolist()):
            new = stores.alone[row]
            for pair, cell in table.steps.get(step, {}).items():
                if pair == WHOLE or cell.files != 1 or len(cell.targets) != 1 or not stores.slots[row]:
                    continue
                (target,) = cell.targets
                if target in common:
                    continue
                size = cell.bytes / int(stores.slots[row])
                before, (row_before, size_before) = (pair, target) in held, held.get((pair, target), (0, 0.0))
                held[pair, target] = (row, size)
                old = stores.alone[row_before]
                if not before or old is None or new is None or not cell.replaced or size < _LEAST_BYTES:
                    continue
                alike = abs(size - size_before) <= max(size, size_before) / 4
                if alike and _apart(old, new) and calls.stands(i, row_before, pair):
                    calls.lose(i, row_before, pair, calls.codes.lost)
                    trust.overwritten_calls += 1
                    if len(trust.overwritten) < _MAX_SHARED:
                        trust.overwritten.append((old.id, new.id, step, worker.kv_layers[pair]))


def _apart(one: Request, other: Request) -> bool:
    """Whether two prompts differ in their first block already: known where both have digests of it."""
    firsts = [min(prompt.prefixes.values(), default=0) for prompt in (one, other)]
    return firsts[0] == firsts[1] > 0 and not one.prefixes.keys() & other.prefixes.keys()


def _common(table: Measured) -> set[int]:
    """Files that one rank writes for several layers (an index, a container): no layer's own."""
    layers: dict[int, set[int]] = defaultdict(set)
    for cells in table.steps.values():
        for pair, cell in cells.items():
            for target in cell.targets:
                layers[target].add(pair)
    return {target for target, pairs in layers.items() if len(pairs) > 1}


def _doubt(
    table: Measured,
    stores: Stores,
    column: NDArray[np.int8],
    lost: set[tuple[int, int]],
    codes: Codes,
    trust: Trust,
) -> None:
    """No call of this worker that was watched did its work: the others can't be taken as declared."""
    for row, step in enumerate(stores.steps.tolist()):
        if not stores.slots[row]:
            continue
        cells = table.steps.get(step, {})
        for pair in np.flatnonzero(column[row] == codes.saved).tolist():
            if pair not in cells and (row, pair) not in lost:
                column[row, pair] = codes.not_observed
                trust.unknown += 1
