"""What came to rest: once the run is over, ``kvtrace run`` asks for the names and sizes of the files that it
wrote to, and ``rest.json`` says them. Nothing may run at the end of vLLM's own processes (vLLM kills its
workers), so that it is done from outside. No file is opened."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from kvtrace.regular import write_json
from kvtrace.trace import rows
from kvtrace.trace.format import Kind, Way
from kvtrace.trace.mask import MASK
from kvtrace.trace.reader import Spool, SpoolError, spool_paths
from kvtrace.trace.rest_file import REST_FILE, RestFile, RestingFile
from kvtrace.trace.sums import summed

_MOST_FILES = 1 << 16


def write_rest(run_dir: Path) -> bool:
    """Look, and write ``rest.json``. Never raises; False where nothing was written."""
    try:
        write_json(run_dir / REST_FILE, summed(look(run_dir).to_json()))
    except Exception:
        return False
    return True


def look(run_dir: Path) -> RestFile:
    """What lies now at the paths that the run's OUTSIDE records name."""
    names: dict[str, int] = {}
    for path in spool_paths(run_dir):
        try:
            names.update(_named(path))
        except SpoolError:
            continue
    files = tuple(_resting(name, way) for name, way in list(names.items())[:_MOST_FILES])
    return RestFile(looked_wall_ns=time.time_ns(), files=files)


def _named(path: Path) -> Iterator[tuple[str, int]]:
    """Paths of files, the later names of renamed and linked ones included, and how they were written."""
    spool = Spool(path)
    tables = [chunk[rows.kind(chunk[:, 0]) == Kind.OUTSIDE] for chunk in spool.chunks()]
    for table in tables:
        for row in map(rows.Outside._make, table.tolist()):
            way = rows.code(row.head)
            for ident in (row.target, row.size) if way == Way.NAME else (row.target,):
                name = spool.names.get(ident, "")
                if name and way != Way.SOCKET:
                    yield name, way


def _resting(name: str, way: int) -> RestingFile:
    """A path that holds a masked word is not known."""
    if MASK in name:
        return RestingFile(name)
    path = os.path.expanduser(name)
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return RestingFile(name, exists=False)
    except OSError:
        return RestingFile(name)
    return RestingFile(name, True, found.st_size + _log_of(path, way), found.st_mtime_ns)


def _log_of(path: str, way: int) -> int:
    """Bytes of a database that lie in its write-ahead log: SQLite takes them over when it is closed."""
    try:
        return os.stat(f"{path}-wal").st_size if way == Way.SQLITE else 0
    except OSError:
        return 0
