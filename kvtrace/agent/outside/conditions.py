"""A store that is slow, full or read-only: made so for ``kvtrace verify --store``, and in no other run.

What opens a file below the connector's directory waits first; what changes something there fails with ENOSPC
or EROFS. Which of them, and until when, is the target of a symbolic link that verify makes: to read that
opens no file. A folder beside the link tells that it came about.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from contextlib import suppress
from typing import Any

from kvtrace.trace.config import STORE_FULL, STORE_READ_ONLY, STORE_SLOW, STORE_VARIABLE

_SECONDS = 0.25
"""That an open takes longer."""
_WRITING = os.O_WRONLY | os.O_RDWR
_ERRORS = {STORE_FULL: errno.ENOSPC, STORE_READ_ONLY: errno.EROFS}
_CHANGES = frozenset(("os.rename", "os.link", "os.remove", "os.rmdir", "os.truncate"))
"""Audit events of what a full store still takes."""
_told, _store = "", ""


def install() -> None:
    """Idempotent; an audit hook can't be taken out again."""
    global _told, _store
    told, _, store = os.environ.get(STORE_VARIABLE, "").partition(os.pathsep)
    if store and not _store:
        _told, _store = told, os.path.join(os.path.abspath(store), "")
        sys.addaudithook(_audit)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        opens(args[0], args[2] if isinstance(args[2], int) else 0)
    elif event == "os.mkdir":
        if (name := _now(args[0])) in _ERRORS and not os.path.lexists(args[0]):
            _fail(name, args[0])
    elif event in _CHANGES and (name := _now(args[0])) == STORE_READ_ONLY:
        _fail(name, args[0])


def opens(path: Any, flags: int = os.O_WRONLY) -> None:
    """A file is about to be opened. Raises OSError: the store takes nothing."""
    name = _now(path)
    if name == STORE_SLOW:
        _came_about(name)
        time.sleep(_SECONDS)
    elif name in _ERRORS and flags & _WRITING:
        _fail(name, path)


def _now(path: Any) -> str:
    """What the store is now; "" as it was, or the path lies elsewhere."""
    if not _store or not isinstance(path, (str, bytes, os.PathLike)):
        return ""
    if not os.path.abspath(os.fsdecode(path)).startswith(_store):
        return ""
    try:
        name, _, until = os.readlink(_told).partition(":")
    except OSError:
        return ""
    return name if name != STORE_SLOW or time.monotonic() < float(until) else ""


def _fail(name: str, path: Any) -> None:
    _came_about(name)
    raise OSError(_ERRORS[name], os.strerror(_ERRORS[name]), os.fsdecode(path))


def _came_about(name: str) -> None:
    with suppress(OSError):
        os.mkdir(f"{_told}-{name}", 0o700)
