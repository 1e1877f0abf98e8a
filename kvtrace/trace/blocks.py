"""The blocks of a spool, told from what is damaged by the seals behind them.

A block of records ends with its SEAL (:func:`kvtrace.trace.format.seal`), which says how many records before
it are its block, so that after damage the next whole block is found again. The window of a spool that was
mapped holds the youngest blocks, which may stand behind it as well, and the records of the open one.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from kvtrace.trace import format as fmt
from kvtrace.trace import rows
from kvtrace.words import plural

Records = NDArray[np.int64]
_MOST_EMPTY = 64 << 20
_MOST_LOOKS = 8
"""At the window of a spool that grows all the while."""
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
        window: where the spool's window begins; None: it has none.

    ``rest``: bytes at the end of the file that are no whole block, or not yet one. ``next``: number of the
    block that comes next. ``in_window``: what comes now is from the window. ``open``: the records behind its
    last block, which have no checksum yet.
    """

    def __init__(self, file: BinaryIO, seed: int, number: int = 0, window: int | None = None) -> None:
        self.losses = Losses()
        self.read_bytes = 0
        self.rest = 0
        self.in_window = False
        self.open: Records = np.empty((0, fmt.WORDS), dtype=np.int64)
        self._file = file
        self._seed = seed
        self.next = number
        self._window = window
        self._carry = b""
        self._hashed = 0

    def tables(self, records: int, seals: bool = False) -> Iterator[tuple[bool, Records]]:
        """Tables of shape (n, 8) of whole blocks, read ``records`` at a time, with their seals or not.
        True where something was left out right before the table.

        Raises:
            OSError: a read failed.
        """
        if self._window is None:
            yield from self._of_file(records, seals)
            return
        self._file.seek(max(self._file.tell(), self._window + fmt.WINDOW * fmt.RECORD_SIZE))
        for _ in range(_MOST_LOOKS):
            yield from self._of_file(records, seals)
            data = os.pread(self._file.fileno(), fmt.WINDOW * fmt.RECORD_SIZE, self._window)
            if self._size() <= 0:  # else blocks have left the window: they were written to the file before
                break
        self.read_bytes += len(data)
        yield from self._of_window(data, seals)

    def _of_file(self, records: int, seals: bool) -> Iterator[tuple[bool, Records]]:
        """The blocks of the file, from where it stands to its end."""
        carry, gap = self._carry, False
        empty = 0  # bytes since the last whole block
        while data := self._file.read(records * fmt.RECORD_SIZE):
            self.read_bytes += len(data)
            carry += data
            table = _table(carry)
            ends = rows.kind(table[:, 0]) == fmt.Kind.SEAL
            found = self._whole_blocks(carry, table, np.flatnonzero(ends))
            done, gap = yield from self._given(table, ends, found, gap, seals)
            empty = 0 if done else empty + len(data)
            # Nothing comes after so much of nothing: a huge file is not read to its end.
            if empty > _MOST_EMPTY:
                self.losses.records += max(0, self._size() // fmt.RECORD_SIZE)
                self._file.seek(0, os.SEEK_END)
                carry = b""
                break
            surplus = len(table) - done - fmt.MOST_BLOCK
            if surplus > 0:  # no block is as long as that
                self.losses.records += surplus
                done, gap = done + surplus, True
            carry = carry[done * fmt.RECORD_SIZE :]
        self.rest, self._carry = len(carry), carry
        self.losses.tail = -(-len(carry) // fmt.RECORD_SIZE)

    def _of_window(self, data: bytes, seals: bool) -> Iterator[tuple[bool, Records]]:
        """The blocks of the window that the file does not hold, and :attr:`open`."""
        table = _table(data)
        table = table[: int(np.argmin(np.append(table[:, 0] != 0, False)))]
        ends = rows.kind(table[:, 0]) == fmt.Kind.SEAL
        whole = list(self._whole_blocks(data, table, np.flatnonzero(ends)))
        new = [one for one in whole if table[one[1], 1] >= self.next]
        if new:
            self.losses.tail = 0  # of a write that was cut off: it is whole here
        first = whole[-len(new) - 1][1] + 1 if len(whole) > len(new) else 0
        self.in_window = True
        yield from self._given(table, ends, iter(new), False, seals, first)
        done = whole[-1][1] + 1 if whole else 0
        broken = done + int(np.append(np.flatnonzero(ends[done:]) + 1, 0).max())
        self.losses.records += broken - done
        self.open = table[broken:]

    def _given(
        self, table: Records, ends: NDArray[np.bool_], found: Iterator[tuple[int, int]], gap: bool,
        seals: bool, begin: int = 0,
    ) -> Generator[tuple[bool, Records], None, tuple[int, bool]]:  # fmt: skip
        """The tables of the blocks that were found; where the last one ends, and whether a gap is not yet
        said."""
        done = begin  # of what is whole and not yet given, and its end
        for start, end in found:
            number = int(table[end, 1])
            if start != done or number != self.next:
                if done > begin:
                    yield gap, table[begin:done] if seals else table[begin:done][~ends[begin:done]]
                self._count(start - done, number)
                gap, begin = True, start
            done = end + 1
            if number < self.next:
                begin = done
            else:
                self.next = number + 1
        if done > begin:
            yield gap, table[begin:done] if seals else table[begin:done][~ends[begin:done]]
            gap = False
        return done, gap

    @property
    def at(self) -> int:
        """Where the file is to be read on from."""
        return self._file.tell() - self.rest

    def _size(self) -> int:
        """Bytes of the file that were not read yet."""
        return os.fstat(self._file.fileno()).st_size - self._file.tell()

    def _count(self, skipped: int, number: int) -> None:
        """What stands between the last whole block and this one."""
        self.losses.records += skipped
        self.losses.missing += 0 if skipped else max(0, number - self.next)
        self.losses.again += number < self.next

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
