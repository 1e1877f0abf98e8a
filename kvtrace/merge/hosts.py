"""One engine whose ranks are on several hosts: their runs become one run directory, of links to the spools.

The engine's steps are the anchors: a worker can't begin a step before it has been scheduled, and the quickest
of all steps began at once. So the times of a host are moved by the least that keeps this order. That is
closer than wall clocks are, and never puts an effect before its cause.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvtrace.errors import KvtraceError
from kvtrace.merge.asked import Array, RunIds
from kvtrace.regular import write_json
from kvtrace.trace.format import SPOOL_DIR
from kvtrace.trace.rest_file import REST_FILE
from kvtrace.trace.shifts import CLOCKS_FILE, SCHEMA, Shift
from kvtrace.trace.sums import read_summed, summed

RUN_FILE = "run.json"
_MOST = 1 << 28
_PIDS = 10_000_000
"""More than a kernel gives out."""


@dataclass(frozen=True)
class EngineRuns:
    """Runs that hold parts of one engine. ``runs``: indices, that of the scheduler first. ``shifts``: of
    each, what makes its times those of the first one's clock."""

    runs: tuple[int, ...]
    shifts: tuple[int, ...]


def groups(found: Sequence[RunIds]) -> list[EngineRuns]:
    """The runs that hold parts of one engine with another run."""
    made: list[EngineRuns] = []
    taken: set[int] = set()
    for first, ids in enumerate(found):
        others: dict[int, int] = {}
        for run, other in enumerate(found):
            shifts = [_least(one, two) for one, two in _shared(ids, other)] if run != first else []
            if known := [shift for shift in shifts if shift is not None]:
                others[run] = _same_clock(ids, other, max(known))
        if others and taken.isdisjoint((first, *others)):
            made.append(EngineRuns((first, *others), (0, *others.values())))
            taken |= {first, *others}
    return made


def _shared(one: RunIds, two: RunIds) -> Iterator[tuple[Array, Array]]:
    """Steps that the one's schedulers scheduled, and that the other's workers ran, by engine and spool."""
    for (tag, _), scheduled in one.scheduled.items():
        yield from ((scheduled, ran) for (of, _), ran in two.ran.items() if of == tag)


def _least(scheduled: Array, ran: Array) -> int | None:
    """The least shift that puts no step's begin before its schedule; None without a common step."""
    _, one, two = np.intersect1d(scheduled[:, 0], ran[:, 0], assume_unique=True, return_indices=True)
    return int((scheduled[one, 1] - ran[two, 1]).max()) if len(one) else None


def _same_clock(one: RunIds, two: RunIds, shift: int) -> int:
    """0 where both are of one boot: their clock is the same already."""
    boots = [{header.boot for header in ids.headers.values()} for ids in (one, two)]
    return 0 if boots[0] == boots[1] and len(boots[0]) == 1 and "" not in boots[0] else shift


def put_together(group: EngineRuns, folders: Sequence[Path], found: Sequence[RunIds], place: Path) -> Path:
    """Makes `place` a run directory of the group's spools.

    Raises:
        KvtraceError: two spools have one name; or it cannot be written.
    """
    boot = next((header.boot for header in found[group.runs[0]].headers.values()), "")
    spools: dict[str, dict[str, Any]] = {}
    pids: set[int] = set()
    try:
        (place / SPOOL_DIR).mkdir(mode=0o700, parents=True)
        base = os.path.realpath(place / SPOOL_DIR)
        for number, (run, shift) in enumerate(zip(group.runs, group.shifts, strict=True)):
            mine = {header.pid for header in found[run].headers.values()}
            moved = Shift(shift, 0 if pids.isdisjoint(mine) else number * _PIDS, boot)
            pids |= mine
            for name in found[run].headers:
                if name in spools:
                    raise KvtraceError("two spools of one name", name, "rename the one of the other host")
                spools[name] = moved.to_json()
                spool = os.path.realpath(folders[run] / SPOOL_DIR / name)
                os.symlink(os.path.relpath(spool, base), place / SPOOL_DIR / name)
        write_json(place / CLOCKS_FILE, {"schema": SCHEMA, "spools": spools})
        for name in (RUN_FILE, REST_FILE):
            documents = list(_documents(folders[run] / name for run in group.runs))
            if documents:
                write_json(place / name, _joined(documents))
    except OSError as error:
        raise KvtraceError("cannot write", place, error.strerror or str(error)) from None
    return place


def _documents(paths: Iterator[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        with suppress(OSError, ValueError, RecursionError):
            if (value := read_summed(path, _MOST)) is not None:
                yield value


def _joined(documents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first run's document, with the spools and files that the others name."""
    first = dict(documents[0])
    for other in documents[1:]:
        if isinstance(first.get("spools"), dict) and isinstance(other.get("spools"), dict):
            first["spools"] = other["spools"] | first["spools"]
        if isinstance(first.get("files"), list) and isinstance(other.get("files"), list):
            first["files"] = first["files"] + other["files"]
    return summed(first)
