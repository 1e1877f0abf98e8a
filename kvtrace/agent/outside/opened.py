"""Files that one thread opens for writing during a sampled call.

``files.py`` tells of them; a ``.part`` file counts under its final name. What else
writes past Python is seen by the thread's counter of written bytes
(``/proc/thread-self/io``): then the bytes are known and the files are not (-1).

Not seen: files written by other threads, memory-mapped stores, ``io_uring``, network.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from kvtrace.agent.outside import files as outside
from kvtrace.agent.state import AGENT, get_ident
from kvtrace.trace.writer import identity

UNKNOWN = -1
_MAX_PATHS = 4096
_NOISE_BYTES = 4096
"""Bytes that a thread may write without a file to show for it: lines of its log."""

_watches: dict[int, list[Files]] = {}


class Files:
    """What one call opened for writing. ``start`` and ``stop`` in the thread of the call."""

    def __init__(self) -> None:
        self._paths: dict[str, tuple[int, bool]] = {}
        """path -> (size before, written in place)"""
        self._before: int | None = None
        self._recorded = 0
        self._ident = 0

    def start(self) -> None:
        self._ident = get_ident()
        self._recorded = _recorded_bytes()
        self._before = _written()
        _watches.setdefault(self._ident, []).append(self)

    def stop(self) -> None:
        stack = _watches.get(self._ident, [])
        if self in stack:
            stack.remove(self)
        if not stack:
            _watches.pop(self._ident, None)
        after = _written()
        if after is None or self._before is None:
            self._before = None
        else:
            self._before = max(0, after - self._before - (_recorded_bytes() - self._recorded))

    def result(self) -> tuple[int, int, str]:
        """(bytes, files, first path); -1 where that can't be known."""
        wrote = self._before
        if not self._paths:
            if wrote is None:
                return UNKNOWN, UNKNOWN, ""
            return (wrote, UNKNOWN, "") if wrote >= _NOISE_BYTES else (0, 0, "")
        total = 0
        in_place = False
        for path, (size, partly) in self._paths.items():
            in_place = in_place or partly
            try:
                total += max(0, os.path.getsize(path) - size)
            except OSError:
                continue  # opened, and gone by now
        if in_place and wrote:
            total = min(total, wrote)
        return total, len(self._paths), next(iter(self._paths))

    def opened(self, path: Any, flags: int) -> None:
        name = os.path.abspath(os.fsdecode(path))
        if "__pycache__" in name or name.startswith(outside.NOISE):
            return
        if name in self._paths or len(self._paths) >= _MAX_PATHS:
            return
        size = outside.size_of(name)
        if flags & os.O_TRUNC:
            self._paths[name] = (0, False)
        elif flags & os.O_APPEND:
            self._paths[name] = (size, False)
        else:
            self._paths[name] = (0, size > 0)

    def renamed(self, source: Any, target: Any) -> None:
        old, new = (os.path.abspath(os.fsdecode(name)) for name in (source, target))
        if old in self._paths:
            # in its place: the first path stays the first
            self._paths = {
                new if name == old else name: (0, False) if name == old else seen
                for name, seen in self._paths.items()
            }


def _recorded_bytes() -> int:
    recorder = AGENT.recorder
    return 0 if recorder is None else recorder.written


class _Counter(threading.local):
    """The file of this thread's counters; -1: none. It is kept open: reading costs a fifth of opening."""

    def __init__(self) -> None:
        try:
            self.file = os.open("/proc/thread-self/io", os.O_RDONLY | os.O_CLOEXEC)
            self._identity = identity(self.file)
        except OSError:
            self.file = -1

    def __del__(self) -> None:
        try:
            # the process's code may have closed it, and opened something else under its number
            if self.file >= 0 and identity(self.file) == self._identity:
                os.close(self.file)
        except Exception:  # at the interpreter's end there are no functions left
            pass


_counter = _Counter()


def _written() -> int | None:
    """Bytes that this thread has handed to write() so far (Linux)."""
    try:
        text = os.pread(_counter.file, 256, 0)
        at = text.index(b"wchar:") + 6
        return int(text[at : text.index(b"\n", at)])
    except (OSError, ValueError):
        return None


def _opened(path: Any, flags: int) -> None:
    for files in _watches.get(get_ident(), ()):
        files.opened(path, flags)


def _renamed(source: Any, target: Any) -> None:
    for files in _watches.get(get_ident(), ()):
        files.renamed(source, target)


outside.OPENED.append(_opened)
outside.RENAMED.append(_renamed)
