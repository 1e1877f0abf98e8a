"""Files that a connector writes to, by name and size, in whatever thread and call.

Python's ``open``, ``os.open``, ``os.rename``, ``os.link``, ``os.remove``, ``os.truncate`` and
``sqlite3.connect`` raise audit events. Native writers raise none: safetensors' ``serialize_file`` (Rust),
torch's zip writer (C++) and shared memory segments are noted where Python calls them. What is opened in a
watched call, or while one of the connector's hooks is on the stack, is remembered by its path. Sizes come
from ``os.stat``; no file is ever opened: POSIX takes away all locks that a process holds on a file as soon as
it closes any handle of it.

A file may stay open and grow later: those that were opened outside a watched call, that are written in place,
or that are still empty, are looked at again at the end of each later call; so are, once, all others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from kvtrace.agent.origin import HERE, origin_here
from kvtrace.agent.outside import conditions
from kvtrace.agent.state import AGENT, clock
from kvtrace.agent.wrap.imports import when_imported
from kvtrace.agent.wrap.once import wrap_once
from kvtrace.trace.format import SPOOL_DIR, Way

_MOST_PLACES = 8192
_MOST_OPEN = 24
_BLOCK = 512
"""Bytes of ``st_blocks``."""
_WRITING = os.O_WRONLY | os.O_RDWR
_SEGMENTS = "/dev/shm/"
NOISE = ("/dev/", "/proc/", "/sys/")


class WrittenFile:
    """One file.

    Attributes:
        size: in bytes, as it was last seen.
        in_place: not written from its begin, or at its end: how much came into it can't be told by its size.
        anew: it held something before, which this writer took away.
        stays: it is written to by a handle that stays open, for all that is known.
        spare: the name that it was to get is taken: its end says nothing of what it holds.
        looks: how often it was looked at since it was opened.
        connector: index of the one that opened it last; 0 unknown.
        holder: the call (``OutsideCall``) that opened it, until it tells of it: no other one does meanwhile.
    """

    __slots__ = (
        "anew", "changed", "connector", "holder", "in_place", "looks", "path", "size", "spare", "stays",
        "way",
    )  # fmt: skip

    def __init__(self, path: str, way: Way, size: int) -> None:
        self.path, self.way, self.size = path, way, size
        self.in_place = self.anew = self.stays = self.spare = False
        self.changed = 0
        """``st_mtime_ns`` when it was last seen."""
        self.looks = self.connector = 0
        self.holder: Any = None


class Wrote(NamedTuple):
    """What one look at a file found. ``size``: -1, it is not there; ``written``: bytes that came, -1 where
    that can't be told; ``changed``: it is not as it was."""

    place: WrittenFile
    size: int
    written: int
    changed: bool


class WrittenFiles:
    """Of this process."""

    def __init__(self) -> None:
        self._places: dict[str, WrittenFile] = {}
        self._open: dict[str, WrittenFile] = {}
        """Those that may still be written to, the latest last."""

    def forget(self) -> None:
        """A spool begins: it knows of nothing that an earlier one named."""
        self._places.clear()
        self._open.clear()

    def opened(self, path: Any, flags: int, way: Way = Way.FILE, in_call: bool = True) -> WrittenFile | None:
        """It is about to be opened for writing (in a watched call, or not); None for what is no store."""
        name = os.path.abspath(os.fsdecode(path))
        if name.startswith(_SEGMENTS):
            way = Way.SHARED_MEMORY
        elif name.startswith(NOISE) or "__pycache__" in name or _ours(name):
            return None
        known = self._places.get(name)
        empties = bool(flags & os.O_TRUNC)
        size = size_of(name)
        if known is None:
            known = self._places[name] = WrittenFile(name, way, 0 if empties else size)
            if len(self._places) > _MOST_PLACES:
                del self._places[next(iter(self._places))]
        if empties:
            known.size, known.in_place, known.anew = 0, False, size > 0
        elif not flags & os.O_APPEND and way != Way.SQLITE:
            known.in_place |= size > 0
        known.stays, known.spare = not empties or not in_call, False
        known.looks = known.changed = 0
        self._keep(known)
        return known

    def _keep(self, place: WrittenFile) -> None:
        self._open.pop(place.path, None)
        self._open[place.path] = place
        if len(self._open) > _MOST_OPEN:
            closed = (one.path for one in self._open.values() if one.looks and one.size and not one.stays)
            del self._open[next(closed, next(iter(self._open)))]

    def renamed(self, source: Any, target: Any) -> Iterator[tuple[str, WrittenFile]]:
        """(path before, the place under its new path) of a known one, or of those in a folder."""
        old, new = (os.path.abspath(os.fsdecode(name)) for name in (source, target))
        inside = [old] if old in self._places else []
        if not inside and os.path.isdir(old):
            inside = [one for one in self._places if one.startswith(old + os.sep)]
        for path in inside:
            place = self._places.pop(path)
            self._open.pop(path, None)
            place.path = new + path[len(old) :]
            place.anew |= size_of(place.path) > 0
            self._places[place.path] = place
            self._keep(place)
            yield path, place

    def removed(self, name: str) -> None:
        self._open.pop(name, None)
        self._places.pop(name, None)

    def known(self, name: str) -> WrittenFile | None:
        return self._places.get(name)

    def still_open(self) -> list[WrittenFile]:
        """What may have been written to by a handle that stayed open."""
        return list(self._open.values())

    def look(self, place: WrittenFile, occupied: bool = False) -> Wrote:
        """``occupied``: no more came than it takes up on the disk."""
        try:
            found = os.stat(place.path)
        except OSError:
            self._open.pop(place.path, None)
            return Wrote(place, -1, 0, place.size > 0 or not place.looks)
        grown, touched = found.st_size - place.size, found.st_mtime_ns != place.changed
        place.size, place.changed = found.st_size, found.st_mtime_ns
        place.looks += 1
        if place.looks > 1 and place.size and not (grown or touched or place.stays):
            self._open.pop(place.path, None)  # it was closed
        unknown = place.in_place or grown < 0
        written = (-1 if grown or touched else 0) if unknown else grown
        if occupied:
            written = min(written, found.st_blocks * _BLOCK)
        return Wrote(place, place.size, written, bool(grown or touched))


PLACES = WrittenFiles()


class Removal(NamedTuple):
    """A file that lost its name, or got another one: ``to`` "": it was removed."""

    path: str
    to: str = ""
    linked: bool = False
    """The old name leads to it still."""
    at: int = 0
    """``clock`` when it got its new name: other threads may see it under that one before the call is over."""


ELSEWHERE: list[Callable[[Removal], None]] = []
"""Are told of what a connector removes, renames or links outside a watched call."""


def _ours(name: str) -> bool:
    return name.startswith(str(AGENT.config.dir / SPOOL_DIR) + os.sep)


def size_of(name: str) -> int:
    """0 where it is not there."""
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
        segments, zips = "multiprocessing.shared_memory", "torch.serialization"
        when_imported(segments, lambda module: wrap_once(module.SharedMemory, "__init__", _segment))
        for name in ("safetensors.torch", "safetensors.numpy", "safetensors"):
            when_imported(name, lambda module: wrap_once(module, "serialize_file", _writer))
        zip_writer = "_open_zipfile_writer_file"
        when_imported(zips, lambda module: wrap_once(getattr(module, zip_writer, None), "__init__", _writer))


def _audit(event: str, args: tuple[Any, ...]) -> None:
    handler = _EVENTS.get(event)
    if handler is not None:
        try:
            handler(args)
        except Exception:
            AGENT.failed("files outside")


def _open(args: tuple[Any, ...]) -> None:
    path, _, flags = args
    if isinstance(flags, int) and flags & _WRITING and not isinstance(path, int):
        _note(path, flags)


def _rename(args: tuple[Any, ...], linked: bool = False) -> None:
    """A file that is published by a link goes on under its new name, too: the old one goes next, mostly."""
    at = clock()
    for old, place in PLACES.renamed(args[0], args[1]):
        _tell(Removal(old, place.path, linked, at), place)


def _link(args: tuple[Any, ...]) -> None:
    """A link never takes a name that is in use: it fails, and what has the name stays."""
    place = PLACES.known(os.path.abspath(os.fsdecode(args[0])))
    if place is not None and os.path.lexists(args[1]):
        place.spare = True
    elif place is not None:
        _rename(args, linked=True)


def _remove(args: tuple[Any, ...]) -> None:
    if isinstance(args[0], int):
        return
    name = os.fsdecode(args[0])
    if args[1] != -1:  # in a folder that is open, as shutil.rmtree does it
        name = os.path.join(os.readlink(f"/proc/self/fd/{args[1]}"), name)
    name = os.path.abspath(name)
    place = PLACES.known(name)
    if not name.startswith(NOISE) and not _ours(name):
        if place is None or not place.spare:
            _tell(Removal(name))
        PLACES.removed(name)


def _truncate(args: tuple[Any, ...]) -> None:
    if not isinstance(args[0], int):
        _note(args[0], os.O_RDWR)


def _connect(args: tuple[Any, ...]) -> None:
    name = os.fsdecode(args[0])
    if name and not name.startswith((":memory:", "file:")):
        _note(name, os.O_RDWR, Way.SQLITE)


_EVENTS: dict[str, Callable[[tuple[Any, ...]], None]] = {
    "open": _open,
    "os.rename": _rename,
    "os.link": _link,
    "os.remove": _remove,
    "os.truncate": _truncate,
    "sqlite3.connect": _connect,
}


def _tell(removal: Removal, place: WrittenFile | None = None) -> None:
    watched = here()
    if watched is not None:
        watched.moved(removal, place)
    elif origin_here() is not None:
        for tell in ELSEWHERE:
            tell(removal)


def note(path: Any) -> None:
    """A native writer truncates and writes this path."""
    try:
        _note(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    except Exception:
        AGENT.failed("files outside")


def _attached(path: str) -> None:
    """A segment is opened by its name. One that was written before may be written anew: one more look at it
    is enough, since whoever opens it by name for each record does so again."""
    try:
        place = PLACES.known(path)
        if place is not None:
            _note(path, os.O_RDWR)
            place.stays = False
    except Exception:
        AGENT.failed("files outside")


def here() -> Any:
    """The :class:`~kvtrace.agent.outside.call.OutsideCall` of this thread; None where nothing is watched."""
    return getattr(HERE.work, "outside", None)


def _note(path: Any, flags: int, way: Way = Way.FILE) -> None:
    """What a watched call, or a connector's hook, opens."""
    watched = here()
    by = watched or origin_here()
    if by is not None:
        place = PLACES.opened(path, flags, way, watched is not None)
        if place is not None:
            place.connector = by.connector
        if place is not None and watched is not None:
            watched.opened(place)


def _segment(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        create = args[1] if len(args) > 1 else kwargs.get("create", False)
        path = _SEGMENTS + str(self.name).lstrip("/")
        if create:
            note(path)
        else:
            _attached(path)

    return __init__


def _writer(original: Any) -> Any:
    """A native writer that notes its path, the second argument, first."""

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if here() is not None:
            path = args[1] if len(args) > 1 else kwargs.get("filename", kwargs.get("name"))
            if isinstance(path, (str, bytes, os.PathLike)):
                conditions.opens(path)
                note(path)
        return original(*args, **kwargs)

    return wrapper
