"""What left in compressed form, made whole again, so that KV is found in it: zlib and gzip.

A stream is known by its first bytes. A wrong guess fails within its first few hundred, and nothing is said.
What comes out of one stream is bounded; it is looked through and forgotten. Where nothing was ever found in
streams they are left alone after a while.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from heapq import merge
from itertools import islice
from typing import Any, NamedTuple

from kvtrace.agent.left.pieces import LENGTH

_MOST_BYTES = 16 << 20
"""That come out of the streams in some bytes."""
_LEAST_BYTES = 1024
"""Of bytes that may be a save; questions are shorter."""
_MOST_TRIES = 256
"""Places in some bytes at which one may begin."""
_PROBE = 512
_BEGINS = re.compile(rb"\x78[\x01\x5e\x9c\xda]"), re.compile(rb"\x1f\x8b\x08")
"""Of zlib and gzip; two searches are 20 times as fast as one for both."""
_AUTO = 47
"""zlib's wbits for a header of its own or of gzip."""
_BLIND = 64
"""How often nothing was found, after which it is not looked for any more."""


class Stream(NamedTuple):
    """``place``: where it stands in the bytes, ``packed``: some of them there, ``data``: what it holds."""

    place: int
    packed: bytes
    data: bytes


class Unpacker:
    """Of bytes that come in pieces, as through one socket: a stream may go on in the next piece."""

    def __init__(self) -> None:
        self._stream: Any = None
        self._room = 0
        self._tail = b""

    @property
    def open(self) -> bool:
        """Whether a stream goes on behind the bytes that came."""
        return self._stream is not None

    def streams(self, data: bytes) -> list[Stream]:
        """What is held by the streams in ``data``, each as far as it goes."""
        found: list[Stream] = []
        at = 0
        if not WORTH:
            return found
        if self._stream is not None:
            at, out = self._feed(data)
            if out:
                found.append(Stream(0, b"", out))
        for begin in islice(_begins(data, at), _MOST_TRIES):
            room = _MOST_BYTES - sum(len(one.data) for one in found)
            if self._stream is not None or room <= 0:
                break
            if begin >= at and _is_stream(data[begin : begin + _PROBE]):
                self._stream, self._room, self._tail = zlib.decompressobj(_AUTO), room, b""
                used, out = self._feed(data[begin:])
                if out:
                    at = begin + used
                    found.append(Stream(begin, data[begin : begin + LENGTH], out))
        WORTH.looked(len(data))
        return found

    def _feed(self, data: bytes) -> tuple[int, bytes]:
        """(how many of these bytes are the open stream's, what they hold behind the end of what came before;
        none where it is no stream)"""
        stream = self._stream
        try:
            out = stream.decompress(data, self._room)
        except zlib.error:
            self._stream = None
            return 0, b""
        self._room -= len(out)
        if stream.eof or self._room <= 0:
            self._stream = None
        out, self._tail = self._tail + out, (self._tail + out)[-LENGTH:]
        return len(data) - len(stream.unused_data), out


def _begins(data: bytes, at: int) -> Iterator[int]:
    """Where streams may begin from there on, in their order."""
    return merge(*((found.start() for found in one.finditer(data, at)) for one in _BEGINS))


def _is_stream(data: bytes) -> bool:
    try:
        zlib.decompressobj(_AUTO).decompress(data, _PROBE)
    except zlib.error:
        return False
    return True


class Worth:
    """Whether to look into streams. Of this process; threads share it."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._missed, self._found = 0, False

    def __bool__(self) -> bool:
        return self._found or self._missed < _BLIND

    def looked(self, size: int) -> None:
        """For streams, in so many bytes."""
        self._missed += size >= _LEAST_BYTES

    def found(self) -> None:
        """KV, in a stream."""
        self._found = True


WORTH = Worth()
