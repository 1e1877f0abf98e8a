"""Which key of a store elsewhere holds which KV, for protocols whose messages begin with a verb and a key.

HTTP (``PUT /key``), Memcached (``set key``), Redis (``SET key``) and plain text like these. What is put under
a key takes the place of what stood there, and what is deleted is gone: then the KV that had been found in the
message before is not at rest any more. Where the same KV stands under another key, or has been found in a
file, nothing is said.

Of other protocols the key is not known. Where the bytes before the KV are the same in two messages, and such
bytes differ else, the second may have taken the place of the first: that is all that is said.

A piece of what was read may stand in a message for other KV by chance: a first layer computes the same for
the same token in another place. Where all pieces of an operation stood in one message, that is where it is.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from kvtrace.agent.left.pieces import Op

_MOST_KEYS = 8192
_MOST_LENGTHS = 256
_MOST_WAITING = 256
"""Operations of which it is not known yet whether heads tell messages apart."""
_LEAST_HEAD = 8
"""Bytes in which a key may stand."""
_WIDTHS = 8, 4
"""Bytes of a length."""
_BEHIND = b"\0"
"""No key begins so."""
_LINE = re.compile(rb"(PUT|SET|DEL|DELETE)[ \t]+(\S{1,1024})", re.IGNORECASE)
_REDIS = re.compile(rb"\*\d+\r\n\$\d+\r\n(SET|DEL|UNLINK)\r\n\$\d+\r\n([^\r\n]{1,1024})\r\n", re.IGNORECASE)
_PUTS = {b"PUT", b"SET"}
Key = tuple[str, bytes]
"""Of a peer by its name."""


class Held(NamedTuple):
    """An operation of which something was found in one message. ``whole``: all of its pieces were."""

    op: Op
    whole: bool


def asked(data: bytes) -> tuple[bool, bytes] | None:
    """(whether it puts, else deletes; the key) of a message that begins so; None for any other one."""
    found = _LINE.match(data) or _REDIS.match(data)
    return None if found is None else (found[1].upper() in _PUTS, found[2])


def head_of(data: bytes, first: int, size: int) -> bytes:
    """The bytes of a message before its KV, without the lengths in them: packed KV is as long as it happens
    to be.

    Args:
        data: its first bytes.
        first: where the KV begins.
        size: of the message.
    """
    head = data[:first]
    for length in (size, size - first):
        for width in _WIDTHS:
            for order in ("little", "big"):
                head = head.replace(length.to_bytes(width, order), bytes(width))
    return head


class _Heads:
    """Of messages to one peer, as long before their KV as each other. ``gone``: the operations whose KV was
    sent behind a head that came again with other KV."""

    __slots__ = ("differ", "first", "gone")

    def __init__(self, first: bytes) -> None:
        self.first = first
        self.differ = False
        self.gone: list[Op] = []


class Keys:
    """Of this process. Threads share it; each of its changes is one step of the interpreter."""

    def __init__(self) -> None:
        self._ops: OrderedDict[Key, Sequence[Held]] = OrderedDict()
        self._heads: dict[tuple[str, int], _Heads] = {}

    def forget(self) -> None:
        self._ops.clear()
        self._heads.clear()

    def put_behind(self, peer: str, head: bytes, held: Sequence[Held]) -> list[Op]:
        """KV was put by a message whose first bytes are ``head``; the operations whose KV it, or an earlier
        message, may have replaced. Heads that are all alike name nothing."""
        if len(head) < _LEAST_HEAD or not held:
            return []
        if len(self._heads) > _MOST_LENGTHS:
            self._heads.clear()
        heads = self._heads.setdefault((peer, len(head)), _Heads(head))
        heads.differ |= head != heads.first
        heads.gone = [*heads.gone, *self.put((peer, _BEHIND + head), held)][-_MOST_WAITING:]
        if not heads.differ:
            return []
        gone, heads.gone = heads.gone, []
        return gone

    def put(self, key: Key, held: Sequence[Held]) -> list[Op]:
        """KV was put under a key; the operations whose KV it replaced."""
        if not held:
            return []  # whatever it was, it could not be read
        before = self._ops.pop(key, ())
        self._ops[key] = held
        for one in held:
            one.op.sent_whole |= one.whole
        if len(self._ops) > _MOST_KEYS:
            self._ops.popitem(last=False)
        pieces = {piece for one in held for piece in one.op.pieces}
        # The first and the last piece are the same where the same was put again; others now and then.
        return self._gone(
            [one for one in before if sum(p in pieces for p in one.op.pieces) * 2 < len(one.op.pieces)]
        )

    def delete(self, key: Key) -> list[Op]:
        """A key was deleted; the operations whose KV stood there."""
        return self._gone(self._ops.pop(key, ()))

    def _gone(self, before: Sequence[Held]) -> list[Op]:
        gone = [one for one in before if (one.whole or not one.op.sent_whole) and not one.op.in_file]
        everywhere = [one for held in list(self._ops.values()) for one in held] if gone else []
        still = {(id(one.op), one.whole) for one in everywhere}
        return [one.op for one in gone if (id(one.op), one.whole) not in still]


KEYS = Keys()
