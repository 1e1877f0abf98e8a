"""A small HTTP server for one text: what Prometheus asks for at ``/metrics``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvtrace.errors import KvtraceError


class MetricsServer(ThreadingHTTPServer):
    """Answers ``GET /metrics`` with a new text each time; one is made at a time.

    Args:
        host: where it listens.
        port: 0 for any that is free.

    Raises:
        KvtraceError: the port is taken, or the host is not this machine's.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, content_type: str, text: Callable[[], str]) -> None:
        self._text, self._lock, self.content_type = text, threading.Lock(), content_type
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise KvtraceError(f"cannot listen on {host}:{port}", why, "choose another --port") from None

    def text(self) -> str:
        with self._lock:
            return self._text()


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer
    timeout = 30

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/metrics", "/"):
            self.send_error(404)
            return
        body = self.server.text().encode()
        self.send_response(200)
        self.send_header("Content-Type", self.server.content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Every scrape would be a line."""
