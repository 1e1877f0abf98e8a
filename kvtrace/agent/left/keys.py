"""Which key of a store elsewhere holds which KV, for protocols whose messages begin with a verb and a key.

HTTP (``PUT /key``), Memcached (``set key``), Redis (``SET key``) and plain text like these. What is put under
a key takes the place of what stood there, and what is deleted is gone: then the KV that had been found in the
message before is not at rest any more. Where the same KV stands under another key, or has been found in a
file, nothing is said. Messages of other protocols have no key here, and nothing follows from them.
"""

from __future__ import annotations

import re
from collections import OrderedDict

from kvtrace.agent.left.pieces import Op

_MOST_KEYS = 8192
_LINE = re.compile(rb"(PUT|SET|DEL|DELETE)[ \t]+(\S{1,1024})", re.IGNORECASE)
_REDIS = re.compile(rb"\*\d+\r\n\$\d+\r\n(SET|DEL|UNLINK)\r\n\$\d+\r\n([^\r\n]{1,1024})\r\n", re.IGNORECASE)
_PUTS = {b"PUT", b"SET"}
Key = tuple[str, bytes]
"""Of a peer by its name."""


def asked(data: bytes) -> tuple[bool, bytes] | None:
    """(whether it puts, else deletes; the key) of a message that begins so; None for any other one."""
    found = _LINE.match(data) or _REDIS.match(data)
    return None if found is None else (found[1].upper() in _PUTS, found[2])


class Keys:
    """Of this process. Threads share it; each of its changes is one step of the interpreter."""

    def __init__(self) -> None:
        self._ops: OrderedDict[Key, list[Op]] = OrderedDict()

    def forget(self) -> None:
        self._ops.clear()

    def put(self, key: Key, ops: list[Op]) -> list[Op]:
        """KV was put under a key; the operations whose KV it replaced."""
        if not ops:
            return []  # whatever it was, it could not be read
        before = self._ops.pop(key, [])
        self._ops[key] = ops
        if len(self._ops) > _MOST_KEYS:
            self._ops.popitem(last=False)
        pieces = {piece for op in ops for piece in op.pieces}
        # The first and the last piece are the same where the same was put again; others now and then.
        other = [op for op in before if sum(piece in pieces for piece in op.pieces) * 2 < len(op.pieces)]
        return self._gone(other)

    def delete(self, key: Key) -> list[Op]:
        """A key was deleted; the operations whose KV stood there."""
        return self._gone(self._ops.pop(key, []))

    def _gone(self, ops: list[Op]) -> list[Op]:
        still = {id(op) for held in list(self._ops.values()) for op in held} if ops else ()
        return [op for op in ops if id(op) not in still and not op.in_file]


KEYS = Keys()
