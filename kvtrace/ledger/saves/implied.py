"""Stores that no metadata names: connectors that decide on the worker what to save.

What was measured in a step whose metadata names no store becomes store entries, where the slots
can be given to the step's chunks without doubt.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvtrace.ledger.model import Engine
from kvtrace.ledger.requests import Chunk, Request, StoreEntry
from kvtrace.ledger.saves.measured import WHOLE, Measured
from kvtrace.ledger.steps import Steps
from kvtrace.trace.format import STEP_SHIFT

Chunks = Sequence[tuple[int, Chunk]]
"""The chunks of one step, each with its request's row."""


@dataclass(frozen=True)
class Implied:
    """What follows from the measurements of one engine's steps, or of all engines'."""

    entries: Mapping[int, tuple[StoreEntry, ...]] = field(default_factory=dict)  # by the request's row
    unknown: frozenset[int] = frozenset()
    """Steps of which it is not known what they stored: those whose metadata could not be read, but for the
    watched ones; and of engines that never declare those with chunks of which nothing was measured, or
    nothing that can be given to a request."""
    watched: frozenset[int] = frozenset()
    """Steps whose metadata says nothing readable, and of which the measurement says everything."""
    decode_stored: Mapping[int, bool] = field(default_factory=dict)
    """Engine -> whether stores of decode tokens were seen; without those of which no decode step was
    measured."""


def imply(
    requests: Sequence[Request],
    engines: Sequence[Engine],
    measured: Mapping[tuple[int, str], Measured],
    unreadable: Steps,
) -> Implied:
    """What the measurements say of steps whose metadata names no store.

    Args:
        measured: by Worker.key.
        unreadable: steps whose metadata could not be read.
    """
    chunks: dict[int, list[tuple[int, Chunk]]] = defaultdict(list)
    for row, request in enumerate(requests):
        for chunk in request.chunks:
            chunks[chunk.step].append((row, chunk))
    named = {entry.step for request in requests for entry in request.entries}
    declaring = {step >> STEP_SHIFT for step in named}
    parts = []
    for engine in engines:
        tables = [measured[worker.key] for worker in engine.workers]
        steps = _Steps(requests, engine, tables, chunks, named, unreadable)
        if steps.speaks or steps.silent:
            parts.append(steps.implied(declares=engine.tag in declaring))
    entries: dict[int, tuple[StoreEntry, ...]] = {}
    for part in parts:
        for at, more in part.entries.items():
            entries[at] = (*entries.get(at, ()), *more)
    watched: frozenset[int] = frozenset().union(*(part.watched for part in parts))
    return Implied(
        entries=entries,
        unknown=(frozenset(unreadable.sorted.tolist()) - watched).union(*(part.unknown for part in parts)),
        watched=watched,
        decode_stored={tag: stored for part in parts for tag, stored in part.decode_stored.items()},
    )


class _Steps:
    """One engine's measured steps, against its chunks."""

    def __init__(
        self,
        requests: Sequence[Request],
        engine: Engine,
        tables: Sequence[Measured],
        chunks: Mapping[int, Chunks],
        named: set[int],
        unreadable: Steps,
    ) -> None:
        self._requests, self._engine, self._tables = requests, engine, tables
        self._chunks, self._named, self._unreadable = chunks, named, unreadable
        self._most = {step: _most(tables, step) for table in tables for step in table.steps}

    @property
    def speaks(self) -> bool:
        """Whether anything was read in a step whose metadata names no store."""
        return any(slots > 0 and step not in self._named for step, slots in self._most.items())

    @property
    def silent(self) -> bool:
        return bool(self._tables) and all(table.silent for table in self._tables)

    def implied(self, declares: bool) -> Implied:
        """``declares``: the metadata of some step of this engine names a store."""
        entries: dict[int, list[StoreEntry]] = defaultdict(list)
        unknown: set[int] = set()
        watched: set[int] = set()
        partly: set[int] = set()
        for step in sorted(self._chunks):
            if step >> STEP_SHIFT != self._engine.tag or step in self._named:
                continue
            chunks, shares = self._chunks[step], self._shares(step)
            if shares is None:
                unknown.add(step)
                continue
            if step in self._unreadable and not any(_unsure(table, step) for table in self._tables):
                watched.add(step)
                if any(0 < n < chunk.end - chunk.start for (_, chunk), n in zip(chunks, shares, strict=True)):
                    partly.add(step)
            for (row, chunk), slots in zip(chunks, shares, strict=True):
                if slots > 0:
                    entry = StoreEntry(step, slots, -1, chunk.start, chunk.end, False, implied=True)
                    entries[row].append(entry)
        later = any(table.later for table in self._tables)
        decode = [n for step, n in self._most.items() if step not in self._chunks and step not in self._named]
        return Implied(
            entries={row: tuple(found) for row, found in entries.items()},
            # It never declares: a step without a measurement says nothing either way.
            unknown=frozenset(unknown if self.speaks and not declares else ()),
            # The unit tells tails that were left out, and for that all steps must be known.
            watched=frozenset(() if later else watched - partly if unknown else watched),
            decode_stored={self._engine.tag: any(n > 0 for n in decode)} if decode else {},
        )

    def _shares(self, step: int) -> list[int] | None:
        """How many slots of each chunk of a step were read, None where that is not known."""
        slots, chunks = self._most.get(step, -1), self._chunks[step]
        sizes = [chunk.end - chunk.start for _, chunk in chunks]
        if slots < 0:
            return None
        if slots == 0:
            return [0] * len(chunks)
        if slots >= sum(sizes):
            return sizes
        if len(chunks) == 1:
            return [slots]
        block = self._engine.block_size
        for kept_back in (0, 1) if block > 0 else ():
            floors = []
            for row, chunk in chunks:
                prompt, _ = self._requests[row].stood(step)
                whole = max(0, prompt - kept_back) // block * block
                floors.append(max(0, min(whole, chunk.end // block * block) - chunk.start))
            if sum(floors) == slots:
                return floors
        return None


def _unsure(table: Measured, step: int) -> bool:
    """Whether a worker's part in a step was not watched in full."""
    cells = table.steps.get(step)
    return not cells or any(cell.unsure for cell in cells.values())


def _most(tables: Sequence[Measured], step: int) -> int:
    """The most slots of one layer that any worker was seen to read in a step, -1 unknown."""
    return max(
        (cell.slots for table in tables for column, cell in table.steps.get(step, {}).items()
         if column != WHOLE),
        default=-1,
    )  # fmt: skip
