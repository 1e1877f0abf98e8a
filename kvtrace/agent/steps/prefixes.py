"""Keyed digests of a prompt and of its prefixes: equal tokens can be told, none recovered.

BLAKE2b keyed with the run's random key (in memory only, never on disk), cut to 63 bits. One
pass over the tokens, an intermediate digest at each cut.
Once per request, at its arrival, and with each next part of a session: far less than the prompt itself takes.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import Any, NamedTuple

from kvtrace.agent.state import AGENT

MAX_PREFIXES = 256
_MASK = (1 << 63) - 1


class Digests(NamedTuple):
    prompt: int
    """Of all tokens; 0 where there is none."""
    aligned: int
    """Of the longest block-aligned proper prefix; 0 where that is empty."""
    stride: int
    """Tokens between two prefixes: the block size times a power of two, so that the strides
    of a short and of a long prompt meet; 0 where ``prefixes`` is empty."""
    prefixes: list[int]
    """Of the first ``stride``, ``2 * stride``, ... tokens; at most :data:`MAX_PREFIXES`."""


def digests(tokens: Any, block: int, key: bytes) -> Digests:
    """One pass over a prompt's token ids (a sequence of int, or None)."""
    if not tokens:
        return Digests(0, 0, 0, [])
    count = len(tokens)
    data = memoryview(array("q", tokens)).cast("B")
    aligned = (count - 1) // block * block if block > 0 else 0
    stride = block if block > 0 and count >= block else 0
    while stride and count // stride > MAX_PREFIXES:
        stride *= 2
    cuts = set(range(stride, count + 1, stride)) if stride else set()
    hasher = hashlib.blake2b(key=key, digest_size=8)
    at = 0
    prefix = 0
    prefixes: list[int] = []
    for cut in sorted(cuts | {aligned}) if aligned else sorted(cuts):
        hasher.update(data[at * 8 : cut * 8])
        at = cut
        value = _number(hasher)
        if cut == aligned:
            prefix = value
        if cut in cuts:
            prefixes.append(value)
    hasher.update(data[at * 8 :])
    return Digests(_number(hasher), prefix, stride, prefixes)


def of_request(request: Any, block: int) -> Digests:
    """Of the prompt of vLLM's Request, as far as it has come."""
    key = key_of(request, AGENT.config.salt)
    return digests(tokens_of(request, key), block, key)


def tokens_of(request: Any, key: bytes) -> Any:
    """A prompt's token ids, as far as they decide about its KV; None where they do not.

    All placeholders of all images are one token: here stands in their place what is made of which image it
    is, and of the place in it. Of a prompt that comes as vectors no token is known.

    Args:
        request: vLLM's Request; attributes that a version lacks count as empty.
    """
    tokens = request.prompt_token_ids
    if getattr(request, "prompt_embeds", None) is not None:
        return None
    placed = [item for item in getattr(request, "mm_features", None) or () if _place(item) is not None]
    if not tokens or not placed:
        return tokens
    told = list(tokens)
    for item in placed:
        place = _place(item)
        first, end = place.offset, min(place.offset + place.length, len(told))
        number = digest_of(str(getattr(item, "identifier", "")), key)
        told[first:end] = [(number + at) & _MASK for at in range(end - first)]
    return told


def _place(item: Any) -> Any:
    return getattr(item, "mm_position", None)


def key_of(request: Any, key: bytes) -> bytes:
    """The key for a request's digests. What makes equal tokens different KV (LoRA adapter, cache salt,
    images of which the place in the prompt is not known) makes another key: a store that keeps those apart
    does right.

    Args:
        request: vLLM's Request; attributes that a version lacks count as empty.
    """
    lora = getattr(request, "lora_request", None)
    parts = [
        str(getattr(lora, "lora_name", None) or getattr(lora, "lora_int_id", "")) if lora is not None else "",
        str(getattr(request, "cache_salt", None) or ""),
        *(
            str(getattr(item, "identifier", ""))
            for item in getattr(request, "mm_features", None) or ()
            if _place(item) is None
        ),
        *(str(item) for item in getattr(request, "mm_hashes", None) or ()),
    ]
    if not any(parts):
        return key
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "replace"), key=key, digest_size=32).digest()


def digest_of(text: str, key: bytes) -> int:
    """The same for a name (a path): never 0, which means "none" in a record."""
    return _number(hashlib.blake2b(text.encode("utf-8", "replace"), key=key, digest_size=8)) or 1


def _number(hasher: Any) -> int:
    # digest() leaves the hash open for more: it finishes a copy.
    return int.from_bytes(hasher.digest(), "little") & _MASK
