"""A spool whose records come in blocks of a few, and a place where it grows block by block."""

from __future__ import annotations

from pathlib import Path

from kvtrace.trace import format as fmt


def blocks_of(path: Path, records: int = 5) -> list[bytes]:
    """The header of a spool, then its records in blocks of so many, each with its seal."""
    data = path.read_bytes()
    _, _, length, seed = fmt.unpack_header_block(data)
    at = fmt.RECORD_SIZE + length + (-length % fmt.RECORD_SIZE)
    rows = [data[i : i + fmt.RECORD_SIZE] for i in range(at, len(data), fmt.RECORD_SIZE)]
    rows = [row for row in rows if row[0] != fmt.Kind.SEAL]
    pieces = [b"".join(rows[i : i + records]) for i in range(0, len(rows), records)]
    return [data[:at], *(piece + fmt.seal(piece, n, seed) for n, piece in enumerate(pieces))]


class Growing:
    """A run directory in which the spools of another one appear bit by bit."""

    def __init__(self, whole: Path, folder: Path) -> None:
        self.folder = folder
        (folder / fmt.SPOOL_DIR).mkdir(parents=True)
        self.pieces = {
            folder / fmt.SPOOL_DIR / path.name: blocks_of(path)
            for path in sorted((whole / fmt.SPOOL_DIR).iterdir())
        }

    def grow(self) -> bool:
        """One more block of each spool; False where there was none."""
        grown = False
        for path, pieces in self.pieces.items():
            if pieces:
                with open(path, "ab") as file:
                    file.write(pieces.pop(0))
                grown = True
        return grown
