"""Under kvtrace a vLLM does what it does without: tokens, answers, output, exit code."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from side_by_side import KVTRACE, Done, Place, Ran, Script
from vllm_env import vllm_env

from kvtrace.report.load import read_report
from kvtrace.trace.reader import Spool, spool_paths

from .server import Server

pytestmark = pytest.mark.engine
OFFLINE = Path(__file__).parent / "offline.py"
SECRET = "planted-S3cr3t"
PLANTED = ("--pw", SECRET, f"redis://{SECRET}@h", "-u", f"bob:{SECRET}")


def plain(place: Place) -> Done:
    return place.start(sys.executable, OFFLINE, place.model, place.store, traced=False, STORE_API_KEY=SECRET)


def traced(place: Place) -> Done:
    """In an environment of its own, which sees this one's packages, but not the checkout of kvtrace."""
    environment = place.folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "vllm-from-there.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    python = environment / "bin" / "python"
    assert subprocess.run([python, "-c", "import kvtrace"], capture_output=True, cwd=place.folder).returncode
    before = files_of(environment)
    words = (python, OFFLINE, place.model, place.store, *PLANTED)
    done = place.start(*words, STORE_API_KEY=SECRET, VLLM_PLUGINS="some_other_plugin")
    assert files_of(environment) == before, "nothing is written into it"
    return done


def killed(place: Place) -> Done:
    return place.start(sys.executable, OFFLINE, place.model, place.store, "kill", STORE_API_KEY=SECRET)


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


def served(place: Place, *prefix: str) -> tuple[list[tuple[int, Any]], int]:
    """What a server answers, and its exit code."""
    with Server(place.model, place.store, vllm_env(), place.folder / "log", prefix) as server:
        server.wait_until_ready()
        answers = converse(server)
        return answers, server.stop()


def served_plain(place: Place) -> tuple[list[tuple[int, Any]], int]:
    return served(place)


def served_traced(place: Place) -> tuple[list[tuple[int, Any]], int]:
    return served(place, *KVTRACE, "run", "-o", str(place.run), "--")


SCRIPTS = (plain, traced, killed, served_plain, served_traced)


def files_of(environment: Path) -> list[Path]:
    return sorted(path for path in environment.rglob("*") if "__pycache__" not in path.parts)


def said(run: Ran, what: str) -> list[str]:
    lines = run.done.stdout.replace(str(run.place.store), "STORE").splitlines()
    return [line for line in lines if line.startswith(what)]


def test_a_script_prints_the_same_tokens_and_has_the_same_code(ran: Mapping[Script, Ran]) -> None:
    """Also where kvtrace cannot be imported in its environment."""
    without, under = ran[plain], ran[traced]
    assert (without.done.returncode, under.done.returncode) == (3, 3), under.done.stderr[-3000:]
    assert len(said(without, "tokens")) == 6 and len(said(without, "found")) > 20
    assert said(under, "tokens") == said(without, "tokens")
    assert said(under, "found") == said(without, "found"), "its connector finds what it would without kvtrace"
    files = list(without.place.store.rglob("*.safetensors"))
    assert files
    for path in files:
        other = under.place.store / path.relative_to(without.place.store)
        assert other.read_bytes() == path.read_bytes(), "the connector stored the same bytes"

    report = read_report(under.place.run)
    saves = report["ledger"]["saves"]
    assert report["requests"]["total"] == 6 and saves["accounts"]["saved"] > 0
    assert sum(saves["accounts"].values()) == saves["total"] > 0
    # 600 + 97 new prompt tokens, 200 twice, 20 + 25; 4 decode tokens a request are computed.
    assert saves["total_tokens"] == 200 + 20 + 25 + 200 + 600 + 97 + 6 * 4
    before, _, path = under.done.stderr.rstrip().splitlines()[-1].partition("kvtrace explain ")
    assert before, "the last line names the next command"
    # a path below the folder where it was started is said from there
    assert Path(path).absolute() == under.place.run / "report.json"


def texts_of(path: Path) -> str:
    """All names and documents of a spool, which lie in it in pieces."""
    spool = Spool(path)
    for _ in spool.chunks():
        pass
    return "\n".join(map(repr, (spool.header, *spool.names.values(), *spool.facts)))


def test_nothing_of_a_users_content_and_no_secret_is_recorded(ran: Mapping[Script, Ran]) -> None:
    """They stand in the command line, the environment, the configuration and the connector's messages."""
    run = ran[traced].place.run
    output = ran[traced].done.stdout + ran[traced].done.stderr
    tokens = re.search(r"stored a prompt: the sauce is made of garlic \[(\d+, \d+, \d+)", output)
    assert tokens is not None, "the connector says it aloud"
    files = [path for path in run.rglob("*") if path.is_file()]
    recorded = {path.name: path.read_text("latin-1") for path in files}
    recorded |= {f"{path.name} in words": texts_of(path) for path in spool_paths(run)}
    assert any("stored a prompt: " in text for text in recorded.values()), "the messages are recorded"
    for planted in ("S3cr3t", "garlic", tokens[1], tokens[1].replace(" ", "")):
        assert [name for name, text in recorded.items() if planted in text] == []


def test_a_killed_run_is_reported_from_what_is_on_disk(ran: Mapping[Script, Ran]) -> None:
    assert ran[killed].done.returncode == 128 + 9
    report = read_report(ran[killed].place.run / "report.json")
    assert report["requests"]["total"] == 6
    assert {row["status"] for row in report["requests"]["rows"]} == {"FINISHED_LENGTH_CAPPED"}
    saves = report["ledger"]["saves"]
    assert sum(saves["accounts"].values()) == saves["total"]
    assert report["run"]["signal"] == "SIGKILL"


def test_a_server_answers_the_same_and_ends_with_the_same_code(ran: Mapping[Script, Ran]) -> None:
    plainly, under = ran[served_plain], ran[served_traced]
    assert under.done == plainly.done
    assert [status for status, _ in plainly.done[0]] == [200, 200, 200, 200, 200, 400, 404]

    report = read_report(under.place.run)
    roles = {process["role"] for process in report["run"]["processes"] if process["agent"]}
    assert roles == {"front", "scheduler", "worker"}
    assert report["requests"]["total"] == 5
    assert all(row["client"] for row in report["requests"]["rows"]), "the client's ids are known"
    summary = {row["hook"]: row for row in report["coverage"]["summary"]}
    for hook in ("wait_for_layer_load", "save_kv_layer"):
        assert summary[hook]["fired"] == summary[hook]["eligible"] > 0
