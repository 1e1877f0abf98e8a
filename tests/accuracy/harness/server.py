"""A small store server on the loopback interface, in a process of its own: ``python server.py KIND MODE``.

KIND: ``frame``, ``line`` or ``http`` (the protocols that kvgen.stores writes clients for). MODE: ``keep``;
``refuse`` (says no to every put); ``some`` (to every second one); ``late`` (answers puts after a second and
keeps nothing). Prints its port, and ends when its standard input does.
"""

from __future__ import annotations

import http.server
import itertools
import socketserver
import struct
import sys
import threading
import time
import urllib.parse

CONTENTS: dict[str, bytes] = {}
PUTS = itertools.count()
LATE_SECONDS = 1.0


def put(name: str, data: bytes, mode: str) -> bool:
    """Whether it is kept. ``!name`` is the harness's own way in, whatever the mode."""
    if name.startswith("!"):
        CONTENTS[name[1:]] = data
        return True
    if mode == "late":
        time.sleep(LATE_SECONDS)
        return False
    if mode == "refuse" or (mode == "some" and next(PUTS) % 2):
        return False
    CONTENTS[name] = data
    return True


def answer(op: str, name: str, data: bytes, mode: str) -> tuple[bool, bytes]:
    if op == "PUT":
        return put(name, data, mode), b""
    if op == "DEL":
        return CONTENTS.pop(name, None) is not None, b""
    return name in CONTENTS, CONTENTS.get(name, b"") if op == "GET" else b""


class Frames(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        names = {b"P": "PUT", b"G": "GET", b"H": "HAS", b"D": "DEL"}
        while True:
            head = self.rfile.read(7)
            if len(head) < 7:
                return
            op, size, length = struct.unpack(">cHI", head)
            name, data = self.rfile.read(size).decode(), self.rfile.read(length)
            fine, out = answer(names[op], name, data, MODE)
            self.wfile.write(struct.pack(">cI", b"+" if fine else b"-", len(out)) + out)


class Lines(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        words = self.rfile.readline().decode().split()
        if len(words) != 3:
            return
        data = self.rfile.read(int(words[2]))
        fine, out = answer(words[0], words[1], data, MODE)
        self.wfile.write(f"{'OK' if fine else 'REFUSED'} {len(out)}\n".encode() + out)


class Pages(http.server.BaseHTTPRequestHandler):
    def _do(self, op: str, good: int = 200) -> None:
        name = urllib.parse.unquote(self.path[1:])
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fine, out = answer(op, name, data, MODE)
        self.send_response(good if fine else 507 if op == "PUT" else 404)
        self.send_header("Content-Length", str(len(out)))
        self.end_headers()
        self.wfile.write(out)

    def do_PUT(self) -> None:
        self._do("PUT", 201)

    def do_GET(self) -> None:
        self._do("GET")

    def do_HEAD(self) -> None:
        self._do("HAS")

    def do_DELETE(self) -> None:
        self._do("DEL")

    def log_message(self, *_: object) -> None:
        pass


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_: object) -> None:
        """A client that went away is none of ours to report."""


if __name__ == "__main__":
    KIND, MODE = sys.argv[1:3]
    handler = {"frame": Frames, "line": Lines, "http": Pages}[KIND]
    server = Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()
