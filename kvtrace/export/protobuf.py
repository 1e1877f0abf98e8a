"""The few wire types of Protocol Buffers that a Perfetto trace needs, as bytes of one field each.

https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

import struct

_FIXED64 = struct.Struct("<Q")
_MASK = (1 << 64) - 1


def varint(value: int) -> bytes:
    """A whole number; a negative one as its 64-bit two's complement."""
    value &= _MASK
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field: int, value: int) -> bytes:
    """int32, int64, uint32, uint64, bool, enum."""
    return varint(field << 3) + varint(value)


def fixed64(field: int, value: int) -> bytes:
    return varint(field << 3 | 1) + _FIXED64.pack(value & _MASK)


def block(field: int, value: bytes) -> bytes:
    """bytes, or a message."""
    return varint(field << 3 | 2) + varint(len(value)) + value


def text(field: int, value: str) -> bytes:
    return block(field, value.encode("utf-8", "backslashreplace"))
