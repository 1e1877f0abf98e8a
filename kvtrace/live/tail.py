"""What was added to a spool since it was read last: whole blocks only, each of them once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvtrace.regular import open_regular
from kvtrace.trace.blocks import Blocks, Records
from kvtrace.trace.facts import Header
from kvtrace.trace.reader import Spool, SpoolError

_RECORDS = 1 << 16
"""Read at a time; memory is bounded by it."""


class Tail:
    """One spool, followed as it grows.

    Raises:
        SpoolError: its header cannot be read, or not yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        spool = Spool(path)
        self.header = Header.from_json(spool.header)
        self._seed, self._window, self._at = spool.seed, spool.window, spool.info().size
        self._number = 0

    @property
    def size(self) -> int:
        """Bytes read so far."""
        return self._at

    def grown(self) -> Iterator[Records]:
        """Tables of shape (n, 8) of the records that are new; take them all.

        Raises:
            SpoolError: the file vanished, or a read failed.
        """
        try:
            with open_regular(self.path) as file:
                file.seek(self._at)
                blocks = Blocks(file, self._seed, self._number, self._window)
                for _, table in blocks.tables(_RECORDS):
                    yield table
                self._at = blocks.at
                self._number = blocks.next
        except OSError as error:
            raise SpoolError(f"{self.path}: cannot be read ({error.strerror or error})") from None
