"""Secrets in every place where a user puts them, through a real run: none is in clear in what kvtrace writes
or prints, and what a reader needs is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from side_by_side import KVTRACE, Done, Place, Ran, Script
from vllm_env import vllm_env

from kvtrace.trace.reader import Spool, spool_paths

pytestmark = pytest.mark.engine
SCRIPT = Path(__file__).with_name("secretive.py")
PATH = os.pathsep.join(
    [str(SCRIPT.parent), str(SCRIPT.parents[2])]
)  # this clone's kvtrace, whatever is installed
READABLE = {"chunk_tokens": 256, "lazy": True, "tier_path": "/mnt/tier-0", "unit": "64", "note": None}
FORMATS = ("markdown", "json", "html")


class Planted:
    """Each asked for is another one: words that nothing tells from other words."""

    def __init__(self) -> None:
        self._numbers = count()
        self.all: list[str] = ["literalhorse", "enginehorse", "enginefoal", "childhorse"]

    def __call__(self) -> str:
        number = next(self._numbers)
        self.all.append("correct" + "".join(chr(97 + int(digit)) * 2 for digit in f"{number:02}") + "horse")
        return self.all[-1]


def command(v: Planted) -> list[str]:
    """Words of a command line."""
    return [
        "--header", f"X-Custom-Key: {v()}", "--enc-key", v(), f"-p{v()}", "password", v(), "--api-key", v(),
        f"--api-key={v()}", "--license", v(), f"user/{v()}@host", f"redis://u:{v()}@host:1/0",
        f"redis://{v()}@host",
        f"https://host/x?access={v()}", f"https://hooks.slack.com/services/T0/B0/{v()}", f"NAME={v()}",
        json.dumps({"password": v()}), json.dumps({"headers": [f"X-Key: {v()}"]}),
        f"--extra={json.dumps([v()])}",
        "-u", f"bob:{v()}", "--token", v(), "--password", f"-{v()}", v(),
        "-H", f"Authorization: Bearer {v()}",
        "--db", f"postgresql://u:{v()}@h/db", "--kv.extra.key", v(), "--kv-cache-dtype", f"fp8:{v()}@h",
        f"-----BEGIN PRIVATE KEY-----\n{v()}\n-----END PRIVATE KEY-----", "--two", v(), v(),
    ]  # fmt: skip


def configuration(v: Planted) -> dict[str, Any]:
    return {
        "enc_key": v(), "license": v(), "dsn": f"user/{v()}@host", "options": f"-p{v()}",
        "words": ["--token", v()],
        "pairs": [["password", v()]], "pair": ["password", v()],
        "inner": {"access": v(), "deep": [{"k": [v()]}]},
        "url": f"redis://u:{v()}@h:1", "headers": {"X-Custom-Key": v()}, "text": json.dumps({"pw": v()}),
        "auth": f"Bearer {v()}", "command": f"tool --enc-key {v()}", "broken": f'{{"a": "{v()}"',
        f"k-{v()}@x": 1,
        "endpoint": f"https://{v()}@h:1/x", **READABLE,
    }  # fmt: skip


def messages(v: Planted) -> list[str]:
    return [
        f"login failed: password={v()}", f"X-Custom-Key: {v()}", f"no answer of redis://u:{v()}@h:1",
        f'{{"access": "{v()}"}}', f"{{'anything': '{v()}'}}", f"tool --enc-key {v()} failed",
        f"bad user/{v()}@host",
        f"anything={v()}", f"Authorization: Bearer {v()}", f"license: {v()}", f"https://h/x?sig={v()}&y=1",
        f"password {v()}77", f"curl -u bob:{v()} h", f"refused: token={v()}",
    ]  # fmt: skip


V = Planted()
WORDS, CONFIG, SAYS = command(V), json.dumps(configuration(V)), json.dumps(messages(V))
ENV = {
    "PYTHONPATH": PATH, "SAYS": SAYS, "MY_API_KEY": V(), "KV_PASSWORD": V(), "VLLM_API_KEY": V(),
    "CHILD": f"; : --secret {V()} -p{V()}",
}  # fmt: skip


def secretive(place: Place) -> tuple[Done, dict[str, str]]:
    """The run, and what each verb says of it."""
    words = (sys.executable, SCRIPT, place.model, place.store, CONFIG, *WORDS)
    done = place.start(*words, options=["--keep-messages"], **ENV)
    run = str(place.run)
    verbs = [["explain", run, *more] for more in ([], ["-vv"], *(["--format", name] for name in FORMATS))]
    verbs += [["requests", run], ["why", run, "--request", "0"], ["explain", f"{run}/report.json", "-vv"]]
    verbs.append(["export", run, "--format", "csv", "-o", str(place.folder / "tables")])
    said = {}
    for verb in verbs:
        told = subprocess.run(
            [*KVTRACE, *verb], capture_output=True, text=True, env=vllm_env() | ENV, check=False
        )
        said[" ".join(verb[:1] + verb[2:])] = told.stdout + told.stderr
    return done, said


SCRIPTS = (secretive,)


def test_no_planted_secret_is_in_clear_in_what_a_run_leaves(ran: Mapping[Script, Ran]) -> None:
    place, (done, told) = ran[secretive].place, ran[secretive].done
    run = place.run
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(V.all) >= 60
    texts = {
        str(path.relative_to(run)): path.read_bytes().decode("latin-1")
        for path in run.rglob("*")
        if path.is_file()
    }
    texts["stderr"] = "".join(line for line in done.stderr.splitlines(True) if line.startswith("kvtrace: "))
    texts |= told
    texts |= {path.name: path.read_text() for path in (place.folder / "tables").rglob("*") if path.is_file()}
    # a text goes over several records of a spool: there it is read as one
    spools = [Spool(path) for path in spool_paths(run)]
    for spool in spools:
        list(spool.chunks())
    facts = [value for spool in spools for _, _, value in spool.facts]
    texts["facts"] = json.dumps(
        [facts, [spool.header for spool in spools], [spool.names for spool in spools]]
    )
    assert "cannot do it" in texts["facts"]
    leaks = {(secret, where) for where, text in texts.items() for secret in V.all if secret in text}
    assert not leaks
    # ... and the connector said it all, where it was recorded
    assert "login failed: password=***" in texts["explain -vv"]

    report = json.loads((run / "report.json").read_text())
    (engine,) = report["run"]["engines"]
    assert engine["connector"]["name"] == "Secretive"
    kept = next(value["kv_transfer"]["extra"] for value in facts if value.get("kv_transfer"))
    assert {name: kept[name] for name in READABLE} == READABLE and "enc_key" in kept
    assert "--enc-key" in report["run"]["command"] and str(place.model) in report["run"]["command"]
