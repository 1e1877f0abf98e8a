"""Start a vLLM server (traced or not), talk to it over HTTP, stop it."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WRAPPER = Path(__file__).parent / "vua_vllm.py"
KVTRACE = [sys.executable, "-m", "kvtrace"]
START_SECONDS = 300


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """``vua-vllm serve`` of the tiny model with ExampleConnector.

    Args:
        prefix: what stands before the command (``kvtrace run ... --``), or nothing.
    """

    def __init__(
        self, model: Path, store: Path, env: dict[str, str], log: Path, prefix: Sequence[str]
    ) -> None:
        self.port = free_port()
        self.log = log
        connector = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(store)},
        }
        command = [
            *prefix, sys.executable, str(WRAPPER), "serve", str(model), "--served-model-name", "tiny",
            "--enforce-eager", "--max-model-len", "1024", "--max-num-batched-tokens", "256",
            "--block-size", "32", "--host", "127.0.0.1", "--port", str(self.port),
            "--kv-transfer-config", json.dumps(connector),
        ]  # fmt: skip
        with log.open("w") as output:
            self.process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                break
            try:
                if self.call("GET", "/health")[0] == 200:
                    return
            except OSError:
                time.sleep(0.2)  # not listening yet: the condition is asked again
        raise AssertionError(f"the server did not start:\n{self.log.read_text()[-3000:]}")

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            text = json.dumps(body) if body is not None else None
            connection.request(method, path, text, {"Content-Type": "application/json"})
            response = connection.getresponse()
            raw = response.read()
            return response.status, json.loads(raw) if raw else {}
        finally:
            connection.close()

    def complete(self, prompt: list[int], max_tokens: int = 5) -> tuple[int, dict[str, Any]]:
        return self.call(
            "POST",
            "/v1/completions",
            {
                "model": "tiny",
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": 1,
            },
        )

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=120)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
