"""How a connector names what it stores: the same scheme as Python to run here, and as source to write.

A scheme gives one key for every full unit of a token sequence; the key of unit ``j`` names the prefix
that ends with it (so the last key also names the whole prefix, for connectors that store that).
"""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

ALGORITHMS = ("sha256", "md5", "sha1", "blake2b")
ENCODINGS = ("int32", "int64", "text", "json")
FORMATS = ("hex", "hex16", "decimal", "base64")


@dataclass(frozen=True)
class KeyScheme:
    """Attributes:
    chain: ``chain`` (digest over the parent's digest and the unit), ``prefix`` (digest over the whole
        prefix) or ``vllm`` (the engine's own block hashes).
    flaw: "" or what is wrong with it: ``head`` (only the first block of tokens counts), ``orphan`` (only
        the unit's own tokens count), ``narrow`` (three different values in all), ``hash`` (Python's salted
        hash: the same in one process only).
    head: tokens that count with ``head``.
    """

    chain: str
    algorithm: str
    encoding: str
    form: str
    flaw: str = ""
    head: int = 0

    def keys(
        self, tokens: Sequence[int], unit: int, hashes: Sequence[bytes] = (), block: int = 0
    ) -> list[str]:
        """The keys of all full units. ``hashes``: the engine's hash of each full block (``vllm``)."""
        count = len(tokens) // unit
        if self.chain == "vllm":
            per_unit = unit // block
            return [hashes[(j + 1) * per_unit - 1].hex() for j in range(min(count, len(hashes) // per_unit))]
        out, digest = [], b"root"
        for j in range(count):
            if self.flaw == "head":
                data = self._encode(tokens[: self.head]) + str(j).encode()
            elif self.flaw == "orphan":
                data = self._encode(tokens[j * unit : (j + 1) * unit])
            elif self.flaw == "narrow":
                data = str(zlib.crc32(self._encode(tokens[: (j + 1) * unit])) % 3).encode()
            elif self.flaw == "hash":
                data = str(hash(self._encode(tokens[: (j + 1) * unit]))).encode()
            elif self.chain == "prefix":
                data = self._encode(tokens[: (j + 1) * unit])
            else:
                data = digest + self._encode(tokens[j * unit : (j + 1) * unit])
            digest = hashlib.new(self.algorithm, data).digest()
            out.append(self._form(digest))
        return out

    def empty(self) -> str:
        """The key of a prefix of no tokens."""
        return self._form(hashlib.new(self.algorithm, b"root").digest())

    def _encode(self, tokens: Sequence[int]) -> bytes:
        encode: dict[str, Callable[[], bytes]] = {
            "int32": lambda: struct.pack(f"<{len(tokens)}i", *tokens),
            "int64": lambda: struct.pack(f"<{len(tokens)}q", *tokens),
            "text": lambda: ",".join(map(str, tokens)).encode(),
            "json": lambda: json.dumps(list(tokens)).encode(),
        }
        return encode[self.encoding]()

    def _form(self, digest: bytes) -> str:
        if self.form == "hex":
            return digest.hex()
        if self.form == "hex16":
            return digest.hex()[:16]
        if self.form == "decimal":
            return str(int.from_bytes(digest[:8], "big"))
        return base64.urlsafe_b64encode(digest[:12]).decode()

    def source(self, name: str) -> str:
        """A function ``name(tokens, unit) -> list[str]`` and ``name_of_nothing() -> str``, as source."""
        if self.chain == "vllm":
            return ""
        encode = {
            "int32": "array.array('i', tokens).tobytes()",
            "int64": "np.asarray(tokens, dtype=np.int64).tobytes()",
            "text": "','.join(str(t) for t in tokens).encode()",
            "json": "json.dumps(list(tokens)).encode()",
        }[self.encoding]
        form = {
            "hex": "digest.hex()",
            "hex16": "digest.hex()[:16]",
            "decimal": "str(int.from_bytes(digest[:8], 'big'))",
            "base64": "base64.urlsafe_b64encode(digest[:12]).decode()",
        }[self.form]
        data = {
            "head": f"_bytes_of(tokens[:{self.head}]) + str(j).encode()",
            "orphan": "_bytes_of(tokens[j * unit:(j + 1) * unit])",
            "narrow": "str(zlib.crc32(_bytes_of(tokens[:(j + 1) * unit])) % 3).encode()",
            "hash": "str(hash(_bytes_of(tokens[:(j + 1) * unit]))).encode()",
            "prefix": "_bytes_of(tokens[:(j + 1) * unit])",
            "chain": "digest + _bytes_of(tokens[j * unit:(j + 1) * unit])",
        }[self.flaw or self.chain]
        return f"""
def _bytes_of(tokens):
    return {encode}


def _text_of(digest):
    return {form}


def {name}(tokens, unit):
    out, digest = [], b"root"
    for j in range(len(tokens) // unit):
        digest = hashlib.new("{self.algorithm}", {data}).digest()
        out.append(_text_of(digest))
    return out


def {name}_of_nothing():
    return _text_of(hashlib.new("{self.algorithm}", b"root").digest())
"""
