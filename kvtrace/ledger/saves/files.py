"""KV that was written and did not stay: files that several ranks, or several prompts, write."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from kvtrace.ledger.ends import SaveEnd
from kvtrace.ledger.model import Trust
from kvtrace.ledger.requests import Request
from kvtrace.ledger.saves.calls import LEAST_BYTES, WorkerCalls
from kvtrace.ledger.saves.measured import WHOLE, Cell, Measured


def shared_files(calls: Sequence[WorkerCalls]) -> tuple[Trust, bool]:
    """Ranks that write one file for the same layer in the same step: the last one's KV stays.

    Returns what was found, and whether every step with files of several ranks showed it.
    """
    trust = Trust()
    shared, apart = False, 0
    common = [_common(one.table) for one in calls]
    for row, step in enumerate(calls[0].stores.steps.tolist() if calls else ()):
        for (_, layer), writers in _writers(calls, common, row, step).items():
            workers = {worker for _, worker, _ in writers}
            if len(workers) < 2:
                apart += 1
                continue
            shared = True
            ranks = tuple(sorted({calls[worker].worker.rank for worker in workers}))
            trust += Trust(shared=((step, layer, ranks),), shared_files=1)
            for _, worker, column in sorted(writers)[:-1]:
                calls[worker].lose((row, column), SaveEnd.OVERWRITTEN_BY_RANK)
    return trust + Trust(files_apart=apart), shared and not apart


def _writers(
    calls: Sequence[WorkerCalls], common: Sequence[set[int]], row: int, step: int
) -> dict[tuple[int, str], list[tuple[int, int, int]]]:
    """(file, layer) -> (time, worker, column) of those that wrote it in a step."""
    writers: dict[tuple[int, str], list[tuple[int, int, int]]] = defaultdict(list)
    for index, one in enumerate(calls):
        for column, cell in one.table.steps.get(step, {}).items():
            if column == WHOLE or not one.stands((row, column)):
                continue
            for target, t in cell.targets.items():
                if target not in common[index]:
                    writers[(target, one.worker.kv_layers[column])].append((t, index, column))
    return writers


def overwritten_files(calls: Sequence[WorkerCalls]) -> Trust:
    """Files that a later step writes anew for a prompt with other tokens: the first one's KV is gone.

    Only where the file is all that both calls wrote, and holds as many bytes for a slot both times:
    one that grows keeps what was in it. What is at rest at the end stands in another file.
    """
    trust = Trust()
    for one in calls:
        common = _common(one.table)
        held: dict[tuple[int, int], tuple[int, float]] = {}  # (layer, file) -> (row, bytes of a slot)
        for row, step in enumerate(one.stores.steps.tolist()):
            slots = int(one.stores.slots[row])
            for column, cell in one.table.steps.get(step, {}).items():
                target = _only_file(cell)
                if column == WHOLE or not slots or not target or target in common:
                    continue
                size = cell.bytes / slots
                before = held.get((column, target))
                held[column, target] = (row, size)
                if before is None or not cell.replaced or size < LEAST_BYTES:
                    continue
                old, new = one.stores.alone[before[0]], one.stores.alone[row]
                alike = abs(size - before[1]) <= max(size, before[1]) / 4
                first = before[0], column
                if (
                    old
                    and new
                    and alike
                    and _apart(old, new)
                    and one.stands(first)
                    and not one.at_rest(first)
                ):
                    one.lose(first, SaveEnd.OVERWRITTEN)
                    where = (old.id, new.id, step, one.worker.kv_layers[column])
                    trust += Trust(overwritten=(where,), overwritten_calls=1)
    return trust


def _only_file(cell: Cell) -> int:
    """The file of a call that wrote one, else 0."""
    return next(iter(cell.targets)) if cell.files == 1 and len(cell.targets) == 1 else 0


def _apart(one: Request, other: Request) -> bool:
    """Whether two prompts differ in their first block already: known where both have digests of it."""
    firsts = [min(prompt.prefixes.values(), default=0) for prompt in (one, other)]
    return firsts[0] == firsts[1] > 0 and not one.prefixes.keys() & other.prefixes.keys()


def _common(table: Measured) -> set[int]:
    """Files that one rank writes for several layers (an index, a container): no layer's own."""
    layers: dict[int, set[int]] = defaultdict(set)
    for cells in table.steps.values():
        for column, cell in cells.items():
            for target in cell.targets:
                layers[target].add(column)
    return {target for target, columns in layers.items() if len(columns) > 1}
