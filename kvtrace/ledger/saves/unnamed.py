"""Stores that no metadata names, from the slots that were read: whose they were follows from the block
tables.

Of steps that were not watched nothing is filled in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvtrace.ledger.intervals import Interval, subtract, union
from kvtrace.ledger.requests import Request, StoreEntry
from kvtrace.ledger.run import Engine
from kvtrace.ledger.saves.stores import positions
from kvtrace.ledger.saves.watched import Watched, settled_steps
from kvtrace.ledger.steps import Array, Steps, of_engine

Entries = dict[int, tuple[StoreEntry, ...]]


@dataclass(frozen=True)
class Unnamed:
    """What was read of one engine's requests, or of all engines', and stands in no metadata."""

    entries: Mapping[int, tuple[StoreEntry, ...]] = field(default_factory=dict)  # by the request's row
    unknown: frozenset[int] = frozenset()
    """Steps of which it is not known what they stored: whose metadata could not be read, or says nothing, but
    for the watched ones."""
    watched: frozenset[int] = frozenset()
    """Steps whose metadata says nothing readable, and of which the reads say everything."""
    decode_stored: Mapping[int, bool] = field(default_factory=dict)
    """Engine -> whether stores of decode tokens were seen; without those of which no decode step was
    watched."""


def unnamed(
    requests: Mapping[int, Request], engine: Engine, workers: Sequence[Watched], unreadable: Steps
) -> Unnamed:
    """What was read of one engine's requests and stands in no metadata.

    Args:
        requests: those of the engine, by row.
        unreadable: steps whose metadata could not be read.
    """
    entries: Entries = {}
    for row, request in requests.items():
        found = _entries(row, request, workers)
        if found:
            entries[row] = found
    computing = np.array(sorted({c.step for r in requests.values() for c in r.chunks}), dtype=np.int64)
    unread = of_engine(unreadable.sorted, engine.tag)
    decides = _worker_decides(entries, unreadable)
    doubtful = np.union1d(unread, computing) if decides else unread
    settled = settled_steps(workers, doubtful).sorted
    if any(one.table.later for one in workers):
        settled = settled[:0]  # what a step names may be read in any later one
    told = bool(entries) and not decides and not len(np.setdiff1d(unread, computing))
    return Unnamed(
        entries=entries,
        unknown=frozenset(np.setdiff1d(doubtful, settled).tolist()),
        watched=frozenset(np.intersect1d(unread, settled).tolist()),
        decode_stored=_decode(requests, engine, workers, entries, computing, told),
    )


def _worker_decides(entries: Entries, unreadable: Steps) -> bool:
    """Whether something was read that the readable metadata of its step does not name: then a step's metadata
    says nothing of what it stores."""
    return any(entry.step not in unreadable for found in entries.values() for entry in found)


def _entries(row: int, request: Request, workers: Sequence[Watched]) -> tuple[StoreEntry, ...]:
    """What was read of a request beyond what its metadata names, step by step."""
    named = union(positions(request, entry) for entry in request.entries)
    local = [(0, one.local) for one in request.lookups if one.answer is not None][:1]
    by_step: dict[int, list[Interval]] = defaultdict(list)
    for one in workers:
        for touch in one.slots.reads.get(row, ()):
            by_step[touch.step] += touch.positions
    found = []
    for step, parts in sorted(by_step.items()):
        reach = max([0, *(chunk.end for chunk in request.chunks if chunk.step <= step)])
        # What the connector itself is to bring is read on its way in, or to look whether it came.
        beyond = subtract(union(parts), union([*named, *request.external]))
        if not subtract(beyond, local):
            continue  # another request's, whose blocks the prefix cache gave to this one
        if named and request.gave_back(step):
            continue  # another request's, to which the prefix cache gave blocks of this one
        for start, end in beyond:
            found.append(StoreEntry(step, end - start, -1, start, max(reach, end), False, implied=True))
    return tuple(found)


def _decode(
    requests: Mapping[int, Request],
    engine: Engine,
    workers: Sequence[Watched],
    entries: Entries,
    computing: Array,
    told: bool,
) -> dict[int, bool]:
    """Whether decode tokens were seen to be read, where any decode step was watched, or none needs to be.

    Args:
        told: metadata that can't be read says what is stored, and no decode step has such.
    """
    steps = np.unique(np.concatenate([np.empty(0, np.int64), *(one.ran.steps for one in workers)]))
    decode = np.setdiff1d(of_engine(steps, engine.tag), computing)
    settled = len(settled_steps(workers, decode).sorted) > 0
    if not settled and not told:
        return {}
    stored = any(
        entry.start + entry.slots > requests[row].at_step(entry.step)[0]
        for row, found in entries.items()
        for entry in found
    )
    return {engine.tag: stored}
