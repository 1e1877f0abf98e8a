"""What came to rest: once the run is over, ``kvtrace run`` asks for the names and sizes of the files that it
wrote to, and ``rest.json`` says them. Nothing may run at the end of vLLM's own processes (vLLM kills its
workers), so that it is done from outside. No file is opened."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from kvtrace.regular import write_json
from kvtrace.trace import rows
from kvtrace.trace.format import Kind, Way
from kvtrace.trace.mask import MASK
from kvtrace.trace.reader import Spool, SpoolError, spool_paths
from kvtrace.trace.rest_file import REST_FILE, OlderFiles, RestFile, RestingFile, by_directory
from kvtrace.trace.sums import summed

_MOST_FILES = 1 << 16
_MOST_BESIDE = 1 << 14


def write_rest(run_dir: Path, began_wall_ns: int = 0) -> bool:
    """Look, and write ``rest.json``. Never raises; False where nothing was written.

    Args:
        began_wall_ns: when the run began.
    """
    try:
        write_json(run_dir / REST_FILE, summed(look(run_dir, began_wall_ns).to_json()))
    except Exception:
        return False
    return True


def look(run_dir: Path, began_wall_ns: int = 0) -> RestFile:
    """What lies now at the paths that the run's OUTSIDE records name, and how many older files there."""
    names: dict[str, int] = {}
    for path in spool_paths(run_dir):
        try:
            names.update(_named(path))
        except SpoolError:
            continue
    files = tuple(_resting(name, way) for name, way in list(names.items())[:_MOST_FILES])
    older = tuple(_older(files, began_wall_ns))
    return RestFile(files=files, older=older)


def _older(files: Iterable[RestingFile], began_wall_ns: int) -> Iterator[OlderFiles]:
    """By the directory that all files have in common whose paths begin alike."""
    paths = (os.path.expanduser(one.path) for one in files if one.exists)
    known = set(filter(os.path.isabs, paths))
    for root, _ in by_directory(known):
        found = islice(_files_below(root), _MOST_BESIDE) if _is_a_store_s(root) else ()
        if number := sum(path not in known and changed < began_wall_ns for path, changed in found):
            yield OlderFiles(root, number)


def _is_a_store_s(root: str) -> bool:
    """Not a directory where anybody leaves files (``/tmp``, ``/dev/shm``), nor a user's home or above it."""
    home = os.path.expanduser("~")
    try:
        anybody_s = os.stat(root).st_mode & stat.S_ISVTX
    except OSError:  # it is gone
        return False
    return not anybody_s and os.path.commonpath([root, home]) != root


def _files_below(root: str) -> Iterator[tuple[str, int]]:
    """(path, when it was last changed) of the files in a directory and below it."""
    folders = [root]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    yield entry.path, entry.stat(follow_symlinks=False).st_mtime_ns


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
    return RestingFile(name, True, found.st_size + _log_of(path, way))


def _log_of(path: str, way: int) -> int:
    """Bytes of a database that lie in its write-ahead log: SQLite takes them over when it is closed."""
    try:
        return os.stat(f"{path}-wal").st_size if way == Way.SQLITE else 0
    except OSError:
        return 0
