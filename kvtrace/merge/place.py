"""The merged directory: made once, private, never written over; and read again."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kvtrace.errors import KvtraceError
from kvtrace.merge.build import MergedRuns
from kvtrace.merge.merged import REQUESTS_FILE, SCHEMA, Alone, Joined, Merged
from kvtrace.merge.where import MERGED_FILE
from kvtrace.regular import open_regular, read_regular, write_json

_MOST_HEAD = 1 << 24
_MOST_LINE = 1 << 16


@contextmanager
def new_directory(output: Path | None) -> Iterator[Path]:
    """A new directory, ``reports/<YYYYmmdd-HHMMSS>-merged`` without another one. Where the block raises,
    nothing is left of it.

    Raises:
        KvtraceError: it is there and not empty, or cannot be made.
    """
    place = output or Path("reports") / f"{time.strftime('%Y%m%d-%H%M%S')}-merged"
    made = not os.path.lexists(place)
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(place.iterdir()):
            told = "nothing is written over: choose another directory with -o DIR"
            raise KvtraceError("not empty", place, told)
    except OSError as error:
        raise KvtraceError("cannot write", place, error.strerror or str(error)) from None
    try:
        yield place
    except BaseException:
        for entry in place.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        if made:
            place.rmdir()
        raise


def write(answer: MergedRuns, place: Path) -> None:
    """Writes a merge into its directory.

    Raises:
        KvtraceError: it cannot be written.
    """
    base = os.path.realpath(place)
    runs = tuple(
        replace(run, path=os.path.relpath(os.path.realpath(run.path), base)) for run in answer.merged.runs
    )
    try:
        with open(place / REQUESTS_FILE, "w", encoding="ascii") as file:
            for row in answer.requests:
                file.write(json.dumps(row.to_json(), separators=(",", ":")) + "\n")
        # the head comes last: a directory without it is no merge
        write_json(place / MERGED_FILE, replace(answer.merged, runs=runs).to_json())
    except OSError as error:
        raise KvtraceError("cannot write", place, error.strerror or str(error)) from None


def load(folder: Path) -> Merged:
    """The head of a merged directory; paths of the runs as they are from here.

    Raises:
        KvtraceError: no merge that this version reads.
    """
    path = folder / MERGED_FILE
    try:
        data = read_regular(path, _MOST_HEAD)
        value = json.loads(data) if len(data) <= _MOST_HEAD else None
    except OSError as error:
        raise KvtraceError("cannot read", path, error.strerror or str(error)) from None
    except (ValueError, RecursionError):
        raise KvtraceError("damaged", path, "merge the runs again") from None
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise KvtraceError("no merge that this kvtrace reads", path, "merge the runs again")
    merged = Merged.from_json(value)
    runs = tuple(replace(run, path=os.path.normpath(folder / run.path)) for run in merged.runs)
    if any(not 0 <= one.run < len(runs) for one in merged.engines):
        raise KvtraceError("damaged", path, "merge the runs again")
    return replace(merged, runs=runs)


def requests(folder: Path, engines: int) -> Iterator[Joined | Alone]:
    """The requests of a merged directory, line by line. ``engines``: how many its head has.

    Raises:
        KvtraceError: it cannot be read.
    """
    path = folder / REQUESTS_FILE
    try:
        with open_regular(path) as file:
            while line := file.readline(_MOST_LINE):
                yield _row(json.loads(line), engines)
    except OSError as error:
        raise KvtraceError("cannot read", path, error.strerror or str(error)) from None
    except (ValueError, RecursionError):
        raise KvtraceError("damaged", path, "merge the runs again") from None


def _row(value: object, engines: int) -> Joined | Alone:
    if not isinstance(value, dict):
        raise ValueError("no object")
    row = Alone.from_json(value) if "alone" in value else Joined.from_json(value)
    least = -1 if isinstance(row, Alone) else 0
    if any(not least <= end.engine < engines for end in row.ends):
        raise ValueError("no such engine")
    return row
