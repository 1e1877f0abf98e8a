"""The blocks of a spool, told from what is damaged by the seals behind them.

Each write of the recorder is one block and its SEAL (:func:`kvtrace.trace.format.seal`). A seal says how
many records before it are its block, so that after damage the next whole block is found again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from kvtrace.trace import format as fmt
from kvtrace.trace import rows
from kvtrace.words import plural

Records = NDArray[np.int64]
_MOST_EMPTY = 64 << 20
_MOST_HASHED = 4
"""Bytes hashed for each byte read, at most: a file of nothing but seals is not worth more."""


@dataclass
class Losses:
    """What was left out of one spool. ``records``: 64 bytes each; ``missing``: blocks of which nothing is
    there; ``again``: blocks that were there twice; ``tail``: records behind the last whole block."""

    records: int = 0
    missing: int = 0
    again: int = 0
    tail: int = 0

    @property
    def damage(self) -> str:
        """In words; "" for none."""
        said = [
            f"{plural(self.records, 'record')} left out, of blocks that do not match their checksum",
            f"{plural(self.missing, 'block')} missing",
            f"{plural(self.again, 'block')} left out that were there twice",
        ]
        counts = (self.records, self.missing, self.again)
        return "; ".join(words for words, n in zip(said, counts, strict=True) if n)


class Blocks:
    """Reads the records of a spool, block by block.

    Args:
        seed: the header's CRC.
        number: of the block at which the file stands.

    ``rest``: bytes at the end of what was read that are no whole block, or not yet one.
    """

    def __init__(self, file: BinaryIO, seed: int, number: int = 0) -> None:
        self.losses = Losses()
        self.read_bytes = 0
        self.rest = 0
        self._file = file
        self._seed = seed
        self._next = number
        self._hashed = 0

    def tables(self, records: int, seals: bool = False) -> Iterator[tuple[bool, Records]]:
        """Tables of shape (n, 8) of whole blocks, read ``records`` at a time, with their seals or not.
        True where something was left out right before the table.

        Raises:
            OSError: a read failed.
        """
        carry = b""
        gap = False
        empty = 0  # bytes since the last whole block
        while data := self._file.read(records * fmt.RECORD_SIZE):
            self.read_bytes += len(data)
            carry += data
            table = _table(carry)
            ends = rows.kind(table[:, 0]) == fmt.Kind.SEAL
            begin = done = 0  # of what is whole and not yet given, and its end
            for start, end in self._whole_blocks(carry, table, np.flatnonzero(ends)):
                number = int(table[end, 1])
                if start != done or number != self._next:
                    if done > begin:
                        yield gap, table[begin:done] if seals else table[begin:done][~ends[begin:done]]
                    self._count(start - done, number)
                    gap, begin = True, start
                done = end + 1
                if number < self._next:
                    begin = done
                else:
                    self._next = number + 1
            if done > begin:
                yield gap, table[begin:done] if seals else table[begin:done][~ends[begin:done]]
                gap = False
            empty = 0 if done else empty + len(data)
            if (
                empty > _MOST_EMPTY
            ):  # nothing comes after so much of nothing: a huge file is not read to its end
                self.losses.records += max(0, self._size() // fmt.RECORD_SIZE)
                return
            surplus = len(table) - done - fmt.MOST_BLOCK
            if surplus > 0:  # no block is as long as that
                self.losses.records += surplus
                done, gap = done + surplus, True
            carry = carry[done * fmt.RECORD_SIZE :]
        self.rest = len(carry)
        if carry:
            self.losses.tail = max(1, len(carry) // fmt.RECORD_SIZE)

    @property
    def next(self) -> int:
        """Number of the block that comes next."""
        return self._next

    def _size(self) -> int:
        """Bytes of the file that were not read yet."""
        return os.fstat(self._file.fileno()).st_size - self._file.tell()

    def _count(self, skipped: int, number: int) -> None:
        """What stands between the last whole block and this one."""
        self.losses.records += skipped
        self.losses.missing += 0 if skipped else max(0, number - self._next)
        self.losses.again += number < self._next

    def _whole_blocks(self, data: bytes, table: Records, seals: Records) -> Iterator[tuple[int, int]]:
        """(first record, seal) of each block in `data` that matches its seal, in order."""
        done = 0
        view = memoryview(data)
        for at, number, count in zip(
            *(column.tolist() for column in (seals, *table[seals, 1:3].T)), strict=True
        ):
            start = at - count
            if not done <= start <= at or not 0 <= number < 1 << 62:
                continue
            self._hashed += count * fmt.RECORD_SIZE
            if self._hashed > _MOST_HASHED * self.read_bytes + (1 << 26):
                return
            block = view[start * fmt.RECORD_SIZE : at * fmt.RECORD_SIZE]
            seal = view[at * fmt.RECORD_SIZE : (at + 1) * fmt.RECORD_SIZE]
            if seal == fmt.seal(block, number, self._seed):
                yield start, at
                done = at + 1


def _table(data: bytes) -> Records:
    whole = len(data) - len(data) % fmt.RECORD_SIZE
    return np.frombuffer(data[:whole] if whole < len(data) else data, dtype="<i8").reshape(-1, fmt.WORDS)


def unsealed(file: BinaryIO, records: int) -> Iterator[tuple[bytes, Records]]:
    """What is read and its whole records, of a spool from before there were seals.

    Raises:
        OSError: a read failed.
    """
    while data := file.read(records * fmt.RECORD_SIZE):
        yield data, _table(data)
