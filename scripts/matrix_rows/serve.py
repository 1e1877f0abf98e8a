"""A row's workload over HTTP: ``python -m matrix_rows.serve SPEC.json [PREFIX...]``.

Knows nothing of kvtrace. SPEC as for play.py, of one engine and acts that generate; its arguments become
options of ``vllm serve``, which is started behind PREFIX, and ended by SIGTERM.
"""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from matrix_rows import play

READY_SECONDS = 400


def options(engine: dict[str, Any]) -> list[str]:
    """``{"block_size": 32, "enforce_eager": True}`` as options of the command line."""
    found = []
    for name, value in engine.items():
        option = "--" + name.replace("_", "-")
        if name == "model":
            continue
        if isinstance(value, bool):
            found.append(option if value else option.replace("--", "--no-", 1))
        else:
            found += [option, json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    def __init__(self, engine: dict[str, Any], prefix: list[str]) -> None:
        self.port = free_port()
        vllm = str(Path(sys.executable).parent / "vllm")
        command = [*prefix, vllm, "serve", engine["model"], *options(engine)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--shutdown-timeout", "20"]
        self.process = subprocess.Popen([*command, "--served-model-name", "tiny"])

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            text = json.dumps(body) if body is not None else None
            connection.request(method, path, text, {"Content-Type": "application/json"})
            response = connection.getresponse()
            raw = response.read()
            return response.status, json.loads(raw) if raw else None
        finally:
            connection.close()

    def wait_until_ready(self) -> None:
        until = time.monotonic() + READY_SECONDS
        while time.monotonic() < until:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended while starting, exit code {self.process.returncode}")
            try:
                if self.call("GET", "/health")[0] == 200:
                    return
            except OSError:
                pass
            time.sleep(0.2)  # not listening yet: asked again
        raise RuntimeError(f"the server was not ready in {READY_SECONDS} s")

    def complete(self, prompt: list[int], act: dict[str, Any]) -> list[int]:
        body = {"model": "tiny", "prompt": prompt, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True, **act.get("params", {})}  # fmt: skip
        status, answer = self.call("POST", "/v1/completions", body)
        if status != 200:
            raise RuntimeError(f"the server answered {status}: {answer}")
        return list(answer["choices"][0]["token_ids"])

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=180)


def work(server: Server, spec: dict[str, Any]) -> play.Answers:
    answers: play.Answers = []
    for act in spec["acts"]:
        at_once = len(act["prompts"]) if act.get("together", True) else 1
        with ThreadPoolExecutor(at_once) as pool:
            asked = [pool.submit(server.complete, prompt, act) for prompt in act["prompts"]]
            answers += [one.result() for one in asked]
    return answers


def main() -> int:
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    Path(spec["store"]).mkdir(parents=True, exist_ok=True)
    play.drive.prepare_environment()
    began = time.monotonic()
    server = Server(spec["engines"][0], sys.argv[2:])
    answers: play.Answers = []
    error = ""
    try:
        server.wait_until_ready()
        answers = work(server, spec)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    server.stop()
    play.write(spec, answers, error, time.monotonic() - began)
    return 1 if error else 0


if __name__ == "__main__":
    sys.exit(main())
