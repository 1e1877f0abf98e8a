"""The requests of a run as they lived: from the records that name them, with times on one clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvtrace.export.run import Opened, SpoolProcess
from kvtrace.export.selection import REQUEST_WORDS
from kvtrace.export.trace_file import Value
from kvtrace.trace import rows
from kvtrace.trace.format import STEP_MASK, Flag, Kind

Given: TypeAlias = "dict[str, Value | None]"
_KINDS = (
    Kind.REQUEST, Kind.LOOKUP, Kind.ALLOC, Kind.CHUNK, Kind.META, Kind.PREEMPT, Kind.OPEN, Kind.DONE,
    Kind.FINISH, Kind.GROWN,
)  # fmt: skip
_OF_ONE_INSIDE = (Kind.LOOKUP, Kind.ALLOC, Kind.META, Kind.OPEN, Kind.DONE)
_TIME = 1  # the word with the time, or the begin, of all of them


class NumberedEntry(NamedTuple):
    """What the metadata said of a request. ``number``: among all of the run, from 0; ``t``: wall time."""

    number: int
    t: int
    row: rows.MetadataEntry


@dataclass
class Life:
    """One request in one engine. Times are wall times, ns.

    Attributes:
        number: which request of that id it is, from 0.
        spans: (begin, end, name, values) within it.
        moments: (time, name, values).
        entries: what the metadata said of it.
    """

    id: str
    client: str
    number: int
    process: SpoolProcess
    began: int
    ended: int
    verdict: str = ""
    finished: bool = False
    numbers: Given = field(default_factory=dict)
    spans: list[tuple[int, int, str, Given]] = field(default_factory=list)
    moments: list[tuple[int, str, Given]] = field(default_factory=list)
    entries: list[NumberedEntry] = field(default_factory=list)


@dataclass(frozen=True)
class _Record:
    t: int
    row: Any
    names: Mapping[int, str]
    shift: int


def lives(run: Opened) -> list[Life]:
    """All requests that are wanted, in the order in which they came."""
    windows: dict[int, tuple[int, int]] = {}
    found: list[Life] = []
    latest: dict[str, list[Life]] = {}
    verdicts = {row["id"]: row["verdict"] for row in run.requests}
    told: list[tuple[str, _Record]] = []
    for process in run.processes:
        told += _records(run, process, windows)
    told.sort(key=lambda one: (one[1].t, _KINDS.index(rows.KIND_OF[type(one[1].row)])))
    owners = _owners(run)
    entries = 0
    for ident, record in told:
        mine = latest.setdefault(ident, [])
        if isinstance(record.row, rows.Arrival) or not mine:
            if ident not in owners:
                continue
            began = record.t
            life = Life(ident, run.clients.get(ident, ""), len(mine), owners[ident], began, began)
            life.verdict = verdicts.get(ident, "")
            mine.append(life)
            found.append(life)
        if isinstance(record.row, rows.MetadataEntry):
            mine[-1].entries.append(NumberedEntry(entries, record.t, record.row))
            entries += 1
        _live(mine[-1], record, windows)
    return found


def _owners(run: Opened) -> dict[str, SpoolProcess]:
    """Of each request the process of its scheduler."""
    by_pid = {process.pid: process for process in run.processes}
    engines = {engine.tag: by_pid.get(engine.pid) for engine in run.run.engines}
    return {one.id: process for one in run.run.requests if (process := engines.get(one.engine)) is not None}


def _records(
    run: Opened, process: SpoolProcess, windows: dict[int, tuple[int, int]]
) -> Iterator[tuple[str, _Record]]:
    """(request, record) of a process; `windows` gets the begin and end of each step that a worker ran."""
    for chunk, names in run.chunks(process):
        kinds = rows.kind(chunk[:, 0])
        ran = rows.columns(rows.Execution, chunk[kinds == Kind.EXEC])
        for step, t0, t1 in zip(ran.step.tolist(), ran.t0.tolist(), ran.t1.tolist(), strict=True):
            windows.setdefault(step, (t0 + process.shift_ns, max(t0, t1) + process.shift_ns))
        told = chunk[np.isin(kinds, _KINDS)]
        inside = np.isin(rows.kind(told[:, 0]), _OF_ONE_INSIDE) & (rows.detail(told[:, 0]) != 0)
        for words in told[~inside].tolist():
            ident = names.get(words[REQUEST_WORDS[Kind(rows.kind(words[0]))]], "")
            if ident:
                shift = process.shift_ns
                yield ident, _Record(words[_TIME] + shift, rows.decode(words), names, shift)


def _live(life: Life, record: _Record, windows: Mapping[int, tuple[int, int]]) -> None:
    row = record.row
    life.ended = max(life.ended, record.t)
    step = getattr(row, "step", 0)
    given: Given = {"step": step & STEP_MASK or None}
    life.numbers |= {name: getattr(row, name) for name in _NUMBERS.get(type(row), ())}
    if isinstance(row, rows.Chunk):
        title = f"prefill {row.start} to {row.start + row.tokens}"
        begin, end = windows.get(step, (record.t, record.t))
        life.ended = max(life.ended, end)
        life.spans.append((begin, end, title, {**given, "tokens": row.tokens}))
    elif type(row) in _MOMENTS:
        title, names = _MOMENTS[type(row)]
        life.moments.append((record.t, title, {**given, **{name: getattr(row, name) for name in names}}))
    elif type(row) in _TELL:
        _TELL[type(row)](life, record, given)


def _lookup(life: Life, record: _Record, given: Given) -> None:
    row = record.row
    end = max(record.t, row.t1 + record.shift)
    given |= {"local": row.local, "external": row.external}
    life.spans.append((record.t, end, "lookup", given))
    life.ended = max(life.ended, end)


def _transfer(life: Life, record: _Record, given: Given) -> None:
    what = "save" if rows.flags(record.row.head) & Flag.STORE else "load"
    done = isinstance(record.row, rows.TransferDone)
    if done:
        given["failed"] = bool(record.row.failed)
    life.moments.append((record.t, f"asynchronous {what} {'done' if done else 'begun'}", given))


def _finish(life: Life, record: _Record, given: Given) -> None:
    row = record.row
    life.finished = True
    life.moments.append((record.t, "finished", {**given, "status": record.names.get(row.status_name, "")}))


_MOMENTS: dict[type[Any], tuple[str, tuple[str, ...]]] = {
    rows.Growth: ("grown", ("start", "prompt")),
    rows.Allocation: ("allocation", ("external",)),
    rows.Preemption: ("preempted", ("computed",)),
}
"""What such a moment is called, and the fields of the record that it shows."""
_NUMBERS: dict[type[Any], tuple[str, ...]] = {
    rows.Arrival: ("prompt", "max_tokens"),
    rows.Finish: ("computed", "output", "preemptions"),
}
"""The fields of such a record that are the request's own."""
_TELL: dict[type[Any], Callable[[Life, _Record, Given], None]] = {
    rows.Lookup: _lookup, rows.TransferBegun: _transfer, rows.TransferDone: _transfer, rows.Finish: _finish,
}  # fmt: skip
