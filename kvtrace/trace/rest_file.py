"""``rest.json`` (``kvtrace.rest/1``): what lay at the paths that a run wrote to when it was over, as
``kvtrace run`` found it (``launch/rest.py``)."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvtrace.grouped import grouped
from kvtrace.trace.facts import Document
from kvtrace.trace.sums import read_document

REST_FILE = "rest.json"
SCHEMA = "kvtrace.rest/1"
_MAX_BYTES = 1 << 28
_ALIKE = 3
"""Parts of a path by which files are of one store (``/srv/kv``): what fewer have in common (``/``, ``/home``)
says nothing."""


@dataclass(frozen=True)
class RestingFile(Document):
    """One path, named as in OUTSIDE records. ``size`` in bytes; None where it could not be said, as for a
    path that holds a masked word."""

    path: str = ""
    exists: bool | None = None
    size: int | None = None


@dataclass(frozen=True)
class OlderFiles(Document):
    """Files in or below a directory that the run wrote to, last changed before it began."""

    directory: str = ""
    files: int = 0


@dataclass(frozen=True)
class RestFile(Document):
    """``older``: one a directory."""

    schema: str = SCHEMA
    files: tuple[RestingFile, ...] = ()
    older: tuple[OlderFiles, ...] = ()


def by_directory(paths: Iterable[str]) -> list[tuple[str, list[str]]]:
    """The directory that all paths have in common which begin alike, and these paths."""
    alike = grouped(paths, lambda path: tuple(path.split("/")[:_ALIKE]))
    return [(os.path.commonpath(list(map(os.path.dirname, those))), those) for _, those in alike]


def read_rest_file(run_dir: Path) -> tuple[RestFile, list[str]]:
    """The rest.json of a run directory and notes on it; all unknown where there is none that can be read."""
    return read_document(run_dir / REST_FILE, _MAX_BYTES, RestFile, "what came to rest is unknown")
