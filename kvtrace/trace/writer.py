"""The in-process recorder: flat integers in a list, one ``write`` a step.

Standard library only. The hot path is ``recorder.add((w0, w1, ..., w7))``: a bound
``list.extend`` of eight integers, no allocation kept, atomic under the GIL. ``flush()``
packs what is there and writes it; whoever ends a step calls it, so a killed process loses
at most the open step. A failing write (disk full, quota, closed file) stops the recording
for good and is never raised.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from kvtrace.trace import format as fmt
from kvtrace.trace import rows
from kvtrace.trace.facts import AnyFact, Header
from kvtrace.trace.format import Kind, Stop

_MOST_WORDS = fmt.MOST_BLOCK * fmt.WORDS


class Recorder:
    """Writes one spool. ``add`` is the hot path; everything else is rare.

    Args:
        path: the file to create (must not exist).
        header: the process that writes, as JSON in the head.
        limit_bytes: size at which ``full`` turns true; callers then collapse quiet steps.

    Raises:
        OSError: the file cannot be created.
    """

    def __init__(self, path: Path, header: Header, limit_bytes: int) -> None:
        self.path = path
        self.limit_bytes = limit_bytes
        self.size = 0
        self.full = False
        self.alive = True
        self.lost = 0
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._identity = _identity(self._fd)
        self._blocks = 0
        self._buffer: list[int] = []
        self._lock = threading.Lock()
        self._names: dict[str, int] = {}
        self._next_name = 1
        self._ceiling = max(limit_bytes * 2, limit_bytes + (64 << 20))
        self.add: Callable[[Sequence[int]], None] = self._buffer.extend
        head = fmt.pack_header(header.to_json())
        self._seed = fmt.unpack_header_block(head)[3]
        self._write(head)

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
        self._add_text(rows.Document(head, time.perf_counter_ns(), len(data), zlib.crc32(data)), data)

    def _add_text(self, announcement: rows.Name | rows.Document, data: bytes) -> None:
        # One extend for all of it: no other thread's record can come between.
        self._buffer.extend([*announcement, *fmt.payload_words(data)])

    def flush(self) -> None:
        """Write what has been added. Safe from any thread; the loser of a race leaves its
        records to the winner's next flush."""
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
            for at in range(0, count, _MOST_WORDS):
                self._add_block(words[at : at + _MOST_WORDS] if count > _MOST_WORDS else words)
        finally:
            self._lock.release()

    def _add_block(self, words: list[int]) -> None:
        """One write: the records and their checksum."""
        count = len(words)
        try:
            data = struct.pack(f"<{count}q", *words)
        except struct.error:
            data = struct.pack(f"<{count}q", *(_clamp(word) for word in words))
        if self.alive:
            self._write(data + fmt.seal(data, self._blocks, self._seed), count // fmt.WORDS)
        else:
            self.lost += count // fmt.WORDS

    def _write(self, data: bytes, records: int = 0) -> None:
        view = memoryview(data)
        if not self._is_ours(self._fd):
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
        self._blocks += records > 0
        if self.size >= self.limit_bytes:
            self.full = True
            if self.size >= self._ceiling:
                self._stop(Stop.SIZE_LIMIT)

    def _stop(self, why: Stop) -> None:
        if not self.alive:
            return
        self.alive = False
        with contextlib.suppress(OSError):
            if self._is_ours(self._fd):
                self._add_trailer(self._fd, why)
            else:  # the number is somebody else's: the file is opened anew, by its name
                descriptor = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    if self._is_ours(descriptor):
                        self._add_trailer(descriptor, why)
                finally:
                    os.close(descriptor)
        # The list stays the target of callers that hold ``add``; nothing may pile up in it.
        self._buffer.clear()

    def _is_ours(self, descriptor: int) -> bool:
        """Whether it is still this spool. The code of the process may close what it did not open
        (``os.closerange``, a daemon's start), and the next file that it opens gets the number."""
        try:
            return _identity(descriptor) == self._identity
        except OSError:
            return False

    def _add_trailer(self, descriptor: int, why: Stop) -> None:
        os.ftruncate(descriptor, self.size)
        os.lseek(descriptor, self.size, os.SEEK_SET)
        row = rows.Trailer(fmt.pack_head(Kind.TRAILER, 0, why), time.perf_counter_ns(), self.lost)
        trailer = struct.pack("<8q", *row)
        os.write(descriptor, trailer + fmt.seal(trailer, self._blocks, self._seed))

    def stop(self, why: Stop) -> None:
        """Flush, write the trailer, record no more. Idempotent, never raises."""
        self.flush()
        with self._lock:
            self._stop(why)

    def abandon(self) -> None:
        """After fork, in the child: leave the parent's file alone."""
        self.alive = False
        self._lock = threading.Lock()
        self._buffer.clear()
        with contextlib.suppress(OSError):
            if self._is_ours(self._fd):
                os.close(self._fd)
        self._fd = -1


def _identity(descriptor: int) -> tuple[int, int]:
    """Device and inode."""
    state = os.fstat(descriptor)
    return state.st_dev, state.st_ino


def _clamp(word: int) -> int:
    return min(max(int(word), -(1 << 63)), (1 << 63) - 1)
