"""``rest.json`` (``kvtrace.rest/1``): what lay at the paths that a run wrote to when it was over, as
``kvtrace run`` found it (``launch/rest.py``)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from kvtrace.trace.facts import Document

REST_FILE = "rest.json"
SCHEMA = "kvtrace.rest/1"
STILL, GONE, UNKNOWN = "1", "0", "?"
_MAX_BYTES = 1 << 28


@dataclass(frozen=True)
class RestingFile(Document):
    """One path, named as in LEFT records. ``size`` in bytes; ``zero``: nothing but zeros stand in it; None
    where it could not be said, as for a path that holds a masked word."""

    path: str = ""
    exists: bool | None = None
    size: int | None = None
    zero: bool | None = None
    mtime_ns: int | None = None


@dataclass(frozen=True)
class RestFile(Document):
    """``looked_wall_ns``: when; None where nobody looked. ``pieces``: spool's file name -> a character for
    each of its PIECE records in order: STILL, GONE (other bytes stand there, or none), UNKNOWN."""

    schema: str = SCHEMA
    looked_wall_ns: int | None = None
    files: tuple[RestingFile, ...] = ()
    pieces: dict[str, str] = field(default_factory=dict)


def read_rest_file(run_dir: Path) -> RestFile:
    """The rest.json of a run directory; all unknown where there is none that can be read."""
    path = run_dir / REST_FILE
    try:
        if path.stat().st_size > _MAX_BYTES:
            return RestFile()
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return RestFile()
    return RestFile.from_json(value) if isinstance(value, dict) else RestFile()
