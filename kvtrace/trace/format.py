"""The spool file: byte layout, record kinds, flags and codes. What the columns are: ``trace/rows.py``.

The one thing that the agent (inside vLLM) and the analysis (on any machine) share.
Standard library only: this module is imported inside vLLM's processes.

A spool is a header followed by records of 64 bytes, each eight little-endian signed
64-bit words. Word 0 says what the record is (see :func:`pack_head`), words 1 to 7 are
the columns of its kind. Text never stands in a record: a
``NAME`` record gives a small integer to a string once, a ``FACT`` record announces a
JSON document; the bytes of both follow at once in ``BYTES`` records (56 bytes each,
zero-padded). A kind of zero ends the file: what a killed process left behind is a valid
prefix, and a preallocated tail of zeros is no record.

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
VERSION = 1
WORDS = 8
RECORD_SIZE = 8 * WORDS
PAYLOAD_BYTES = RECORD_SIZE - 8
SPOOL_SUFFIX = ".kvt"
SPOOL_DIR = "spool"

_HEADER = struct.Struct("<8sIIII40x")  # magic, version, record size, JSON length, CRC of the JSON
assert _HEADER.size == RECORD_SIZE

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


class Flag(IntEnum):
    RAISED = 1
    """The traced call raised; it was re-raised untouched."""
    STORE = 2
    LOAD = 4
    ASYNC = 8
    DUMMY = 16
    """A dummy, profile or warm-up run: never counted as a real step."""
    FIRST = 32
    """CHUNK: the first chunk of a request, or the first after a preemption (RESUMED)."""
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
    """EFFECT: the file of ``target`` held something before, and was written anew."""


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


class Stop(IntEnum):
    """TRAILER: why this process stopped recording."""

    CLEAN = 1
    SIZE_LIMIT = 2
    WRITE_FAILED = 3
    AGENT_ERROR = 4


# Connector methods, in the order in which vLLM 0.32.0 calls them. Codes are part of the
# format: append, never renumber.
HOOKS: tuple[str, ...] = (
    "",
    "register_kv_caches",
    "bind_connector_metadata",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "clear_connector_metadata",
    "handle_preemptions",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "take_events",
    "shutdown",
    "get_transfer_results",
    "get_kv_connector_stats",
    "build_connector_worker_meta",
    "register_cross_layers_kv_cache",
)
HOOK_CODE = {name: code for code, name in enumerate(HOOKS) if name}

OPS: tuple[str, ...] = (
    "",
    "unified_attention",
    "unified_attention_with_output",
    "unified_mla_attention",
    "unified_mla_attention_with_output",
    "unified_kv_cache_update",
    "unified_mla_kv_cache_update",
    "dummy_attention",
)
OP_CODE = {name: code for code, name in enumerate(OPS) if name}

# The columns of words 1..7, per kind. "req", "layer" and "*_name" are ids of NAME records
# (0 = none). Times end in nothing and are nanoseconds; counts are -1 where unknown.
COLUMNS: dict[Kind, tuple[str, str, str, str, str, str, str]] = {
    # id, length of the text in bytes, CRC-32 of the text
    Kind.NAME: ("id", "length", "crc", "_4", "_5", "_6", "_7"),
    # 56 bytes of the preceding NAME or FACT
    Kind.BYTES: ("_1", "_2", "_3", "_4", "_5", "_6", "_7"),
    # code = Fact; the JSON follows
    Kind.FACT: ("t", "length", "crc", "_4", "_5", "_6", "_7"),
    # one call of a connector method. code = HOOKS, lane = connector ordinal in the process.
    # slots, entries: what the metadata bound at that moment declares for this hook's
    # direction (store for save_kv_layer, wait_for_save and bind; load for start_load_kv and
    # wait_for_layer_load; both are the step's totals). extra: load slots for bind;
    # cudagraph runtime mode for start_load_kv; number of ids for get_finished
    # (sending << 32 | receiving), of blocks for get_block_ids_with_load_errors; name of the
    # exception's type where Flag.RAISED.
    Kind.HOOK: ("t0", "t1", "step", "layer", "slots", "entries", "extra"),
    # one run of an attention or KV-cache update body. code = OPS, lane = Dispatch.
    # tokens: rows of the query (padded batch); mode: CUDA-graph runtime mode of the
    # forward context (0 NONE, 1 PIECEWISE, 2 FULL, -1 unknown); skip: Skip
    Kind.OP: ("t0", "t1", "step", "layer", "tokens", "mode", "skip"),
    # one Scheduler.schedule(). gone = preempted << 32 | finished ids handed to the workers
    Kind.STEP: ("t0", "t1", "step", "tokens", "requests", "new_requests", "gone"),
    # prompt tokens [start, start + tokens) of one request computed in this step. Decode
    # steps write none: a request's decode tokens follow from its FINISH.
    Kind.CHUNK: ("t", "req", "step", "start", "tokens", "prompt", "block"),
    # arrival at the scheduler. digest: 63-bit keyed BLAKE2b of the prompt's token ids;
    # prefix: the same of the longest block-aligned proper prefix ((n - 1) // block * block
    # tokens), 0 where that is empty. The key is random per run and stays in memory.
    Kind.REQUEST: ("t", "req", "_3", "prompt", "digest", "prefix", "max_tokens"),
    # get_num_new_matched_tokens: local = tokens the GPU prefix cache holds, external = the
    # connector's answer (NONE_ANSWER where it returned None), Flag.ASYNC
    Kind.LOOKUP: ("t0", "t1", "step", "req", "local", "external", "_7"),
    # update_state_after_alloc: external = tokens the scheduler accepted from the connector
    Kind.ALLOC: ("t0", "t1", "step", "req", "external", "blocks", "_7"),
    # one entry of the metadata that build_connector_meta returned. Flag.STORE / LOAD.
    # slots: KV slots it names; tokens: tokens it speaks of; start: position of its first
    # slot in the request; each -1 where the entry does not say
    Kind.META: ("t", "req", "step", "slots", "tokens", "start", "_7"),
    Kind.PREEMPT: ("t", "req", "step", "computed", "_5", "_6", "_7"),
    # request left the scheduler. computed: tokens whose KV was computed or reused (prompt
    # and decode), status_name: vLLM's RequestStatus
    Kind.FINISH: ("t", "req", "step", "computed", "output", "status_name", "preemptions"),
    # one execute_model on a worker. mode as in OP, of the target model's forward; padded: tokens of
    # the batch that the model ran, padding included (0 unknown)
    Kind.EXEC: ("t0", "t1", "step", "tokens", "requests", "mode", "padded"),
    # a quiet step's calls of one hook or op past the spool's size limit: code as HOOK (lane
    # bit 7 clear) or OP (lane bit 7 set); layer_set names a JSON list of layer name ids
    Kind.QUIET: ("t0", "layer_set", "step", "count", "sum", "min", "max"),
    # what one sampled hook call really did, measured. code = HOOKS, lane = connector ordinal,
    # Flag.STORE (read from the KV tensor) or LOAD (written into it). slots: KV slots of this
    # layer that tensor operations copied out of / into its storage, -1 where none could be
    # watched; bytes, files: bytes in, and number of, files that the call opened for writing;
    # target: 63-bit keyed digest of the first such path (0 none)
    Kind.EFFECT: ("t", "layer", "step", "slots", "bytes", "files", "target"),
    # keyed 63-bit digests of a prompt's prefixes of first, first + stride, ... tokens (0 = past
    # the end); the key is the run's, as in REQUEST
    Kind.PREFIX: ("req", "first", "stride", "d0", "d1", "d2", "d3"),
    # an asynchronous transfer of a request began (Flag.STORE: request_finished kept its blocks)
    Kind.OPEN: ("t", "req", "step", "_4", "_5", "_6", "_7"),
    # a request's asynchronous transfer was reported finished (Flag.STORE or LOAD), by a worker
    # (get_finished) or to the scheduler (update_connector_output). failed: 1 where the
    # connector said so
    Kind.DONE: ("t", "req", "step", "failed", "_5", "_6", "_7"),
    # one call timed on the device, by a pair of events around it. code as HOOK (lane bit 7 clear)
    # or OP (lane bit 7 set). t0, host: host time of its begin, and host ns that it took. device: ns
    # between the events, -1 unknown. before: device ns that were still to run on its stream when it
    # began, a lower bound. streams: index of the stream at its begin << 32 | at its end
    Kind.DEVICE: ("t0", "step", "layer", "device", "before", "host", "streams"),
    # one step whose calls were timed on the device. calls: pairs with times; untimed: calls that got
    # none (no event free, stream capturing); lost: pairs given up. own: host ns that the timing
    # itself took; busy: host ns of the steps since the last such record, this one included
    Kind.TIMED: ("t", "step", "calls", "untimed", "lost", "own", "busy"),
    # from this step on, blocks [block, block + count) stand at places [first, first + count) of the
    # request's block table in KV cache group `group`; count < 0: the ids fall. Flag.FIRST: the table begins
    # anew; Flag.RESUMED: after a preemption. The null block (0) is not written
    Kind.BLOCKS: ("t", "req", "step", "group", "first", "block", "count"),
    # code = Stop, lost = records dropped after that
    Kind.TRAILER: ("t", "lost", "_3", "_4", "_5", "_6", "_7"),
}
COLUMN_INDEX: dict[Kind, dict[str, int]] = {
    kind: {name: i for i, name in enumerate(names, start=1)} for kind, names in COLUMNS.items()
}
DETAIL_IS_OP = QUIET_IS_OP = 0x80
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


def pack_header(facts: dict[str, object]) -> bytes:
    """The file's head: one 64-byte block and the process facts as JSON, padded to 64."""
    body = json.dumps(facts, separators=(",", ":"), default=str).encode()
    head = _HEADER.pack(MAGIC, VERSION, RECORD_SIZE, len(body), zlib.crc32(body))
    return head + body + b"\x00" * (-len(body) % RECORD_SIZE)


def unpack_header_block(block: bytes) -> tuple[int, int, int, int]:
    """(version, record size, JSON length, CRC) of a file's first 64 bytes.

    Raises:
        ValueError: the block is short or is not a spool's.
    """
    if len(block) < RECORD_SIZE:
        raise ValueError("shorter than a header")
    magic, version, record_size, length, crc = _HEADER.unpack(block[:RECORD_SIZE])
    if magic != MAGIC:
        raise ValueError("no kvtrace spool (wrong magic bytes)")
    return version, record_size, length, crc


def payload_words(data: bytes, role: int = 0) -> list[int]:
    """The BYTES records of a text, as a flat list of words."""
    head = pack_head(Kind.BYTES, role)
    words: list[int] = []
    for at in range(0, len(data), PAYLOAD_BYTES):
        part = data[at : at + PAYLOAD_BYTES].ljust(PAYLOAD_BYTES, b"\x00")
        words.append(head)
        words.extend(struct.unpack("<7q", part))
    return words
