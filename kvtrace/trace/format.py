"""The spool file: byte layout, record kinds, flags and codes. What the columns are: ``trace/rows.py``.

The one thing that the agent (inside vLLM) and the analysis (on any machine) share.
Standard library only: this module is imported inside vLLM's processes.

A spool is a header followed by records of 64 bytes, each eight little-endian signed
64-bit words. Word 0 says what the record is (see :func:`pack_head`), words 1 to 7 are
the columns of its kind. Text never stands in a record: a
``NAME`` record gives a small integer to a string once, a ``FACT`` record announces a
JSON document; the bytes of both follow at once in ``BYTES`` records (56 bytes each,
zero-padded). A block of records ends with a ``SEAL`` record, which holds their checksum: a block
that differs from it is left out. Behind the header there may be a window, in which a recorder that
maps it keeps the youngest blocks and, behind them, the records of the open one, which has no seal
yet; all other blocks follow. Version 2 had no window.

Times are ``time.perf_counter_ns()`` of the writing host; the header holds one pair of
(perf, wall) to place them. Steps are ``engine tag << 32 | n``: the tag names one
scheduler instance, ``n`` counts its ``schedule()`` calls from 1. Step 0 is "no step".
"""

from __future__ import annotations

import json
import struct
import zlib
from enum import IntEnum

MAGIC = b"KVTRACE\x00"
VERSION = 3
OLDEST = 2
"""That is read: it has no window."""
WORDS = 8
RECORD_SIZE = 8 * WORDS
PAYLOAD_BYTES = RECORD_SIZE - 8
SPOOL_SUFFIX = ".kvt"
SPOOL_DIR = "spool"
MOST_BLOCK = 1 << 14
"""Records of one block, at most."""
WINDOW = 1 << 12
"""Records that the window has room for."""
WINDOW_FULL = WINDOW - 3
"""How many of them, seals included, may stand there when the next one comes: there is always room for a SEAL,
the TRAILER and its SEAL."""

_HEADER = struct.Struct("<8sIIIII36x")  # magic, version, record size, JSON length, CRC, window's bytes
_SEALED = struct.Struct("<3q")  # head, number of the block, its records
_CRC = struct.Struct("<q32x")
assert _HEADER.size == _SEALED.size + _CRC.size == RECORD_SIZE

STEP_SHIFT = 32
STEP_MASK = (1 << STEP_SHIFT) - 1
UNKNOWN = -1
"""A count that could not be observed (never mixed up with zero)."""


class Kind(IntEnum):
    END = 0
    NAME = 1
    BYTES = 2
    FACT = 3
    HOOK = 4
    OP = 5
    STEP = 6
    CHUNK = 7
    REQUEST = 8
    LOOKUP = 9
    ALLOC = 10
    META = 11
    PREEMPT = 12
    FINISH = 13
    EXEC = 14
    QUIET = 15
    TRAILER = 16
    EFFECT = 17
    PREFIX = 18
    OPEN = 19
    DONE = 20
    DEVICE = 21
    TIMED = 22
    BLOCKS = 23
    SLOTS = 24
    OUTSIDE = 37
    PRINTS = 28
    SEAL = 30
    REPRINTS = 31
    GROWN = 33
    LAYERS = 34
    STATES = 36
    SKETCHES = 38


class Role(IntEnum):
    """Which side of vLLM wrote the record (one process can hold several)."""

    FRONT = 0
    SCHEDULER = 1
    WORKER = 2


class Fact(IntEnum):
    """JSON documents in a spool; the ``code`` of a ``FACT`` record."""

    TARGET = 1
    ENGINE = 2
    WORKER = 3
    CONNECTOR = 4
    ENGINE_ARGS = 5
    EXCEPTION = 6
    AGENT_ERROR = 7
    CLIENT_ID = 8
    SWALLOWED = 9
    LOG = 10
    CONFIG_KEYS = 11
    DEVICE = 12
    GRAPHS = 13
    START_FAILED = 14
    UNREADABLE_METADATA = 15
    WATCH_LIMITS = 16
    HAND_OVER = 17
    LOAD_ERRORS = 18
    CACHE_RESET = 19


class Flag(IntEnum):
    RAISED = 1
    """The traced call raised; it was re-raised untouched."""
    STORE = 2
    LOAD = 4
    ASYNC = 8
    """SLOTS, with LOAD: work in the background that was over by then may have written there by address."""
    DUMMY = 16
    """A dummy, profile or warm-up run: never counted as a real step."""
    FIRST = 32
    """CHUNK: the first chunk of a request, or the first after a preemption (RESUMED). OUTSIDE: the file held
    something before, and was written anew."""
    RESUMED = 64
    UNREADABLE = 128
    """The connector's metadata has a shape that the reader does not understand."""
    NO_METADATA = 256
    """HOOK on a worker: called while no connector metadata was bound."""
    NO_FORWARD = 512
    """EXEC: the step had no token to compute."""
    CAPTURE = 1024
    """OP: the body ran while a CUDA graph was being captured (no kernel ran, nothing was computed).
    EXEC: graphs were captured during this step. Neither is ever counted as coverage."""
    STREAMS = 2048
    """DEVICE: the call began on one stream and ended on another."""
    CAUGHT_UP = 4096
    """DEVICE: all that its stream held when the call began was done when the call returned."""
    REPLACED = 8192
    """OUTSIDE: the file has another name now, or none."""
    SHARED = 16384
    """SLOTS: another layer lies on the same bytes; that of the block's owner is meant."""


class Way(IntEnum):
    """What a connector's work went to outside the process; the code of an ``OUTSIDE`` record."""

    FILE = 1
    SOCKET = 2
    SQLITE = 3
    SHARED_MEMORY = 4
    NAME = 5
    """No bytes: a file lost its name, or got another one."""


class Dispatch(IntEnum):
    """How an attention op's body was reached; the detail of an ``OP`` record."""

    DISPATCHER = 0
    DIRECT = 1


class Skip(IntEnum):
    """OP: why the connector's per-layer hooks did not run around this body."""

    HOOKED = 0
    NO_CONNECTOR = 1
    NO_ATTN_METADATA = 2
    NO_CONNECTOR_METADATA = 3
    UNKNOWN = 4
    NOT_A_HOOK_SITE = 5
    """KV-cache update ops: vLLM never calls the connector there."""


MODES = {0: "NONE", 1: "PIECEWISE", 2: "FULL"}
"""CUDA-graph modes by vLLM's numbers for them, as OP and EXEC have them."""


class Stop(IntEnum):
    """TRAILER: why this process stopped recording."""

    CLEAN = 1
    SIZE_LIMIT = 2
    WRITE_FAILED = 3
    AGENT_ERROR = 4
    DESCRIPTOR_LOST = 5
    """Its code closed the descriptor of the spool, or opened something else under its number."""


DETAIL_IS_OP = 0x80
"""In the detail of a QUIET or DEVICE record: its code is an op's, not a hook's."""
NONE_ANSWER = -(1 << 62)

_THREAD_MAX = 0x7FFF


def pack_head(
    kind: int, role: int = 0, code: int = 0, detail: int = 0, flags: int = 0, thread: int = 0
) -> int:
    """Word 0: kind (bits 0-7), role (8-15), code (16-23), detail (24-31), flags (32-47),
    thread index within the process (48-62)."""
    return (
        kind
        | role << 8
        | code << 16
        | (detail & 0xFF) << 24
        | (flags & 0xFFFF) << 32
        | min(thread, _THREAD_MAX) << 48
    )


_SEAL_HEAD = pack_head(Kind.SEAL)


def pack_header(facts: dict[str, object], windowed: bool = False) -> bytes:
    """The file's head: one 64-byte block and the process facts as JSON, padded to 64."""
    body = json.dumps(facts, separators=(",", ":"), default=str).encode()
    window = WINDOW * RECORD_SIZE * windowed
    head = _HEADER.pack(MAGIC, VERSION, RECORD_SIZE, len(body), header_crc(VERSION, body), window)
    return head + body + b"\x00" * (-len(body) % RECORD_SIZE)


def header_crc(version: int, body: bytes) -> int:
    """The checksum of a header; it holds the version, too."""
    return zlib.crc32(body, version)


def seal(block: bytes | memoryview, number: int, seed: int) -> bytes:
    """The SEAL record behind `block` (whole records), the `number`-th of its spool, counted from 0.

    Args:
        seed: the header's CRC: a block of another spool does not fit.
    """
    words = _SEALED.pack(_SEAL_HEAD, number, len(block) // RECORD_SIZE)
    return words + _CRC.pack(zlib.crc32(words, zlib.crc32(block, seed)))


def unpack_header_block(block: bytes) -> tuple[int, int, int, int]:
    """(version, record size, JSON length, CRC) of a file's first 64 bytes.

    Raises:
        ValueError: the block is short or is not a spool's.
    """
    if len(block) < RECORD_SIZE:
        raise ValueError("shorter than a header")
    magic, version, record_size, length, crc, _ = _HEADER.unpack(block[:RECORD_SIZE])
    if magic != MAGIC:
        raise ValueError("no kvtrace spool (wrong magic bytes)")
    return version, record_size, length, crc


def window_of(block: bytes) -> int:
    """Bytes of the window behind the header, from a file's first 64 bytes; 0 where there is none.

    Raises:
        ValueError: it is neither.
    """
    _, version, _, _, _, window = _HEADER.unpack(block[:RECORD_SIZE])
    if version == OLDEST:
        return 0
    if window not in (0, WINDOW * RECORD_SIZE):
        raise ValueError("a window of another size")
    return int(window)


def payload_words(data: bytes) -> list[int]:
    """The BYTES records of a text, as a flat list of words."""
    head = pack_head(Kind.BYTES)
    words: list[int] = []
    for at in range(0, len(data), PAYLOAD_BYTES):
        part = data[at : at + PAYLOAD_BYTES].ljust(PAYLOAD_BYTES, b"\x00")
        words.append(head)
        words.extend(struct.unpack("<7q", part))
    return words
