#!/usr/bin/env python3
"""A recorded run as a small archive for tests/real, without the paths of the machine that recorded it.

    python scripts/real/keep_run.py RUN OUT.tar.xz --hide PATH [PATH ...]

RUN: the directory of ``kvtrace run``. PATH: how paths to be hidden begin; each becomes another one of the
same length, so that the records stay where they are. Spools, run.json and rest.json are kept, their checksums
made anew.
"""

from __future__ import annotations

import argparse
import io
import json
import struct
import sys
import tarfile
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from kvtrace.trace import format as fmt  # noqa: E402
from kvtrace.trace import rows, sums  # noqa: E402

_WORDS = struct.Struct("<8q")
_HEADER = struct.Struct("<q")
_TEXTS = (fmt.Kind.NAME, fmt.Kind.FACT)


class Hidden:
    """Texts with other paths in them, of the same length."""

    def __init__(self, paths: list[str]) -> None:
        self._pairs = [
            (path.encode(), f"/home/{n}{'-kept' * len(path)}"[: len(path)].encode())
            for n, path in enumerate(sorted(paths, key=len, reverse=True))
        ]

    def __call__(self, text: bytes) -> bytes:
        for old, new in self._pairs:
            text = text.replace(old, new)
        return text


def spool(data: bytes, hidden: Hidden) -> bytes:
    """A spool with its texts hidden and its blocks sealed again.

    Raises:
        ValueError: it is no spool, or a block of it is not whole.
    """
    version, _, length, _ = fmt.unpack_header_block(data[: fmt.RECORD_SIZE])
    facts = json.loads(hidden(data[fmt.RECORD_SIZE : fmt.RECORD_SIZE + length]))
    head = fmt.pack_header(facts)
    _, _, size, seed = fmt.unpack_header_block(head[: fmt.RECORD_SIZE])
    if size != length or version != fmt.VERSION:
        raise ValueError("the header is of another version")
    out, block, at = bytearray(head), bytearray(), len(head)
    while at + fmt.RECORD_SIZE <= len(data):
        row = data[at : at + fmt.RECORD_SIZE]
        words = _WORDS.unpack(row)
        kind = rows.kind(words[0])
        if kind == fmt.Kind.SEAL:
            if words[2] * fmt.RECORD_SIZE != len(block):
                raise ValueError(f"the block before byte {at} is not whole")
            out += block + fmt.seal(block, words[1], seed)
            block.clear()
            at += fmt.RECORD_SIZE
            continue
        count = -(-words[2] // fmt.PAYLOAD_BYTES) if kind in _TEXTS else 0
        end = at + (1 + count) * fmt.RECORD_SIZE
        block += _text(data[at:end], hidden) if count else row
        at = end
    return bytes(out + block)


def _text(records: bytes, hidden: Hidden) -> bytes:
    """A NAME or FACT and the BYTES behind it."""
    words = list(_WORDS.unpack(records[: fmt.RECORD_SIZE]))
    parts = [
        records[at : at + fmt.RECORD_SIZE] for at in range(fmt.RECORD_SIZE, len(records), fmt.RECORD_SIZE)
    ]
    text = hidden(b"".join(part[_HEADER.size :] for part in parts)[: words[2]])
    words[3] = zlib.crc32(text)
    padded = text.ljust(len(parts) * fmt.PAYLOAD_BYTES, b"\x00")
    return _WORDS.pack(*words) + b"".join(
        part[: _HEADER.size] + padded[n * fmt.PAYLOAD_BYTES : (n + 1) * fmt.PAYLOAD_BYTES]
        for n, part in enumerate(parts)
    )


def keep(run: Path, out: Path, hidden: Hidden) -> None:
    with tarfile.open(out, "w:xz", preset=9) as archive:

        def add(name: str, data: bytes) -> None:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))

        for file in sorted((run / "spool").iterdir()):
            add(f"spool/{file.name}", spool(file.read_bytes(), hidden))
        for file in filter(Path.exists, (run / "run.json", run / "rest.json")):
            document = json.loads(hidden(file.read_bytes()))
            if "host" in document:
                document["host"] = "host"
            add(file.name, json.dumps(sums.summed(document), separators=(",", ":")).encode())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--hide", nargs="+", required=True, metavar="PATH")
    args = parser.parse_args()
    keep(args.run, args.out, Hidden(args.hide))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
