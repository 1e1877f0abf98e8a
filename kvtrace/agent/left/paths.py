"""Files that a connector opens for writing, in whatever thread and call.

Python's ``open``, ``os.open``, ``os.rename``, ``os.remove`` and ``sqlite3.connect`` raise audit events;
native writers that are known (``agent/files.py``) and shared memory segments are noted where Python calls
them. What is opened in a watched call, or while one of the connector's hooks is on the stack, is remembered:
by path and size; none is opened before the call is over, and no handle is kept but those of databases
(``databases.py``).

A file may stay open and grow later: those that were opened outside a watched call, that are written in place,
or that are still empty, are looked at again at the end of each later call; so are, once, all others.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kvtrace.agent.imports import when_imported
from kvtrace.agent.left.unpack import Unpacker
from kvtrace.agent.state import AGENT
from kvtrace.agent.watch.origin import HERE, origin_here
from kvtrace.trace.format import SPOOL_DIR, Way

_MOST_PLACES = 8192
_MOST_OPEN = 24
_WRITING = os.O_WRONLY | os.O_RDWR
_LOCKS = {"fcntl.lockf", "fcntl.fcntl"}
_EVENTS = {"open", "os.rename", "os.remove", "sqlite3.connect", *_LOCKS}
_SEGMENTS = "/dev/shm/"
_NOISE = ("/dev/", "/proc/", "/sys/")


class Place:
    """One file. ``size``: in bytes, as it was last seen. ``in_place``: not written from its begin. ``stays``:
    it is written to by a handle that stays open, for all that is known."""

    __slots__ = ("changed", "errors", "in_place", "looks", "packed", "path", "size", "stays", "sum", "way")

    def __init__(self, path: str, way: Way, size: int) -> None:
        self.path, self.way, self.size = path, way, size
        self.in_place = way == Way.SQLITE
        self.stays = False
        self.changed = 0
        """``st_mtime_ns`` when it was last seen."""
        self.sum: int | None = None
        """Sum of its bytes when they were last read, where it is written in place."""
        self.looks = 0
        self.errors = 0
        """As its last record says."""
        self.packed: tuple[int, Unpacker] | None = None
        """A compressed stream that went on when the file was last seen, and until where it was read."""

    @property
    def mapped(self) -> bool:
        """Whether it may change without a sign: written in place through a mapping."""
        return self.in_place and self.way != Way.SQLITE

    def may_be_read(self) -> bool:
        """Not where this process may hold a lock on it: POSIX takes away all that a process holds on a file
        as soon as it closes any handle of it. Databases are read by handles that stay (``databases.py``)."""
        try:
            found = os.stat(self.path)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) not in _locked


_locked: set[tuple[int, int]] = set()
"""(device, inode) of files on which this process asked for a lock."""
_MOST_LOCKED = 4096


class Wrote(NamedTuple):
    """What one look at a file found: it grew from ``first`` to ``size`` bytes (-1: it is not there);
    ``written``: bytes that came, -1 where it is written in place. ``again``: it did not grow, and what was
    seen of it before may have been seen before it was written: some writers give a file its size first."""

    place: Place
    first: int
    size: int
    written: int
    again: bool = False


class Places:
    """Of this process."""

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}
        self._open: dict[str, Place] = {}
        """Those that may still be written to, the latest last."""

    def forget(self) -> None:
        """A spool begins: it knows of nothing that an earlier one named."""
        self._places.clear()
        self._open.clear()

    def opened(self, path: Any, flags: int, way: Way = Way.FILE, in_call: bool = True) -> Place | None:
        """It is about to be opened for writing (in a watched call, or not); None for what is no store."""
        name = os.path.abspath(os.fsdecode(path))
        if name.startswith(_SEGMENTS):
            way = Way.SHARED_MEMORY
        elif name.startswith(_NOISE) or "__pycache__" in name or _ours(name):
            return None
        known = self._places.get(name)
        anew = bool(flags & os.O_TRUNC)
        size = 0 if anew else _size(name)
        if known is None:
            known = self._places[name] = Place(name, way, size)
            if len(self._places) > _MOST_PLACES:
                del self._places[next(iter(self._places))]
        if anew:
            known.size, known.in_place = 0, way == Way.SQLITE
        elif not flags & os.O_APPEND:
            known.in_place |= size > 0
        known.stays = not anew or not in_call
        known.looks = known.changed = 0
        known.packed = None
        self._keep(known)
        return known

    def _keep(self, place: Place) -> None:
        self._open.pop(place.path, None)
        self._open[place.path] = place
        if len(self._open) > _MOST_OPEN:
            closed = (one.path for one in self._open.values() if one.looks and one.size and not one.stays)
            del self._open[next(closed, next(iter(self._open)))]

    def renamed(self, source: Any, target: Any) -> tuple[str, Place] | None:
        """(path before, the place under its new path) of a known one."""
        old, new = (os.path.abspath(os.fsdecode(name)) for name in (source, target))
        place = self._places.pop(old, None)
        if place is None:
            return None
        self._open.pop(old, None)
        place.path = new
        self._places[new] = place
        self._keep(place)
        return old, place

    def known(self, name: str) -> Place | None:
        return self._places.get(name)

    def removed(self, name: str) -> None:
        self._open.pop(name, None)
        self._places.pop(name, None)

    def still_open(self) -> Iterator[Place]:
        """What may have been written to by a handle that stayed open."""
        yield from list(self._open.values())

    def look(self, place: Place, own: bool = False) -> Wrote:
        """``own``: the call that is over now opened it, and others may have looked at it meanwhile."""
        try:
            found = os.stat(place.path)
        except OSError:
            self._open.pop(place.path, None)
            return Wrote(place, 0, -1, 0)
        grown, touched = found.st_size - place.size, found.st_mtime_ns != place.changed
        first = place.size
        place.size, place.changed = found.st_size, found.st_mtime_ns
        place.looks += 1
        if place.looks > 1 and place.size and not (grown or touched or place.stays):
            self._open.pop(place.path, None)  # it was closed
        if place.in_place or grown < 0:
            first = first if place.way == Way.SQLITE and grown > 0 else 0
            return Wrote(place, first, place.size, -1 if grown or touched else 0)
        again = place.looks > 1 and not grown and (touched or own)
        return Wrote(place, 0 if again else first, place.size, grown, again)


PLACES = Places()
ON_REMOVAL: list[Callable[[str], None]] = []
"""Is told of what a connector removes outside a watched call."""


def _ours(name: str) -> bool:
    config = AGENT.config
    return config is not None and name.startswith(str(config.dir / SPOOL_DIR) + os.sep)


def _size(name: str) -> int:
    try:
        return os.path.getsize(name)
    except OSError:
        return 0


# --- events -------------------------------------------------------------------------------------------------

_installed = False


def install() -> None:
    """Idempotent; an audit hook can't be taken out again."""
    global _installed
    if not _installed:
        _installed = True
        sys.addaudithook(_audit)
        when_imported("multiprocessing.shared_memory", _wrap_segments)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event not in _EVENTS:
        return
    try:
        if event == "open":
            path, _, flags = args
            if isinstance(flags, int) and flags & _WRITING and not isinstance(path, int):
                _note(path, flags)
        elif event in _LOCKS:
            found = os.fstat(args[0] if isinstance(args[0], int) else args[0].fileno())
            if len(_locked) < _MOST_LOCKED:
                _locked.add((found.st_dev, found.st_ino))
        elif event == "os.rename":
            moved = PLACES.renamed(args[0], args[1])
            left = _left()
            if moved is not None and left is not None:
                left.renamed(*moved)
        elif event == "os.remove":
            if not isinstance(args[0], int) and args[1] == -1:
                _removed(os.path.abspath(os.fsdecode(args[0])))
        else:
            name = os.fsdecode(args[0])
            if name and not name.startswith((":memory:", "file:")):
                _note(name, os.O_RDWR, Way.SQLITE)
    except Exception:
        AGENT.failed("paths")


def _removed(name: str) -> None:
    if name.startswith(_NOISE) or _ours(name):
        return
    left = _left()
    if left is not None:
        left.removed(name)
    PLACES.removed(name)
    if left is not None:
        return
    if ON_REMOVAL and origin_here() is not None:
        ON_REMOVAL[0](name)


def note(path: Any) -> None:
    """A native writer truncates and writes this path."""
    try:
        _note(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    except Exception:
        AGENT.failed("paths")


def _attached(path: str) -> None:
    """A segment is opened by its name. One that was written before may be written anew: one more look at it
    is enough, since whoever opens it by name for each record does so again."""
    try:
        place = PLACES.known(path)
        if place is not None:
            _note(path, os.O_RDWR)
            place.stays = False
    except Exception:
        AGENT.failed("paths")


def wanted() -> bool:
    """Whether this thread is in a watched call or piece of work."""
    return _left() is not None


def _left() -> Any:
    return getattr(HERE.work, "left", None)


def _note(path: Any, flags: int, way: Way = Way.FILE) -> None:
    """What a watched call, or a connector's hook, opens."""
    left = _left()
    if left is not None or origin_here() is not None:
        place = PLACES.opened(path, flags, way, left is not None)
        if place is not None and left is not None:
            left.opened(place)


def _wrap_segments(module: Any) -> None:
    original = module.SharedMemory.__init__
    if hasattr(original, "_kvtrace"):
        return

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        create = args[1] if len(args) > 1 else kwargs.get("create", False)
        path = _SEGMENTS + str(self.name).lstrip("/")
        if create:
            note(path)
        else:
            _attached(path)

    wrapper: Any = functools.update_wrapper(__init__, original)
    wrapper._kvtrace = True
    module.SharedMemory.__init__ = wrapper
