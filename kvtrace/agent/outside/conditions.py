"""A store that is slow, or full: made so for ``kvtrace verify --store``, and in no other run.

What opens a file below the connector's directory waits first, or fails with ENOSPC where it would write.
Which of the two, and until when, is the target of a symbolic link that verify makes: to read that opens no
file. A folder beside the link tells that it came about.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from contextlib import suppress
from typing import Any

from kvtrace.trace.config import STORE_FULL, STORE_SLOW, STORE_VARIABLE

_SECONDS = 0.25
"""That an open takes longer."""
_WRITING = os.O_WRONLY | os.O_RDWR
_told, _store = "", ""


def install() -> None:
    """Idempotent; an audit hook can't be taken out again."""
    global _told, _store
    told, _, store = os.environ.get(STORE_VARIABLE, "").partition(os.pathsep)
    if store and not _store:
        _told, _store = told, os.path.join(os.path.abspath(store), "")
        sys.addaudithook(_audit)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and isinstance(args[0], (str, bytes, os.PathLike)):
        opens(args[0], args[2] if isinstance(args[2], int) else 0)


def opens(path: str | bytes | os.PathLike[Any], flags: int = os.O_WRONLY) -> None:
    """A file is about to be opened. Raises OSError: the store is full."""
    if not _store or not os.path.abspath(os.fsdecode(path)).startswith(_store):
        return
    try:
        name, _, until = os.readlink(_told).partition(":")
    except OSError:
        return
    if (name == STORE_SLOW and time.monotonic() < float(until)) or (name == STORE_FULL and flags & _WRITING):
        with suppress(OSError):
            os.mkdir(f"{_told}-{name}", 0o700)
        if name == STORE_FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fsdecode(path))
        time.sleep(_SECONDS)
