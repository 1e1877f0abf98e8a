"""The requests of one run as far as joining needs them: their ids, those they brought, those they were given.

Read from the scheduler's records and facts alone, chunk by chunk; nothing else of a spool is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvtrace.ledger.run import RunError
from kvtrace.trace import facts, rows
from kvtrace.trace.format import STEP_MASK, STEP_SHIFT
from kvtrace.trace.reader import Spool, SpoolError, of_type, without_copies
from kvtrace.trace.rows import KIND_OF, kind

_KINDS = (rows.Arrival, rows.Chunk, rows.Finish)
_STEPS: tuple[type[Any], ...] = (rows.Step, rows.Execution)
Array = NDArray[np.int64]


@dataclass
class EngineRequest:
    """One request of one engine. ``t``: its arrival, ``returned_t``: when the connector returned ids (0:
    never), on the clock of the spool. ``engine``: index among all engines, set by who joins."""

    run: int
    spool: str
    tag: int
    id: str
    number: int
    t: int
    prompt: int = 0
    client: str = ""
    brought: dict[str, str] = field(default_factory=dict)
    returned: dict[str, str] = field(default_factory=dict)
    returned_t: int = 0
    asks: tuple[str, ...] = ()
    engine: int = -1


@dataclass
class RunIds:
    """``headers``: spool's name -> its header. ``notes``: what could not be read."""

    headers: dict[str, facts.Header] = field(default_factory=dict)
    requests: list[EngineRequest] = field(default_factory=list)
    engines: dict[int, tuple[str, facts.EngineFact]] = field(default_factory=dict)  # tag -> spool, its facts
    scheduled: dict[tuple[int, str], Array] = field(default_factory=dict)
    """(tag, spool) -> step and the time at which it had been scheduled, shape (n, 2), by step."""
    ran: dict[tuple[int, str], Array] = field(default_factory=dict)
    """(tag, spool) -> step and the time at which a worker began it."""
    notes: list[str] = field(default_factory=list)


def read_ids(run: int, folder: Path) -> RunIds:
    """The requests of the run in `folder`, the `run`-th of those that are merged.

    Raises:
        RunError: no spool of it can be read.
    """
    found, clients = RunIds(), {}
    paths, copies = without_copies(folder)
    found.notes += copies
    for path in paths:
        try:
            spool = _Reader(run, path)
        except SpoolError as error:
            found.notes.append(f"spool left out: {error}")
            continue
        found.headers[path.name] = spool.header
        found.engines.update(spool.engines)
        found.requests += spool.requests
        found.scheduled.update({(tag, path.name): one for tag, one in spool.scheduled.items()})
        found.ran.update({(tag, path.name): one for tag, one in spool.ran.items()})
        clients.update(spool.clients)
    if not found.headers:
        first = found.notes[0] if found.notes else f"{folder}: no spool in it"
        raise RunError(first.removeprefix("spool left out: "))
    for one in found.requests:
        one.client = clients.get(one.id, "")
    return found


def _by_tag(table: Array) -> dict[int, Array]:
    """Step and time, by the engine's tag; a step that stands there twice once."""
    table = table[(table[:, 0] > 0) & ((table[:, 0] & STEP_MASK) > 0)]
    _, first = np.unique(table[:, 0], return_index=True)
    table = table[first]
    tags = table[:, 0] >> STEP_SHIFT
    return {tag: table[tags == tag] for tag in np.unique(tags).tolist()}


class _Reader:
    """One spool."""

    def __init__(self, run: int, path: Path) -> None:
        spool = Spool(path)
        wanted = [KIND_OF[row] for row in _KINDS]
        kept = [np.empty((0, 8), dtype=np.int64)]
        steps: dict[type[Any], list[Array]] = {row: [np.empty((0, 2), dtype=np.int64)] for row in _STEPS}
        for chunk in spool.chunks():
            kinds = kind(chunk[:, 0])
            kept.append(chunk[np.isin(kinds, wanted)])
            for row, times in steps.items():
                of_row = row._make(chunk[kinds == KIND_OF[row]].T)
                times.append(np.stack([of_row.step, of_row.t1 if row is rows.Step else of_row.t0], axis=1))
        self.scheduled = _by_tag(np.concatenate(steps[rows.Step]))
        self.ran = _by_tag(np.concatenate(steps[rows.Execution]))
        self.header = facts.Header.from_json(spool.header)
        documents = spool.documents()
        self.engines: dict[int, tuple[str, facts.EngineFact]] = {}
        for _, fact in of_type(facts.EngineFact, documents):
            if fact.tag:
                before = self.engines.get(fact.tag)
                self.engines[fact.tag] = (path.name, before[1].updated(fact) if before else fact)
        self.clients = {one.engine: one.client for _, one in of_type(facts.ClientIdFact, documents)}
        self.requests: list[EngineRequest] = []
        self._open: dict[str, EngineRequest] = {}
        self._uses: dict[str, int] = {}
        self._ended: set[str] = set()
        self._run, self._name = run, path.name
        self._read(np.concatenate(kept), spool.names)
        self._hand_over(of_type(facts.HandOverFact, documents))

    def _read(self, table: np.ndarray[tuple[int, ...], np.dtype[np.int64]], names: Mapping[int, str]) -> None:
        for words in table.tolist():
            row = rows.decode(words)
            assert isinstance(row, _KINDS)
            ident = names.get(row.request, "")
            if not ident:
                continue
            if isinstance(row, rows.Arrival):
                if ident in self._ended or ident not in self._open:
                    self._begin(ident, row.t, row.prompt)
                continue
            if row.step & STEP_MASK and ident not in self._open:
                self._begin(ident, row.t, getattr(row, "prompt", 0))
            one = self._open.get(ident)
            if one is not None and row.step & STEP_MASK:
                one.tag = one.tag or row.step >> STEP_SHIFT
            if isinstance(row, rows.Finish):
                self._ended.add(ident)
        tags = list(self.engines)
        for one in self.requests:
            if not one.tag and len(tags) == 1:
                one.tag = tags[0]

    def _begin(self, ident: str, t: int, prompt: int) -> None:
        number = self._uses.get(ident, 0)
        self._uses[ident] = number + 1
        self._ended.discard(ident)
        self._open[ident] = EngineRequest(self._run, self._name, 0, ident, number, t, max(0, prompt))
        self.requests.append(self._open[ident])

    def _hand_over(self, documents: Sequence[tuple[int, facts.HandOverFact]]) -> None:
        """Each to the latest request of its id that had arrived by then."""
        by_id: dict[str, list[EngineRequest]] = {}
        for one in self.requests:
            by_id.setdefault(one.id, []).append(one)
        for t, fact in documents:
            fitting = [one for one in by_id.get(fact.request, ()) if one.t <= t]
            if not fitting:
                continue
            one = fitting[-1]
            if fact.returned:
                one.returned, one.returned_t = dict(fact.ids), t
            else:
                one.brought, one.asks = dict(fact.ids), fact.asks
