"""Declared against measured: what watched save calls read, held against the metadata.

A call that was seen to read what its metadata names agrees; one that read less, or nothing, ends
there; one that was not watched is taken as declared. From the silence of a
connector of which no call was ever seen to read anything something is concluded only where every
watched call says that nothing can have happened out of sight (threads of its own, native code).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

from kvtrace.ledger.model import Engine, Swallowed, Trust
from kvtrace.ledger.saves.calls import WorkerCalls
from kvtrace.ledger.saves.files import overwritten_files, shared_files
from kvtrace.ledger.saves.pipeline import Ends
from kvtrace.ledger.saves.positioned import PositionCalls
from kvtrace.ledger.saves.stores import Stores
from kvtrace.ledger.saves.watched import Watched
from kvtrace.ledger.saves.windows import windows_of
from kvtrace.ledger.steps import Array, Mask


@dataclass(frozen=True)
class Checked:
    """One engine's store calls, held against what was measured. One array a worker, in order; as in
    :class:`WorkerCalls`."""

    ends: tuple[Ends, ...]
    kept: tuple[Array, ...]
    grades: tuple[Ends, ...]
    implied: tuple[Ends, ...]
    void: tuple[Mask, ...]
    misread: tuple[Mapping[tuple[int, int], Mask], ...]
    trust: Trust


def check(
    engine: Engine,
    stores: Stores,
    declared: Sequence[Ends],
    workers: Sequence[Watched],
    swallowed: Sequence[Swallowed],
) -> Checked:
    """Correct the ends of an engine's store calls by what was measured.

    Args:
        declared: as :func:`kvtrace.ledger.saves.pipeline.ends` gives them, one array a worker.
        workers: in the engine's order.
        swallowed: exceptions that connectors handled themselves.
    """
    calls = [
        PositionCalls(one, stores, ends, engine.block_size, windows_of(engine, one.worker))
        if one.by_position
        else WorkerCalls(one.worker, one.table, stores, ends)
        for one, ends in zip(workers, declared, strict=True)
    ]
    tables = [one.table for one in calls]
    # What a connector copies in other hooks need not be copied in those for saving.
    seen = any(table.most > 0 for table in tables) and not any(table.elsewhere for table in tables)
    silent = not stores.asynchronous and bool(tables) and all(table.silent for table in tables)
    trust = reduce(add, (one.judge(seen or silent, swallowed) for one in calls), Trust())
    always_shared = False
    if _replicated(engine):
        _forgive(calls)
    else:
        files, always_shared = shared_files(calls)
        trust += files + overwritten_files(calls)
    for one in calls:
        # Calls that were not watched share their files too, and nobody knows who won.
        if always_shared or (one.lost and not one.agreed):
            trust += one.doubt()
    return Checked(
        ends=tuple(one.ends for one in calls),
        kept=tuple(one.kept for one in calls),
        grades=tuple(one.grades for one in calls),
        implied=tuple(one.implied for one in calls),
        void=tuple(one.void for one in calls),
        misread=tuple(one.misread for one in calls),
        trust=trust,
    )


def _replicated(engine: Engine) -> bool:
    """Whether every rank holds the same KV (MLA): one of them saves for all."""
    groups = engine.token_groups
    return bool(groups) and all("MLA" in group.kind for group in groups)


def _forgive(calls: Sequence[WorkerCalls]) -> None:
    """KV that every rank holds alike is saved where one rank saved it."""
    stored = {(row, one.worker.kv_layers[column]) for one in calls for row, column in one.agreed}
    for one in calls:
        for row, column in sorted(one.lost):
            if (row, one.worker.kv_layers[column]) in stored:
                one.forgive((row, column))
