"""Verbs that are of one run: they refuse a merged directory, and name the runs in it."""

from __future__ import annotations

from pathlib import Path

from kvtrace.errors import KvtraceError
from kvtrace.merge.where import merged_directory
from kvtrace.words import listed


def one_run(path: str | Path, verb: str) -> None:
    """Refuses a merged directory, for a verb that is of one run.

    Raises:
        KvtraceError: `path` is a merged directory; it names the runs that the verb takes.
    """
    folder = merged_directory(path)
    if folder is None:
        return
    from kvtrace.merge.place import load  # brings the analysis, and most paths are of one run

    runs = listed((run.path for run in load(folder).runs), 4)
    raise KvtraceError(f"merged runs, and {verb} is of one run", folder, f"give it each of them: {runs}")
