"""Start a vLLM server (traced or not), talk to it over HTTP, stop it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_server import VllmServer, free_port

WRAPPER = Path(__file__).parent / "vua_vllm.py"
START_SECONDS = 300


class Server(VllmServer):
    """``vua-vllm serve`` of the tiny model with ExampleConnector.

    Args:
        prefix: what stands before the command (``kvtrace run ... --``), or nothing.
    """

    def __init__(
        self, model: Path, store: Path, env: dict[str, str], log: Path, prefix: Sequence[str]
    ) -> None:
        port = free_port()
        self.log = log
        connector = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(store)},
        }
        command = [
            *prefix, sys.executable, str(WRAPPER), "serve", str(model), "--served-model-name", "tiny",
            "--enforce-eager", "--max-model-len", "1024", "--max-num-batched-tokens", "256",
            "--block-size", "32", "--num-gpu-blocks-override", "2048", "--host", "127.0.0.1",
            "--port", str(port), "--kv-transfer-config", json.dumps(connector),
        ]  # fmt: skip
        with log.open("w") as output:
            process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
        super().__init__(process, port)

    def wait_until_ready(self, seconds: float = START_SECONDS) -> None:
        try:
            super().wait_until_ready(seconds)
        except RuntimeError as error:
            raise AssertionError(f"{error}:\n{self.log.read_text()[-3000:]}") from error

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
