"""Which run directory a path means."""

from __future__ import annotations

from pathlib import Path

from kvtrace.errors import KvtraceError
from kvtrace.trace.reader import spool_paths


def traced_directory(path: str | Path) -> Path | None:
    """The run directory with spools that `path` is, or lies in as its report.json; None for neither."""
    path = Path(path)
    try:
        folder = path if path.is_dir() else path.parent if path.is_file() else None
        return folder if folder is not None and spool_paths(folder) else None
    except (OSError, ValueError):
        return None


def run_directory(path: str | Path) -> Path:
    """Like :func:`traced_directory`.

    Raises:
        KvtraceError: nothing there, or no spools with it.
    """
    found = traced_directory(path)
    if found is not None:
        return found
    path = Path(path)
    try:
        exists, is_dir = path.exists(), path.is_dir()
    except (OSError, ValueError):
        exists = is_dir = False
    if not exists:
        raise KvtraceError("no such file or directory", ascii(str(path))[1:-1], "give a run directory")
    if is_dir:
        raise KvtraceError("no spools in this directory", path, "give a run directory of kvtrace run")
    raise KvtraceError("a report without its run", path, "give the run directory that it came from")
