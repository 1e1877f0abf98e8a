"""A stand-in for the kvblockd daemon: keeps blobs in memory, and says at its end which keys it holds.

``python kvb_server.py OUT.json`` prints its port and serves until its standard input ends. Frames are those
of the client's own package (``kvblockd.protocol``).
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
from pathlib import Path
from typing import Any

from kvblockd import protocol as p  # type: ignore

FRAME = 16 << 20
BLOBS: dict[bytes, bytes] = {}


class Served:
    """One connection."""

    def __init__(self, link: socket.socket) -> None:
        self.file = link.makefile("rwb")
        self.parts: dict[bytes, bytearray] = {}

    def run(self) -> None:
        while len(head := self.file.read(p.HEADER_SIZE)) == p.HEADER_SIZE:
            header = p.Header.parse(head)
            body = self.file.read(header.payload_len)
            answer = self.answer(header, body)
            if answer is not None:
                reply = p.Header(header.opcode, flags=p.F_RESP, ns=header.ns, request_id=header.request_id)
                reply.payload_len = len(answer)
                self.file.write(reply.pack() + answer)
                self.file.flush()

    def answer(self, header: Any, body: bytes) -> bytes | None:
        if header.opcode == p.Op.HELLO:
            name = b"stand-in"
            # protocol, features, eight limits, length of the name
            limits = (128, FRAME, 1 << 30, 1, 1 << 20, 1000, 1000, 1000)
            hello = struct.pack("<B3xQ8IHH", p.VERSION1, p.FEAT_EXISTS_BITMAP, *limits, len(name), 0)
            return bytes(p.pack_preamble(p.Status.OK, 0) + hello + name)
        if header.opcode == p.Op.PUT_STREAM:
            return self.put(header, body)
        if header.opcode == p.Op.BATCH_EXISTS:
            return self.exists(_keys(body))
        if header.opcode == p.Op.BATCH_GET:
            return self.get(_keys(body))
        return bytes(p.pack_preamble(p.Status.ERR_UNSUPPORTED, 0))

    def put(self, header: Any, body: bytes) -> bytes | None:
        step = p.subop(header.flags)
        if step == p.PUT_CHUNK:
            self.parts[header.key] += body
            return None
        status = p.Status.OK
        if step == p.PUT_BEGIN and header.key in BLOBS:
            status = p.Status.OK_EXISTS
        elif step == p.PUT_BEGIN:
            self.parts[header.key] = bytearray()
        elif step == p.PUT_COMMIT:
            BLOBS[header.key] = bytes(self.parts.pop(header.key))
        return bytes(p.pack_preamble(status, 0))

    def exists(self, keys: list[bytes]) -> bytes:
        there = [key in BLOBS for key in keys]
        row = there.index(False) if False in there else len(there)
        each = bytes(int(p.Status.OK if one else p.Status.NOT_FOUND) for one in there)
        each += bytes(-len(each) % 8)
        return bytes(p.pack_preamble(p.Status.OK, len(keys)) + struct.pack("<II", row, 0) + each)

    def get(self, keys: list[bytes]) -> bytes:
        import xxhash

        out = bytes(p.pack_preamble(p.Status.OK, len(keys))) + struct.pack("<II", 0, len(keys))
        for key in keys:
            blob = BLOBS.get(key)
            status = p.Status.NOT_FOUND if blob is None else p.Status.OK
            check = 0 if blob is None else xxhash.xxh3_64(blob).intdigest()
            out += struct.pack("<B3xIQ", int(status), len(blob or b""), check)
        return out + b"".join(BLOBS.get(key, b"") for key in keys)


def _keys(body: bytes) -> list[bytes]:
    count = struct.unpack_from("<I", body)[0]
    return [body[8 + 32 * i : 40 + 32 * i] for i in range(count)]


def main() -> int:
    server = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            link, _ = server.accept()
            threading.Thread(target=Served(link).run, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    print(server.getsockname()[1], flush=True)
    sys.stdin.read()
    sizes = {key.hex(): len(blob) for key, blob in BLOBS.items()}
    Path(sys.argv[1]).write_text(json.dumps(sizes), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
