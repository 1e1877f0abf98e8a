"""What came to rest: once the run is over, the files that it wrote to are looked at, and ``rest.json`` says
what lies there. Nothing may run at the end of vLLM's own processes (vLLM kills its workers), so that it is
done from outside. Files are read, never opened for writing."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Container, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvtrace.launch.listing import Listings
from kvtrace.ledger.rest_file import GONE, LEFT_BEHIND, REST_FILE, STILL, UNKNOWN, RestFile, RestingFile
from kvtrace.trace import rows
from kvtrace.trace.format import Kind, Way
from kvtrace.trace.mask import MASK
from kvtrace.trace.reader import Spool, SpoolError, spool_paths
from kvtrace.trace.sqlite_file import HEAD, free_pages, moves_pages, page_size
from kvtrace.trace.sums import summed

_MOST_FILES = 1 << 16
_MOST_READ = 16 << 20
"""Bytes of one file that are read to see whether they are all zero."""
_MASK = (1 << 63) - 1
_WAYS = (Way.FILE, Way.SQLITE, Way.SHARED_MEMORY)
SOON_SECONDS = 600
"""How long after a run what is not there says something of the run."""


def write_rest(run_dir: Path, salt: bytes | None) -> bool:
    """Look, and write ``rest.json``. Never raises; False where nothing was written.

    Args:
        salt: the run's key, by which pieces of KV are known again; None where it is gone.
    """
    try:
        document = summed(look(run_dir, salt).to_json())
        part = run_dir / f".{REST_FILE}.{os.getpid()}.part"
        try:
            part.write_text(json.dumps(document, indent=1), encoding="utf-8")
            part.replace(run_dir / REST_FILE)
        finally:
            part.unlink(missing_ok=True)
    except Exception:
        return False
    return True


def write_rest_soon(run_dir: Path) -> bool:
    """The same for a run that ``kvtrace run`` did not start, if it ended a moment ago and nobody looked."""
    if (run_dir / REST_FILE).exists():
        return False
    try:
        ended = max((path.stat().st_mtime for path in spool_paths(run_dir)), default=0.0)
    except OSError:
        return False
    return time.time() - ended < SOON_SECONDS and write_rest(run_dir, None)


def look(run_dir: Path, salt: bytes | None) -> RestFile:
    """What lies now at the paths that the run's LEFT and PIECE records name."""
    targets: dict[str, bool] = {}
    pieces: dict[str, str] = {}
    for path in spool_paths(run_dir):
        try:
            wrote, found = _named(path)
        except SpoolError:
            continue
        for name, way in wrote:
            targets[name] = way != Way.SQLITE
            if way == Way.SQLITE:  # what is not in the database yet
                targets.update(dict.fromkeys((f"{name}-journal", f"{name}-wal"), False))
        if found:
            databases = {name for name, way in wrote if way == Way.SQLITE}
            pieces[path.name] = _still(found, salt, databases, [name for name, _ in wrote])
    named = list(targets.items())[:_MOST_FILES]
    files = tuple(_resting(name, may_be_read) for name, may_be_read in named)
    return RestFile(looked_wall_ns=time.time_ns(), files=files, pieces=pieces)


class _Piece(NamedTuple):
    """A piece of KV where it was found. ``layer``: the id of its name."""

    path: str
    offset: int
    length: int
    call: int
    layer: int
    digest: int

    @property
    def content(self) -> tuple[int, int]:
        """What it is, wherever it stands."""
        return self.layer, self.digest

    @property
    def record(self) -> tuple[str, int]:
        """What one call put into one file."""
        return self.path, self.call


def _named(path: Path) -> tuple[list[tuple[str, int]], list[_Piece]]:
    """Paths that LEFT records name, each with its way; pieces, in their order."""
    spool = Spool(path)
    left: list[np.ndarray] = []
    pieces: list[np.ndarray] = []
    for chunk in spool.chunks():
        kinds = rows.kind(chunk[:, 0])
        left.append(chunk[(kinds == Kind.LEFT) & np.isin(rows.code(chunk[:, 0]), _WAYS)])
        pieces.append(chunk[kinds == Kind.PIECE])
    names = spool.names
    wrote: dict[tuple[str, int], None] = {}
    for table in left:
        one = rows.columns(rows.LeftProcess, table)
        ids = zip(one.target.tolist(), rows.code(one.head).tolist(), strict=True)
        wrote.update(dict.fromkeys((names.get(ident, ""), way) for ident, way in dict.fromkeys(ids)))
    found = []
    for table in pieces:
        piece = rows.columns(rows.Piece, table)
        columns = (piece.target, piece.offset, piece.length, piece.call, piece.layer, piece.digest)
        for target, *place in zip(*(column.tolist() for column in columns), strict=True):
            found.append(_Piece(names.get(target, ""), *place))
    return [one for one in wrote if one[0]], found


def _real(name: str) -> str | None:
    """The path that a name stands for; None where a part of it was masked."""
    return None if MASK in name else os.path.expanduser(name)


def _resting(name: str, may_be_read: bool) -> RestingFile:
    """``may_be_read``: not a database, whose locks go where the process that holds them closes a handle."""
    path = _real(name)
    if path is None:
        return RestingFile(name)
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return RestingFile(name, exists=False)
    except OSError:
        return RestingFile(name)
    zero = None
    if may_be_read and 0 < found.st_size <= _MOST_READ:
        with contextlib.suppress(OSError), open(path, "rb") as file:
            zero = not any(file.read(4096)) and not any(file.read())
    return RestingFile(name, True, found.st_size, zero, found.st_mtime_ns)


def _still(
    pieces: Sequence[_Piece], salt: bytes | None, databases: Container[str], wrote: Sequence[str] = ()
) -> str:
    """For each piece whether it stands where it stood; the same bytes of the same layer at rest in another
    place do as well, if those of all layers that one call put into that file do: a first layer's are the same
    in other prompts, and those of one layer in another one's place are no store's copy of them.

    Args:
        wrote: the files that the run wrote to.
    """
    look = _Look(salt, databases, wrote)
    try:
        said = [look.at(piece) for piece in pieces]
        gone = [piece for piece, one in zip(pieces, said, strict=True) if one in (GONE, _OTHER)]
        moved = look.on_other_pages(gone)
    finally:
        look.close()
    there = moved | {piece.content for piece, one in zip(pieces, said, strict=True) if one == STILL}
    kept = {piece.path for piece, one in zip(pieces, said, strict=True) if one == STILL}
    lost = {
        piece.record
        for piece, one in zip(pieces, said, strict=True)
        if one in (GONE, LEFT_BEHIND, _OTHER) and piece.content not in there
    }
    found = []
    for piece, one in zip(pieces, said, strict=True):
        if one in (GONE, LEFT_BEHIND, _OTHER) and piece.record not in lost:
            one = STILL
        elif one == _OTHER:  # where nothing stands where it stood, a database was packed anew
            one = GONE if piece.path in kept else UNKNOWN
        found.append(one)
    return "".join(found)


_MOST_OPEN = 64
_MOST_HASHED = 1 << 19
_OTHER = "x"
"""Other bytes stand there now, in a database whose pages do not move by themselves."""


class _Pages(NamedTuple):
    """Of a database. ``free``: numbers of pages that hold nothing now; ``moves``: pages may have moved."""

    size: int
    free: frozenset[int]
    moves: bool


class _Look:
    """Looks at places in files; a few of these are open at a time."""

    def __init__(self, salt: bytes | None, databases: Container[str], wrote: Sequence[str]) -> None:
        self._salt, self._databases = salt, databases
        real = (_real(name) for name in wrote)
        self._listings = Listings(Path(path) for path in real if path is not None)
        self._files: dict[str, int | None] = {}
        self._pages: dict[str, _Pages] = {}

    def close(self) -> None:
        while self._files:
            _, file = self._files.popitem()
            if file is not None:
                os.close(file)

    def at(self, piece: _Piece) -> str:
        name, offset, length, digest = piece.path, piece.offset, piece.length, piece.digest
        path = _real(name)
        if self._salt is None or path is None:
            return UNKNOWN
        if name in self._databases and os.path.exists(f"{path}-journal"):
            return UNKNOWN  # a transaction is open, or will be rolled back
        file = self._file(name, path)
        if file is None:
            return UNKNOWN if os.path.exists(path) else GONE
        try:
            pages = self._pages_of(name, file) if name in self._databases else None
            if pages is not None and pages.size and offset // pages.size + 1 in pages.free:
                return GONE
            data = os.pread(file, length, offset)
        except OSError:
            return UNKNOWN
        if _digest(data, self._salt) == digest:
            known = pages is not None or self._listings.leads_to(Path(path), offset)
            return STILL if known else LEFT_BEHIND
        return GONE if pages is None else UNKNOWN if pages.moves else _OTHER

    def on_other_pages(self, pieces: Sequence[_Piece]) -> set[tuple[int, int]]:
        """Contents of those pieces of databases that stand on another page now, at the same place of it: a
        value that is written again goes to other pages, and is cut into them at the same places."""
        found: set[tuple[int, int]] = set()
        for name in {piece.path for piece in pieces} & self._pages.keys():
            found |= self._moved(name, [piece for piece in pieces if piece.path == name])
        return found

    def _moved(self, name: str, pieces: Sequence[_Piece]) -> set[tuple[int, int]]:
        path, pages = _real(name), self._pages[name]
        file = None if path is None else self._file(name, path)
        data = b"" if file is None or not pages.size else _all_of(file)
        wanted: dict[tuple[int, int], dict[int, set[tuple[int, int]]]] = defaultdict(lambda: defaultdict(set))
        for piece in pieces if data else ():
            wanted[piece.offset % pages.size, piece.length][piece.digest].add(piece.content)
        if self._salt is None or len(wanted) * len(data) > _MOST_HASHED * pages.size:
            return set()
        live = [at for at in range(0, len(data), pages.size) if at // pages.size + 1 not in pages.free]
        found: set[tuple[int, int]] = set()
        for (within, length), contents in wanted.items():
            for begin in live:
                there = data[begin + within : begin + within + length]
                found |= contents.get(_digest(there, self._salt), set())
        return found

    def _file(self, name: str, path: str) -> int | None:
        if name not in self._files:
            while len(self._files) >= _MOST_OPEN:
                old = self._files.pop(next(iter(self._files)))
                if old is not None:
                    os.close(old)
            self._files[name] = _opened(path)
        return self._files[name]

    def _pages_of(self, name: str, file: int) -> _Pages:
        if name not in self._pages:
            head = os.pread(file, HEAD, 0)
            free = free_pages(head, lambda offset, length: os.pread(file, length, offset))
            self._pages[name] = _Pages(page_size(head), free, moves_pages(head))
        return self._pages[name]


def _digest(data: bytes, salt: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, key=salt, digest_size=8).digest(), "little") & _MASK


def _all_of(file: int) -> bytes:
    """All of a database; b"" of a large one, or one that can't be read."""
    try:
        return os.pread(file, _MOST_READ, 0) if os.fstat(file).st_size <= _MOST_READ else b""
    except OSError:
        return b""


def _opened(path: str) -> int | None:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
