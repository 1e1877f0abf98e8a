"""How far a spool is written, from outside: its file need not grow when its window fills."""

from __future__ import annotations

import os
from bisect import bisect_left
from pathlib import Path

from kvtrace.trace import format as fmt


def written(path: Path) -> tuple[int, int]:
    """(bytes that are written, where the last two of its records begin). Cheap: a dozen small reads.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no spool.
    """
    with open(path, "rb", buffering=0) as file:
        block = file.read(fmt.RECORD_SIZE)
        length = fmt.unpack_header_block(block)[2]
        start = fmt.RECORD_SIZE + length + (-length % fmt.RECORD_SIZE)
        window, size = fmt.window_of(block), os.fstat(file.fileno()).st_size
        used = _used(file.fileno(), start) if window else 0
    end = start + used * fmt.RECORD_SIZE if used else size
    return size - window + used * fmt.RECORD_SIZE, max(0, end - 2 * fmt.RECORD_SIZE)


def _used(descriptor: int, start: int) -> int:
    """Records in a window: those whose heads are not 0, a prefix of it."""

    def empty(at: int) -> bool:
        return not any(os.pread(descriptor, 8, start + at * fmt.RECORD_SIZE))

    return bisect_left(range(fmt.WINDOW), True, key=empty)
