"""What of SQLite's file format is used: https://www.sqlite.org/fileformat2.html. Standard library only."""

from __future__ import annotations

from collections.abc import Callable

HEAD = 100
"""Bytes of a database's header."""
_MAGIC = b"SQLite format 3\x00"
_MOST_FREE = 1 << 20


def page_size(head: bytes) -> int:
    """Bytes of a page of the database that begins so; 0 where it is none."""
    if not head.startswith(_MAGIC) or len(head) < HEAD:
        return 0
    size = _number(head, 16) >> 16
    return 1 << 16 if size == 1 else size


def moves_pages(head: bytes) -> bool:
    """Whether pages may have been moved since they were written (auto_vacuum)."""
    return _number(head, 52) != 0


def free_pages(head: bytes, read: Callable[[int, int], bytes]) -> frozenset[int]:
    """Numbers, from 1, of the pages that hold nothing any more.

    Args:
        read: (offset, length) -> bytes of the file.
    """
    page, trunk, count = page_size(head), _number(head, 32), _number(head, 36)
    found: set[int] = set()
    while page and trunk and trunk not in found and len(found) <= min(count, _MOST_FREE):
        found.add(trunk)
        data = read((trunk - 1) * page, page)
        if len(data) < page:
            break
        leaves = min(_number(data, 4), page // 4 - 2)
        found.update(_number(data, 8 + 4 * at) for at in range(leaves))
        trunk = _number(data, 0)
    return frozenset(found)


def _number(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "big")
