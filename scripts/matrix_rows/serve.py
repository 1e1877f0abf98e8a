"""A row's workload over HTTP: ``python -m matrix_rows.serve SPEC.json [PREFIX...]``.

Knows nothing of kvtrace. SPEC as for play.py, of one engine and acts that generate; its arguments become
options of ``vllm serve``, which is started behind PREFIX, and ended by SIGTERM.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from vllm_server import VllmServer, free_port

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


class Server(VllmServer):
    def __init__(self, engine: dict[str, Any], prefix: list[str]) -> None:
        port = free_port()
        vllm = str(Path(sys.executable).parent / "vllm")
        command = [*prefix, vllm, "serve", engine["model"], *options(engine)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--shutdown-timeout", "20"]
        super().__init__(subprocess.Popen([*command, "--served-model-name", "tiny"]), port)

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


def work(spec: dict[str, Any], prefix: list[str]) -> play.Answers:
    server = Server(spec["engines"][0], prefix)
    answers: play.Answers = []
    try:
        server.wait_until_ready(READY_SECONDS)
        for act in spec["acts"]:
            at_once = len(act["prompts"]) if act.get("together", True) else 1
            with ThreadPoolExecutor(at_once) as pool:
                asked = [pool.submit(server.complete, prompt, act) for prompt in act["prompts"]]
                answers += [one.result() for one in asked]
    finally:
        server.stop()
    return answers


def main() -> int:
    spec = play.read_spec()
    return 1 if play.record(spec, lambda: work(spec, sys.argv[2:])) else 0


if __name__ == "__main__":
    sys.exit(main())
