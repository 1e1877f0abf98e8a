"""SQLite's files, as bytes: what came into them is looked through like any other file.

POSIX takes away all locks that a process holds on a file as soon as it closes any handle of it, SQLite's own
among them. So the handle by which a database is read stays open until the process ends, or the file is gone;
of a few databases, of others nothing is read.

A value that does not fit on a page goes on over other pages, each of which begins with the number of the
next. Written in one go they mostly follow each other: without these numbers it stands there in one piece.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

_MOST_HANDLES = 64
_NUMBER = 4
"""Bytes of a page's number."""
_handles: dict[tuple[int, int], int] = {}
"""(device, inode) -> the handle."""


def read(path: str, first: int, length: int) -> bytes | None:
    """Bytes of a database; None where they can't be had."""
    try:
        handle = _handle(path)
        return None if handle is None else os.pread(handle, length, first)
    except OSError:
        return None


def _handle(path: str) -> int | None:
    found = os.stat(path)
    key = found.st_dev, found.st_ino
    if key not in _handles:
        for other, handle in list(_handles.items()):
            if not os.fstat(handle).st_nlink:
                del _handles[other]
                os.close(handle)
        if len(_handles) >= _MOST_HANDLES:
            return None
        _handles[key] = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    return _handles[key]


def joined(data: bytes, page: int) -> bytes:
    """A database's bytes without the first few of each page."""
    return b"".join(data[at + _NUMBER : at + page] for at in range(0, len(data), page))


SEAM = 128
"""Bytes of a seam, half of them on each side."""
_LEAF = 13


class Long(NamedTuple):
    """A value of several pages. ``end``: in the database, where the part on the page of its row ends;
    ``more``: where it goes on; ``local``, ``size``: bytes of that part, and in all."""

    end: int
    more: int
    local: int
    size: int


def _long(data: bytes, page: int) -> Iterator[Long]:
    usable = page - data[20]
    least = (usable - 12) * 32 // 255 - 23
    for start in range(0, len(data) - page + 1, page):
        head = start or 100
        for number in range(_short(data, head + 3) if data[head] == _LEAF else 0):
            size, at = _varint(data, start + _short(data, head + 8 + 2 * number))
            _, at = _varint(data, at)
            local = least + (size - least) % (usable - 4)
            local = local if local <= usable - 35 else least
            end = at + local
            more = (int.from_bytes(data[end : end + _NUMBER], "big") - 1) * page + _NUMBER
            if size > usable - 35 and 0 < more < len(data):
                yield Long(end, more, local, size)


def seams(data: bytes, page: int) -> tuple[bytes, list[int]]:
    """What :func:`joined` leaves apart: where the first part of each long value, which stands among others on
    a page, goes on on another page. All seams behind each other, and where in the file each begins.

    Args:
        data: the whole database.
    """
    found, places = [], []
    half = SEAM // 2
    for one in _long(data, page):
        seam = data[one.end - half : one.end] + data[one.more : one.more + half]
        if len(seam) == SEAM:
            found.append(seam)
            places.append(one.end - half)
    return b"".join(found), places


def values(data: bytes, page: int) -> Iterator[tuple[int, bytes]]:
    """(where it goes on behind the page of its row, the whole of it) of each value of several pages.

    Args:
        data: the whole database.
    """
    for one in _long(data, page):
        yield one.more, b"".join(data[begin:end] for begin, end in _parts(data, page, one))


def _parts(data: bytes, page: int, one: Long) -> Iterator[tuple[int, int]]:
    """Begin and end of each part of a value, in order."""
    room = page - data[20] - _NUMBER
    yield one.end - one.local, one.end
    left, more = one.size - one.local, one.more
    while left > 0 and _NUMBER <= more < len(data):
        yield more, more + min(room, left)
        left -= room
        more = (int.from_bytes(data[more - _NUMBER : more], "big") - 1) * page + _NUMBER


class Values:
    """The values of several pages of a database, by the places of their parts."""

    def __init__(self, data: bytes, page: int) -> None:
        self._data, self._page = data, page
        self._on_page: dict[int, list[list[tuple[int, int]]]] = {}
        for one in _long(data, page):
            parts = list(_parts(data, page, one))
            for begin, _ in parts:
                self._on_page.setdefault(begin // page, []).append(parts)

    def at(self, offset: int) -> bytes:
        """The value of which a byte of the database is a part, whole; empty for none."""
        for parts in self._on_page.get(offset // self._page, ()):
            if any(begin <= offset < end for begin, end in parts):
                return b"".join(self._data[begin:end] for begin, end in parts)
        return b""


def _short(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 2], "big")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """(the number, where it ends)"""
    value = 0
    for one in data[at : at + 8]:
        at += 1
        value = value << 7 | one & 0x7F
        if one < 0x80:
            return value, at
    return value << 8 | (data[at] if at < len(data) else 0), at + 1


def place_of(offset: int, page: int) -> int:
    """Where in the file a byte of :func:`joined` stands."""
    number, within = divmod(offset, page - _NUMBER)
    return number * page + _NUMBER + within


def stays(data: bytes, offset: int, length: int, page: int) -> bool:
    """Whether some bytes stand on one page for parts of long values, where they stay until the value is
    deleted. Values on other pages move with their neighbours."""
    start = offset // page * page
    return start > 0 and offset + length <= start + page and not any(data[start : start + 1])
