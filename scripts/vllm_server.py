"""A ``vllm serve`` on this machine: a free port, its first healthy answer, requests over HTTP."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from typing import Any


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class VllmServer:
    """A server that was started. Its process is ``process``, and it listens on ``port`` of the loopback."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port

    def wait_until_ready(self, seconds: float) -> None:
        """Until it is healthy.

        Raises:
            RuntimeError: it ended, or was not healthy in so many seconds.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended while starting, exit code {self.process.returncode}")
            try:
                if self.call("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.2)  # not listening yet: the condition is asked again
        raise RuntimeError(f"the server was not ready in {seconds:.0f} s")

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        """The status, and the answer; {} where it has no body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            text = json.dumps(body) if body is not None else None
            connection.request(method, path, text, {"Content-Type": "application/json"})
            response = connection.getresponse()
            raw = response.read()
            return response.status, json.loads(raw) if raw else {}
        finally:
            connection.close()
