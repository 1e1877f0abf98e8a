"""Under kvtrace a vLLM does what it does without: tokens, answers, output, exit code."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm_env import vllm_env as make_vllm_env

from kvtrace.report.read import read_report
from kvtrace.trace.reader import Spool, spool_paths

from .server import KVTRACE, Server

pytestmark = pytest.mark.engine
OFFLINE = Path(__file__).parent / "offline.py"
SECRET = "planted-S3cr3t"
PLANTED = ("--pw", SECRET, f"redis://{SECRET}@h", "-u", f"bob:{SECRET}")


def run_offline(
    env: dict[str, str], model: Path, store: Path, *more: str, prefix: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, str(OFFLINE), str(model), str(store), *more]
    return subprocess.run(
        command,
        env=env | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@dataclass
class Scripts:
    """One script three times: plain (store a), traced (b) and traced and killed (c)."""

    out: Path
    plain: subprocess.CompletedProcess[str]
    traced: subprocess.CompletedProcess[str]
    killed: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Scripts:
    out = tmp_path_factory.mktemp("scripts")
    env = make_vllm_env() | {"STORE_API_KEY": SECRET}
    with ThreadPoolExecutor() as pool:  # side by side: two cores start two engines in the time of one
        runs = [
            pool.submit(run_offline, env, tiny_model, out / store, *more, prefix=prefix)
            for store, more, prefix in (
                ("a", (), ()),
                (
                    "b",
                    PLANTED,
                    (*KVTRACE, "run", "-o", str(out / "run"), "--"),
                ),
                ("c", ("kill",), (*KVTRACE, "run", "-o", str(out / "killed"), "--")),
            )
        ]
        return Scripts(out, *(run.result() for run in runs))


def test_a_script_prints_the_same_tokens_and_has_the_same_code(scripts: Scripts) -> None:
    plain, traced, tmp_path = scripts.plain, scripts.traced, scripts.out
    assert (plain.returncode, traced.returncode) == (3, 3), traced.stderr[-3000:]
    lines = [line for line in plain.stdout.splitlines() if line.startswith("tokens")]
    assert len(lines) == 6
    assert [line for line in traced.stdout.splitlines() if line.startswith("tokens")] == lines
    found = [line for line in plain.stdout.splitlines() if line.startswith("found")]
    assert len(found) > 20
    assert [line for line in traced.stdout.splitlines() if line.startswith("found")] == [
        line.replace(str(tmp_path / "a"), str(tmp_path / "b")) for line in found
    ], "its connector finds what it would without kvtrace"
    files = {
        path.relative_to(tmp_path / "a"): path.read_bytes()
        for path in (tmp_path / "a").rglob("*.safetensors")
    }
    assert files
    for path, content in files.items():
        assert (tmp_path / "b" / path).read_bytes() == content, "the connector stored the same bytes"

    report = read_report(tmp_path / "run")
    saves = report["ledger"]["saves"]
    assert sum(saves["accounts"].values()) == saves["total"] > 0
    # 600 + 97 new prompt tokens, 200 twice, 20 + 25; 4 decode tokens a request are computed.
    assert saves["total_tokens"] == 200 + 20 + 25 + 200 + 600 + 97 + 6 * 4
    said, _, path = traced.stderr.rstrip().splitlines()[-1].partition("kvtrace explain ")
    assert said, "the last line names the next command"
    # a path below the folder where it was started is said from there
    assert Path(path).absolute() == tmp_path / "run" / "report.json"


def texts_of(path: Path) -> str:
    """All names and documents of a spool, which lie in it in pieces."""
    spool = Spool(path)
    for _ in spool.chunks():
        pass
    return "\n".join(map(repr, (spool.header, *spool.names.values(), *spool.facts)))


def test_nothing_of_a_users_content_and_no_secret_is_recorded(scripts: Scripts) -> None:
    """They stand in the command line, the environment, the configuration and the connector's messages."""
    said = scripts.traced.stdout + scripts.traced.stderr
    tokens = re.search(r"stored a prompt: the sauce is made of garlic \[(\d+, \d+, \d+)", said)
    assert tokens is not None, "the connector says it aloud"
    files = [path for path in (scripts.out / "run").rglob("*") if path.is_file()]
    recorded = {path.name: path.read_text("latin-1") for path in files}
    recorded |= {f"{path.name} in words": texts_of(path) for path in spool_paths(scripts.out / "run")}
    assert any("stored a prompt: " in text for text in recorded.values()), "the messages are recorded"
    for planted in ("S3cr3t", "garlic", tokens[1], tokens[1].replace(" ", "")):
        assert [name for name, text in recorded.items() if planted in text] == []


def test_a_killed_run_is_reported_from_what_is_on_disk(scripts: Scripts) -> None:
    assert scripts.killed.returncode == 128 + 9
    report = read_report(scripts.out / "killed" / "report.json")
    assert report["requests"]["total"] == 6
    assert {row["status"] for row in report["requests"]["rows"]} == {"FINISHED_LENGTH_CAPPED"}
    saves = report["ledger"]["saves"]
    assert sum(saves["accounts"].values()) == saves["total"]
    assert report["run"]["signal"] == "SIGKILL"


def converse(server: Server) -> list[tuple[int, Any]]:
    """Short, long, repeated and wrong requests; what the client saw, without ids and clocks."""
    rng = random.Random(7)
    prompts = [[rng.randrange(10, 500) for _ in range(length)] for length in (200, 20, 40, 500)]
    answers: list[tuple[int, Any]] = []
    for prompt in (*prompts, prompts[0]):
        status, body = server.complete(prompt)
        answers.append((status, [body["choices"], body["usage"]]))
    status, body = server.complete(prompts[3] * 4)
    answers.append((status, body["error"]["type"]))
    answers.append((server.call("GET", "/v1/nothing")[0], None))
    return answers


def test_a_server_answers_the_same_and_ends_with_the_same_code(tmp_path, vllm_env, tiny_model):
    seen = {}
    prefixes = {"plain": (), "traced": (*KVTRACE, "run", "-o", str(tmp_path / "run"), "--")}
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(
                Server(tiny_model, tmp_path / f"store-{name}", vllm_env, tmp_path / f"{name}.log", prefix)
            )
            for name, prefix in prefixes.items()
        }
        for name, server in servers.items():
            server.wait_until_ready()
            answers = converse(server)
            seen[name] = (answers, server.stop())
    assert seen["traced"] == seen["plain"]
    assert [status for status, _ in seen["plain"][0]] == [200, 200, 200, 200, 200, 400, 404]

    report = json.loads((tmp_path / "run" / "report.json").read_text())
    roles = {process["role"] for process in report["run"]["processes"] if process["agent"]}
    assert roles == {"front", "scheduler", "worker"}
    assert report["requests"]["total"] == 5
    assert all(row["client"] for row in report["requests"]["rows"]), "the client's ids are known"
    summary = {row["hook"]: row for row in report["coverage"]["summary"]}
    for hook in ("wait_for_layer_load", "save_kv_layer"):
        assert summary[hook]["fired"] == summary[hook]["eligible"] > 0
