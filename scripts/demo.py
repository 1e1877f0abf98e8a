#!/usr/bin/env python3
"""The demo: trace a real ``vllm serve`` under real traffic, then explain the run.

Run by ``make demo``, which makes the environment first. It does what a user would do by hand:

    kvtrace run -o reports/<run> -- vllm serve <tiny model> --kv-transfer-config '{...ExampleConnector...}'
    (completions over HTTP, then SIGTERM)
    kvtrace explain reports/<run>/report.json

Everything it writes lies in .cache/ and reports/. Exit codes: 0 fine, 1 a stage failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

from tiny_model import make_tiny_model, words
from vllm_env import CACHE, ROOT, vllm_env
from vllm_server import free_port

STAGES = 6
START_DEADLINE = 300.0
STOP_DEADLINE = 90.0
ABORT_DEADLINE = 20.0
REQUEST_DEADLINE = 120.0
MAX_MODEL_LEN = 2048
MAX_BATCHED_TOKENS = 512
"""Small, so that the long prompts prefill in chunks."""

# Loopback must not go through a proxy that the user's environment names.
HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Failed(Exception):
    """A stage of the demo failed; the message is one line."""


class Stages:
    def __init__(self) -> None:
        self.started = time.monotonic()
        self.number = 0

    def __call__(self, text: str) -> None:
        self.number += 1
        print(f"[{self.number}/{STAGES}] {text}  ({self.elapsed():.0f} s)", flush=True)

    def note(self, text: str) -> None:
        print(f"      {text}", flush=True)

    def elapsed(self) -> float:
        return time.monotonic() - self.started


# --- the traffic ----------------------------------------------------------------------------------


class Traffic:
    """Prompts of an exact number of tokens: one word of the tiny model's vocabulary is one token.

    Left out on purpose, because vLLM's ExampleConnector itself dies of it: a prompt of one token sent
    twice, and a long prompt sent again while its first chunks are still being computed.
    """

    def __init__(self, base: str, model: str) -> None:
        self.base = base
        self.model = model
        self.random = random.Random(20261120)
        self.words = words()
        self.sent = 0

    def prompt(self, tokens: int) -> str:
        return " ".join(self.random.choices(self.words, k=tokens))

    def complete(self, prompt: str) -> str:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"{self.base}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with HTTP.open(request, timeout=REQUEST_DEADLINE) as answer:
            text = json.load(answer)["choices"][0]["text"]
        self.sent += 1
        return str(text)

    def run(self, stages: Stages) -> None:
        short = [self.prompt(n) for n in (20, 45, 60, 75, 90, 110)]
        middle = [self.prompt(n) for n in (180, 230, 300, 420)]
        long = [self.prompt(n) for n in (1200, 1500)]

        stages.note(f"{len(short)} prompts shorter than a KV block")
        for prompt in short:
            self.complete(prompt)
        stages.note(f"{len(middle)} of 180 to 420 tokens, then two of them again")
        for prompt in [*middle, middle[1], middle[2]]:
            self.complete(prompt)
        stages.note(f"{len(long)} long ones, which prefill in chunks of {MAX_BATCHED_TOKENS}")
        for prompt in long:
            self.complete(prompt)
        together = [self.prompt(n) for n in (30, 80, 200, 260, 350, 900)]
        stages.note(f"{len(together)} at the same time")
        with ThreadPoolExecutor(len(together)) as pool:
            list(pool.map(self.complete, together))


# --- the server -----------------------------------------------------------------------------------


def serve_command(model: Path, port: int, store: Path) -> list[str]:
    kv_transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(store.relative_to(ROOT))},
    }
    return [
        *("vllm", "serve", str(model.relative_to(ROOT))),
        *("--served-model-name", "tiny"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--max-model-len", str(MAX_MODEL_LEN)),
        *("--max-num-batched-tokens", str(MAX_BATCHED_TOKENS)),
        "--enforce-eager",
        *("--kv-transfer-config", json.dumps(kv_transfer, separators=(",", ":"))),
    ]


def tail(log: Path, lines: int = 15) -> str:
    text = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"      | {line[:200]}" for line in text[-lines:])


def said_by_kvtrace(log: Path) -> str:
    """kvtrace's own lines among the server's, or the server's last ones: for when the end went wrong."""
    text = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"      | {line[:400]}" for line in text if line.startswith("kvtrace: ")) or tail(log)


def is_healthy(base: str) -> bool:
    try:
        with HTTP.open(f"{base}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def wait_until_ready(server: subprocess.Popen[bytes], base: str, log: Path, stages: Stages) -> None:
    started = time.monotonic()
    told = started
    while not is_healthy(base):
        now = time.monotonic()
        if server.poll() is not None:
            raise Failed(f"the server ended with exit code {server.returncode} while starting:\n{tail(log)}")
        if now - started > START_DEADLINE:
            raise Failed(
                f"the server was not ready after {START_DEADLINE:.0f} s; its last lines:\n{tail(log)}"
            )
        if now - told >= 15:
            told = now
            stages.note(f"... still starting ({now - started:.0f} s)")
        time.sleep(0.25)


@contextlib.contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command, in a session of its own; whatever happens, it is asked to stop and then made to."""
    with open(log, "wb") as output:
        server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=vllm_env(),
            cwd=ROOT,
            start_new_session=True,
        )
    try:
        yield server
    finally:
        # Twice: a first SIGTERM that comes while vLLM starts its engine core is lost in vLLM 0.32
        # (zmq_socket_ctx swallows the KeyboardInterrupt that it becomes).
        for _ in range(2):
            if server.poll() is None:
                server.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server.wait(ABORT_DEADLINE)
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


# --- the demo -------------------------------------------------------------------------------------


def demo() -> None:
    stages = Stages()
    stages("environment ready (.venv)")

    stages("tiny Llama-style model with random weights")
    model = make_tiny_model(CACHE / "tiny-model")

    run_dir = ROOT / "reports" / f"{datetime.now():%Y%m%d-%H%M%S}-demo"
    work = CACHE / "demo"
    shutil.rmtree(work, ignore_errors=True)
    (work / "store").mkdir(parents=True)
    log = work / "server.log"
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    command = serve_command(model, port, work / "store")
    shown = run_dir.relative_to(ROOT)

    stages("starting vLLM under kvtrace; its output: .cache/demo/server.log")
    print(f"      $ kvtrace run -o {shown} -- {shlex.join(command)}", flush=True)
    kvtrace = [sys.executable, "-m", "kvtrace"]
    with running([*kvtrace, "run", "-o", str(shown), "--", *command], log) as server:
        wait_until_ready(server, base, log, stages)

        stages("sending completions to the OpenAI endpoint")
        traffic = Traffic(base, "tiny")
        try:
            traffic.run(stages)
        except (OSError, ValueError, LookupError) as error:
            raise Failed(f"a completion failed: {error}; the server's last lines:\n{tail(log)}") from None
        if not is_healthy(base):
            raise Failed(f"the engine died under the traffic; its last lines:\n{tail(log)}")
        stages.note(f"{traffic.sent} completions answered")

        stages("stopping the server (SIGTERM)")
        server.send_signal(signal.SIGTERM)
        try:
            code = server.wait(STOP_DEADLINE)
        except subprocess.TimeoutExpired:
            raise Failed(
                f"the server did not stop within {STOP_DEADLINE:.0f} s; its last lines:\n{tail(log)}"
            ) from None
    if code != 0:
        raise Failed(f"kvtrace run ended with exit code {code}:\n{said_by_kvtrace(log)}")
    report = run_dir / "report.json"
    if not report.is_file():
        raise Failed(f"{shown}/report.json was not written:\n{said_by_kvtrace(log)}")

    stages("the explanation")
    print(f"\n$ kvtrace explain {report.relative_to(ROOT)}", flush=True)
    explained = subprocess.run([*kvtrace, "explain", str(report.relative_to(ROOT))], cwd=ROOT, check=False)
    if explained.returncode:
        raise Failed(f"kvtrace explain ended with exit code {explained.returncode}")
    print(f"\ndemo done in {stages.elapsed():.0f} s; the run: {shown}", flush=True)


def main() -> int:
    # A SIGTERM for the demo must stop the server too: it becomes an exception, which unwinds running().
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        demo()
    except Failed as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted, the server was stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
