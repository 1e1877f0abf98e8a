"""KV that was written and did not stay: files that several ranks, or several prompts, write."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set

from kvtrace.ledger.ends import SaveEnd
from kvtrace.ledger.requests import Request
from kvtrace.ledger.run import Trust
from kvtrace.ledger.saves.calls import LEAST_BYTES, At, Call, WorkerCalls
from kvtrace.ledger.saves.measured import WHOLE, Cell, MeasuredCells
from kvtrace.ledger.slots.accounts import Account
from kvtrace.ledger.slots.reads import in_layer

_NARROWEST = 16
"""Two bits for a number of four bytes."""
Calls = Mapping[At, Call]
Overwritten = dict[tuple[int, At], SaveEnd]
"""(worker's index, call) -> by whom what it wrote was overwritten."""


def overwritten(workers: Sequence[WorkerCalls], calls: Sequence[Calls]) -> tuple[Overwritten, Trust]:
    """The calls whose files did not stay.

    Args:
        calls: of each worker.
    """
    shared, trust = _by_rank(workers, calls)
    found: Overwritten = {}
    for index, (one, of_worker) in enumerate(zip(workers, calls, strict=True)):
        still = {at for at, call in of_worker.items() if _saved(call) and (index, at) not in shared}
        of_one, more = _by_prompt(one, still)
        found.update({(index, at): SaveEnd.OVERWRITTEN for at in of_one})
        trust += more
    return {**found, **shared}, trust


def _saved(call: Call) -> bool:
    return call.end[0] == SaveEnd.SAVED


def _by_rank(workers: Sequence[WorkerCalls], calls: Sequence[Calls]) -> tuple[Overwritten, Trust]:
    """Ranks that write one file for the same layer in the same step: the last one's KV stays."""
    trust, found, apart = Trust(), Overwritten(), 0
    common = [_common(one.watched.table) for one in workers]
    for row, step in enumerate(workers[0].stores.steps.tolist() if workers else ()):
        writers: dict[tuple[int, str], list[tuple[int, int, int]]] = defaultdict(list)
        """(file, layer) -> (time, worker, column) of those that wrote it."""
        for index, one in enumerate(workers):
            for column, cell in one.watched.table.steps.get(step, {}).items():
                if column != WHOLE and _saved(calls[index][row, column]):
                    layer = one.watched.worker.kv_layers[column]
                    for target in cell.targets.keys() - common[index]:
                        writers[target, layer].append((cell.targets[target], index, column))
        for (_, layer), wrote in writers.items():
            ranks = tuple(sorted({workers[index].watched.worker.rank for _, index, _ in wrote}))
            if len({index for _, index, _ in wrote}) < 2:
                apart += 1
                continue
            trust += Trust(shared=((step, layer, ranks),), shared_files=1)
            for _, index, column in sorted(wrote)[:-1]:
                found[index, (row, column)] = SaveEnd.OVERWRITTEN_BY_RANK
    return found, trust + Trust(files_apart=apart)


def _by_prompt(one: WorkerCalls, saved: Set[At]) -> tuple[set[At], Trust]:
    """Files that a later step writes anew for a prompt with other tokens: the first one's KV is gone.

    Only where the file is all that both calls wrote, and holds as many bytes for a slot both times:
    one that grows keeps what was in it. A file of far fewer bytes than the KV is no file of it, but an index.
    What is at rest at the end stands in another file.
    """
    found, trust, table, stores = set[At](), Trust(), one.watched.table, one.stores
    common = _common(table)
    held: dict[tuple[int, int], tuple[int, float]] = {}  # (layer, file) -> (row, bytes of a slot)
    for row, step in enumerate(stores.steps.tolist()):
        slots = int(stores.slots[row])
        for column, cell in table.steps.get(step, {}).items():
            target = _only_file(cell)
            if column == WHOLE or not slots or not target or target in common:
                continue
            size = cell.bytes / slots
            before = held.get((column, target))
            held[column, target] = (row, size)
            if before is None or not cell.replaced or size < _least(one, column):
                continue
            old, new, first = stores.alone[before[0]], stores.alone[row], (before[0], column)
            alike = abs(size - before[1]) <= max(size, before[1]) / 4
            if not (old and new and alike and _apart(old, new)):
                continue
            if first in saved - found and not _at_end(one, first):
                found.add(first)
                where = (old.id, new.id, step, one.watched.worker.kv_layers[column])
                trust += Trust(overwritten=(where,), overwritten_calls=1)
    return found, trust


def _least(one: WorkerCalls, column: int) -> float:
    """Bytes of a slot of a layer in a file that holds its KV, however narrow its numbers are."""
    worker = one.watched.worker
    return max(LEAST_BYTES, worker.facts.slot_bytes.get(worker.kv_layers[column], 0.0) / _NARROWEST)


def _at_end(one: WorkerCalls, at: At) -> bool:
    """Whether as many bytes as a call read are there at the end."""
    row, column = at
    step = int(one.stores.steps[row])
    touches = [
        touch
        for request in {*one.stores.named[row], *one.stores.unnamed[row]}
        for touch in in_layer(one.watched.slots.reads.get(request, ()), column)
        if touch.step == step
    ]
    return bool(touches) and all(touch.account == Account.WRITTEN for touch in touches)


def _only_file(cell: Cell) -> int:
    """The file of a call that wrote one, else 0."""
    return next(iter(cell.targets)) if cell.files == 1 and len(cell.targets) == 1 else 0


def _apart(one: Request, other: Request) -> bool:
    """Whether two prompts differ in their first block already: known where both have digests of it."""
    firsts = [min(prompt.prefixes.values(), default=0) for prompt in (one, other)]
    return firsts[0] == firsts[1] > 0 and not one.prefixes.keys() & other.prefixes.keys()


def _common(table: MeasuredCells) -> set[int]:
    """Files that one rank writes for several layers (an index, a container): no layer's own."""
    layers: dict[int, set[int]] = defaultdict(set)
    for cells in table.steps.values():
        for column, cell in cells.items():
            for target in cell.targets:
                layers[target].add(column)
    return {target for target, columns in layers.items() if len(columns) > 1}
