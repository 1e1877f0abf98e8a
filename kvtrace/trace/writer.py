"""The in-process recorder: records as flat integers, sealed when a step ends.

Standard library only. The hot path is ``recorder.add((w0, w1, ..., w7))``. Two stores take what is added, and
write the same bytes:

- :class:`_recorder.Store` (``_recorder.c``) puts a record into the spool's mapped window at once: a killed
  process loses nothing.
- :class:`Buffered`, where that could not be built or loaded, or the file system has no room to promise, keeps
  integers in a list and writes them when they are flushed: a killed process loses the open step.

Whoever ends a step flushes. A failing write (disk full, quota) stops the recording for good and is never
raised.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from kvtrace.trace import format as fmt
from kvtrace.trace import rows
from kvtrace.trace.facts import AnyFact, Header
from kvtrace.trace.format import Flag, Kind, Stop

try:
    from kvtrace.trace import _recorder
except ImportError:  # not built, or for another Python
    COMPILED = None
else:
    _CLOCK = time.get_clock_info("perf_counter").implementation
    COMPILED = _recorder if _CLOCK == "clock_gettime(CLOCK_MONOTONIC)" else None
"""The recorder in C, None where there is none."""

_ODD = int(Flag.RAISED | Flag.NO_METADATA)


class CallSums(NamedTuple):
    """The calls of one hook or op (``kind``) in a quiet step. ``layers``: of each, as 64-bit integers."""

    kind: int
    code: int
    detail: int
    t0: int
    step: int
    number: int
    total_ns: int
    least_ns: int
    most_ns: int
    layers: bytes


class Recorder:
    """Writes one spool. ``add`` is the hot path; everything else is rare.

    Args:
        path: the file to create (must not exist).
        header: the process that writes, as JSON in the head.
        limit_bytes: size at which ``full`` turns true; callers then collapse quiet steps.
        compiled: whether the recorder in C may be used.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, path: Path, header: Header, limit_bytes: int, compiled: bool = True) -> None:
        self._lock = threading.Lock()
        self._names: dict[str, int] = {}
        self._next_name = 1
        self._store = _store(path, header, limit_bytes, compiled)
        self._gathered: list[int] | None = None
        self._mark = 0
        self.add: Callable[[Sequence[int]], None] = self._store.add

    @property
    def compiled(self) -> bool:
        """Whether it is the recorder in C."""
        return not isinstance(self._store, Buffered)

    @property
    def path(self) -> Path:
        return Path(self._store.path)

    @path.setter
    def path(self, path: Path) -> None:
        self._store.path = str(path)

    @property
    def full(self) -> bool:
        return self._store.full

    @property
    def alive(self) -> bool:
        return self._store.alive

    def name(self, text: str) -> int:
        """The id of a string, given once and written before its first use."""
        ident = self._names.get(text)
        if ident is None:
            with self._lock:
                ident = self._names.get(text)
                if ident is None:
                    ident = self._next_name
                    self._next_name += 1
                    data = text.encode("utf-8", "replace")
                    head = fmt.pack_head(Kind.NAME)
                    self._add_text(rows.Name(head, ident, len(data), zlib.crc32(data)), data)
                    self._names[text] = ident
        return ident

    def knows(self, text: str) -> bool:
        """Whether a NAME was given to this string and not forgotten."""
        return text in self._names

    def forget_name(self, text: str) -> None:
        """Drop a string that will not come again (a finished request): memory stays bounded."""
        self._names.pop(text, None)

    def fact(self, document: AnyFact, role: int = 0) -> None:
        text = json.dumps(document.to_json(), separators=(",", ":"), default=str)
        data = text.encode("utf-8", "replace")
        head = fmt.pack_head(Kind.FACT, role, document.CODE)
        self._add_text(rows.FactRecord(head, time.perf_counter_ns(), len(data), zlib.crc32(data)), data)

    def _add_text(self, announcement: rows.Name | rows.FactRecord, data: bytes) -> None:
        # One call for all of it: no other thread's record can come between.
        self._store.add([*announcement, *fmt.payload_words(data)])

    # --- steps of which only sums are kept ----------------------------------------------------

    def gather(self) -> None:
        """A step begins whose calls are to be summed up where it turns out quiet. ``add`` may be another
        function from now on, until :meth:`settle`."""
        if isinstance(self._store, Buffered):
            self._gathered = []
            self.add = self._gathered.extend
        else:
            self._mark = self._store.mark()

    def settle(self) -> list[CallSums] | None:
        """The step is over: its calls, for the caller to add their sums; None, and its records stay as they
        are, where something was stored, loaded, raised or odd (in C also where a name was new)."""
        if not isinstance(self._store, Buffered):
            found = self._store.collapse(self._mark)
            return None if found is None else [CallSums(*one) for one in found]
        gathered, self._gathered = self._gathered or [], None
        self.add = self._store.add
        kept, calls = _collapsed(gathered) or (gathered, None)
        self.add(kept)
        return calls

    # --- the end of a step, and of the recording ----------------------------------------------

    def flush(self) -> None:
        """Seal, and write where nothing is mapped, what has been added. Safe from any thread."""
        self._store.flush()

    def stop(self, why: Stop) -> None:
        """Flush, write the trailer, record no more. Idempotent, never raises."""
        self._store.stop(int(why))

    def abandon(self) -> None:
        """After fork, in the child: leave the parent's file alone."""
        self._lock = threading.Lock()
        self._store.abandon()

    def use(self) -> None:
        """Where calls of the wrappers in C add their records: here."""
        if COMPILED is not None:
            COMPILED.use(None if isinstance(self._store, Buffered) else self._store)


def _store(path: Path, header: Header, limit: int, compiled: bool) -> Buffered | _recorder.Store:
    """The store of a new spool."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    facts = header.to_json()
    ceiling = max(limit * 2, limit + (64 << 20))
    if compiled and COMPILED is not None:
        head = fmt.pack_header(facts, windowed=True)
        seed = fmt.unpack_header_block(head)[3]
        with contextlib.suppress(OSError):  # a full disk, a file system that promises nothing
            if os.write(fd, head) == len(head):
                mapped: _recorder.Store = COMPILED.Store(fd, str(path), len(head), seed, limit, ceiling)
                return mapped
    return Buffered(fd, str(path), fmt.pack_header(facts), limit, ceiling)


class Buffered:
    """The store in Python: one ``write`` a flush. Its spool has no window.

    ``add`` is a bound ``list.extend`` of eight integers: no allocation kept, atomic under the GIL.
    """

    def __init__(self, fd: int, path: str, head: bytes, limit: int, ceiling: int) -> None:
        self.path = path
        self.limit, self.ceiling = limit, ceiling
        self.full = False
        self.alive = True
        self.lost = 0
        self.blocks = 0
        self._fd = fd
        self._identity = identity(fd)
        self._seed = fmt.unpack_header_block(head)[3]
        self._used = 0
        """Records that a window would hold now: blocks end where it would be full."""
        self._buffer: list[int] = []
        self._lock = threading.Lock()
        self.add: Callable[[Sequence[int]], None] = self._buffer.extend
        self.size = 0
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.lseek(fd, 0, os.SEEK_SET)
        self._write(head)

    @property
    def descriptor(self) -> int:
        return self._fd

    def flush(self) -> None:
        """The loser of a race leaves its records to the winner's next flush."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            buffer = self._buffer
            count = len(buffer)
            if not count:
                return
            words = buffer[:count]
            del buffer[:count]
            if not self.alive:
                self.lost += count // fmt.WORDS
                return
            at = 0
            while at < count:
                if self._used >= fmt.WINDOW_FULL:
                    self._used = 0
                end = min(count, at + (fmt.WINDOW_FULL - self._used) * fmt.WORDS)
                self._add_block(words[at:end] if end - at < count else words)
                at = end
        finally:
            self._lock.release()

    def _add_block(self, words: list[int]) -> None:
        """One write: the records and their checksum."""
        count = len(words)
        self._used += count // fmt.WORDS + 1
        try:
            data = struct.pack(f"<{count}q", *words)
        except struct.error:
            data = struct.pack(f"<{count}q", *(_clamp(word) for word in words))
        if self.alive:
            self._write(data + fmt.seal(data, self.blocks, self._seed), count // fmt.WORDS)
        else:
            self.lost += count // fmt.WORDS

    def _write(self, data: bytes, records: int = 0) -> None:
        view = memoryview(data)
        if not self._reopened():
            self.lost += records
            self._stop(Stop.DESCRIPTOR_LOST)
            return
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError:
            self.lost += records  # what is on disk of them has no seal
            self._stop(Stop.WRITE_FAILED)
            return
        self.size += len(data)
        self.blocks += records > 0
        if self.size >= self.limit:
            self.full = True
            if self.size >= self.ceiling:
                self._stop(Stop.SIZE_LIMIT)

    def _stop(self, why: int) -> None:
        if not self.alive:
            return
        self.alive = False
        with contextlib.suppress(OSError):
            if self._reopened():
                os.ftruncate(self._fd, self.size)
                os.lseek(self._fd, self.size, os.SEEK_SET)
                row = rows.Trailer(fmt.pack_head(Kind.TRAILER, 0, why), time.perf_counter_ns(), self.lost)
                trailer = struct.pack("<8q", *row)
                os.write(self._fd, trailer + fmt.seal(trailer, self.blocks, self._seed))
                os.close(self._fd)
        self._fd = -1
        # The list stays the target of callers that hold ``add``; nothing may pile up in it.
        self._buffer.clear()

    def _is_ours(self, descriptor: int) -> bool:
        """Whether it is still this spool. The code of the process may close what it did not open
        (``os.closerange``, a daemon's start), and the next file that it opens gets the number."""
        try:
            return identity(descriptor) == self._identity
        except OSError:
            return False

    def _reopened(self) -> bool:
        """Whether the descriptor is the spool's: it is opened anew, by its name, where the number is somebody
        else's."""
        if self._is_ours(self._fd):
            return True
        self._fd = -1
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return False
        if not self._is_ours(descriptor):
            os.close(descriptor)
            return False
        os.lseek(descriptor, self.size, os.SEEK_SET)
        self._fd = descriptor
        return True

    def stop(self, why: int) -> None:
        self.flush()
        with self._lock:
            self._stop(why)

    def abandon(self) -> None:
        self.alive = False
        self._lock = threading.Lock()
        self._buffer.clear()
        with contextlib.suppress(OSError):
            if self._is_ours(self._fd):
                os.close(self._fd)
        self._fd = -1


def _collapsed(words: list[int]) -> tuple[list[int], list[CallSums]] | None:
    """The records that stay of a quiet step, and its calls; None of another step. As ``collapse`` in C."""
    kept: list[int] = []
    groups: dict[tuple[int, int, int], list[list[int]]] = {}
    for at in range(0, len(words), fmt.WORDS):
        record = words[at : at + fmt.WORDS]
        head = record[0]
        kind = rows.kind(head)
        if rows.flags(head) & _ODD or kind not in (Kind.HOOK, Kind.OP, Kind.EXEC):
            return None
        if (kind == Kind.HOOK and (record[5] > 0 or record[6] > 0)) or (kind == Kind.EXEC and kept):
            return None
        if kind == Kind.EXEC:
            kept += record
        else:
            groups.setdefault((kind, rows.code(head), rows.detail(head)), []).append(record)
    return kept, [_calls(key, records) for key, records in groups.items()]


def _calls(key: tuple[int, int, int], records: list[list[int]]) -> CallSums:
    took = [record[2] - record[1] for record in records]
    layers = array("q", (record[4] for record in records)).tobytes()
    first = records[0]
    return CallSums(*key, first[1], first[3], len(records), sum(took), min(took), max(took), layers)


def identity(descriptor: int) -> tuple[int, int]:
    """Device and inode."""
    state = os.fstat(descriptor)
    return state.st_dev, state.st_ino


def _clamp(word: int) -> int:
    return min(max(int(word), -(1 << 63)), (1 << 63) - 1)
