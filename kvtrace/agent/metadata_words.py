"""What names in a connector's metadata say: store or load, blocks, tokens, positions.

By words, not by letters: ``already`` is no read, ``reqs_to_offload`` no load.
"""

from __future__ import annotations

import re

from kvtrace.trace.format import Flag

ID_FIELDS = {"req_id", "request_id", "rid", "id"}
SLOT_FIELDS = {"slot_mapping", "slots", "slot_ids", "slot_indices"}
BLOCK_FIELDS = {"block_ids", "blocks", "block_table", "gpu_block_ids", "local_block_ids"}
TOKEN_FIELDS = {
    "num_tokens", "token_ids", "tokens", "num_token", "token_count", "prompt_token_ids", "n_tokens",
}  # fmt: skip

_STORE = (
    "store", "storing", "save", "saving", "put", "write", "writing", "send", "offload", "dump", "persist",
)  # fmt: skip
_LOAD = (
    "load", "recv", "receiv", "fetch", "read", "restor", "retriev", "onload", "reload", "prefetch",
)  # fmt: skip
_START = {"start", "begin", "from", "offset", "skip"}
_END = {"end", "stop", "upto", "until"}
_RANGE = {"span", "range", "interval", "extent"}
_NO_SIZE = {
    "attempt", "attempts", "deadline", "dp", "engine", "epoch", "expiry", "generation", "group", "hash", "id",
    "idx", "index", "layer", "layers", "node", "port", "pp", "priority", "rank", "remote", "retries", "seed",
    "seq", "step", "time", "timeout", "timestamp", "tp", "ttl", "version", "world",
}  # fmt: skip
"""Words of numbers that count no tokens."""
_NO_BLOCKS = {"token", "tokens", "hash", "hashes", "layer", "layers", "rank", "ranks", "remote"}

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")


def words(name: str) -> list[str]:
    """``numTokens_toSave`` -> num, tokens, to, save."""
    return [word.lower() for word in _WORD.findall(name)]


def direction(name: str) -> int:
    """Flag.STORE, Flag.LOAD, or 0 where the name says neither."""
    for word in words(name):
        if word.startswith(_LOAD):
            return Flag.LOAD
        if word.startswith(_STORE):
            return Flag.STORE
    return 0


def negated(name: str) -> bool:
    return bool({"skip", "no", "not", "disable", "disabled", "never"} & set(words(name)))


def is_start(name: str) -> bool:
    return bool(_START & set(words(name)))


def is_end(name: str) -> bool:
    return bool(_END & set(words(name)))


def is_range(name: str) -> bool:
    return bool(_RANGE & set(words(name))) or (is_start(name) and is_end(name))


def counts_nothing(name: str) -> bool:
    """Whether a number of this name is surely no size and no position."""
    return bool(_NO_SIZE & set(words(name)))


def may_be_blocks(name: str) -> bool:
    return not _NO_BLOCKS & set(words(name))
