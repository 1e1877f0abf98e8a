"""Which key of a store elsewhere holds which KV, for protocols whose messages begin with a verb and a key.

HTTP (``PUT /key``), Memcached (``set key``), Redis (``SET key``) and plain text like these. What is put under
a key takes the place of what stood there, and what is deleted is gone: then the KV that had been found in the
message before is not at rest any more. Where the same KV stands under another key, or has been found in a
file, nothing is said.

Of other protocols the key is not known. Where the bytes before the KV are the same in two messages, and such
bytes differ else, the second may have taken the place of the first. It has, where nothing but these bytes and
one operation's KV is in either message, and these bytes are a name: they differ in many places from those of
other messages, and no call sent other KV behind them twice, nor did other layers.

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
_LEAST_NAME = 6
"""Places in which the bytes before KV differ where they hold a name: a digest, an id. Numbers of a layer or
of a message differ in fewer."""
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


class Gone(NamedTuple):
    """KV of an operation behind a head that came again with other KV. ``replaced``: it was replaced, else it
    may have been."""

    op: Op
    replaced: bool


class _Heads:
    """Of messages to one peer, as long before their KV as each other. ``places``: of bytes in which they
    differ; ``names``: whether no head came twice where a name would not; ``gone``: what waits for heads that
    differ, and whether nothing else was in its message and in the later one."""

    __slots__ = ("first", "gone", "names", "places")

    def __init__(self, first: bytes) -> None:
        self.first = first
        self.places: set[int] = set()
        self.names = True
        self.gone: list[Gone] = []

    def saw(self, head: bytes) -> None:
        if head != self.first:
            self.places |= {at for at, one in enumerate(head) if one != self.first[at]}

    def take(self) -> list[Gone]:
        gone, self.gone = self.gone, []
        sure = self.names and len(self.places) >= _LEAST_NAME
        return [Gone(op, sure and alone) for op, alone in gone]


def _alone(held: Sequence[Held], first: int, size: int) -> bool:
    """Whether a message holds one operation's KV behind its first bytes, and nothing else."""
    return len(held) == 1 and held[0].whole and first + held[0].op.bytes == size


class Keys:
    """Of this process. Threads share it; each of its changes is one step of the interpreter."""

    def __init__(self) -> None:
        self._ops: OrderedDict[Key, Sequence[Held]] = OrderedDict()
        self._heads: dict[tuple[str, int], _Heads] = {}

    def forget(self) -> None:
        self._ops.clear()
        self._heads.clear()

    def put_behind(self, peer: str, head: bytes, held: Sequence[Held], size: int) -> list[Gone]:
        """KV was put by a message of ``size`` bytes that begins with ``head``; the operations whose KV it, or
        an earlier message, may have replaced. Heads that are all alike name nothing."""
        if len(head) < _LEAST_HEAD or not held:
            return []
        if len(self._heads) > _MOST_LENGTHS:
            self._heads.clear()
        heads = self._heads.setdefault((peer, len(head)), _Heads(head))
        heads.saw(head)
        key = peer, _BEHIND + head
        alone = _alone(held, len(head), size)
        before = self._ops.get(key, ())
        for op in self.put(key, held):
            one = before[0].op
            heads.names &= one.call != held[0].op.call and one.layer == held[0].op.layer
            heads.gone.append(Gone(op, alone and _alone(before, len(head), size)))
        heads.gone = heads.gone[-_MOST_WAITING:]
        return heads.take() if heads.places else []

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
