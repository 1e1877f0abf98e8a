"""A run directory that came from elsewhere names paths of this machine: no verb looks at one of them, and
none writes but where ``-o`` says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from synth import Prompt, Rounding, Sim

from kvtrace.trace import rows
from kvtrace.trace.format import Fact, Kind, Role, Way, pack_head
from kvtrace.trace.sums import summed

# Every path that is opened, listed or asked for, by Python's own audit hook and, for what has no event, by
# what stands in for the functions of os.
WATCHED = """
import json, os, sys

given, verbs = json.loads(sys.argv[1]), json.loads(sys.argv[2])
seen = set()

def note(path):
    if isinstance(path, (str, bytes, os.PathLike)):
        seen.add(os.path.abspath(os.fsdecode(path)))

def hook(event, args):
    changes = ("remove", "rename", "mkdir", "rmdir", "link", "symlink", "chmod", "utime", "truncate")
    if event in ("open", "os.listdir", "os.scandir", *("os." + name for name in changes)):
        note(args[0])
    away = ("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn")
    if event != "socket.gethostname" and event.startswith(away):
        seen.add("EVENT " + event)

def asked(name):
    original = getattr(os, name)
    def instead(path, *args, **kwargs):
        note(path)
        return original(path, *args, **kwargs)
    setattr(os, name, instead)

from kvtrace.cli.app import main
for name in ("stat", "lstat", "access", "readlink", "statvfs"):
    asked(name)
sys.addaudithook(hook)
codes = []
for verb in verbs:
    try:
        main(verb)
    except SystemExit as ended:
        codes.append(ended.code or 0)
system = ["/proc/self", "/proc/stat", "/dev/null", "/usr/share", "/etc/localtime", "/sys"]
fine = [*given, *map(os.path.realpath, sys.path), *sys.path, sys.prefix, sys.base_prefix, *system]
fine = [os.path.abspath(one) for one in fine if one]

def below(path, folders):
    return any(path == one or path.startswith(one + os.sep) for one in folders)

outside = sorted(path for path in seen if not below(path, fine))
# the way there
outside = [path for path in outside if not any(one.startswith(path.rstrip(os.sep) + os.sep) for one in fine)]
print("RESULT" + json.dumps([codes, outside]))
"""


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """What the run names: a store with a file, a source file, a log."""
    folder = tmp_path / "outside"
    (folder / "store").mkdir(parents=True)
    for name in ("store/piece.bin", "mine.py", "secret.txt"):
        (folder / name).write_bytes(b"x" * 4096)
    return folder


@pytest.fixture
def run(tmp_path: Path, outside: Path) -> Path:
    sim = Sim(tmp_path / "run")
    sim.serve([Prompt("a", 64), Prompt("b", 96)], Rounding(32).policy())
    worker = sim.workers[0]
    for way, name in (
        (Way.FILE, "store/piece.bin"),
        (Way.SQLITE, "store/kv.db"),
        (Way.FILE, "../../etc/passwd"),
    ):
        head = pack_head(Kind.OUTSIDE, Role.WORKER, way)
        worker.add(*rows.Outside(head, 10**6, 1, 0, worker.name(str(outside / name)), 4096, 4096, 0))
    worker.fact(
        Fact.CONNECTOR,
        {"ordinal": 1, "role": "worker", "cls": "Mine", "file": str(outside / "mine.py"), "ok": True},
    )
    where = f"{outside}/mine.py:3 in save"
    worker.fact(Fact.SWALLOWED, {"hook": "save_kv_layer", "type": "OSError", "where": where, "inside": where})
    sim.write()
    now = 1 << 61  # a run that has just ended, and nobody looked
    row = {"pid": 1, "name": str(outside), "command": f"cat {outside}/secret.txt", "vllm": True}
    document = {
        "schema": "kvtrace.run/1", "name": "../outside", "command": [str(outside / "mine.py")],
        "exit_code": 0, "started_wall_ns": now, "ended_wall_ns": now, "processes": [row],
        "profiles": ["../outside/secret.txt", str(outside / "secret.txt")],
        "spools": {"../../outside/secret.txt": 3},
    }  # fmt: skip
    (tmp_path / "run" / "run.json").write_text(json.dumps(summed(document)))
    other = Sim(tmp_path / "other", tag=9, pid=900)
    other.serve([Prompt("c", 64)], Rounding(32).policy())
    other.write()
    return tmp_path / "run"


def verbs(run: Path, out: Path) -> list[list[str]]:
    report, here, other = str(out / "report.json"), str(run), str(run.parent / "other")
    return [
        ["explain", here, "--format", "json", "-o", report],
        *([["explain", here, "-vv"], ["explain", here, "--format", "markdown"], ["explain", report, "-v"]]),
        ["explain", here, "--format", "html", "-o", str(out / "page.html")],
        ["requests", here], ["why", here, "--request", "a"], ["why", report, "--request", "b"],
        ["export", here, "--format", "csv", "-o", str(out / "csv")],
        ["export", here, "--format", "perfetto", "-o", str(out / "run.pftrace")],
        ["merge", here, other, "-o", str(out / "merged")], ["baseline", report, "-o", str(out / "base.json")],
        ["check", report, "--baseline", str(out / "base.json")], ["check", here], ["diff", report, here],
        ["top", here, "--once"], ["metrics", here, "--once"],
    ]  # fmt: skip


def test_no_verb_touches_a_path_that_a_run_names(tmp_path: Path, run: Path, outside: Path) -> None:
    out = tmp_path / "out"
    (out / ".git").mkdir(parents=True)  # here ends the search for the rules of `check`
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    code = [json.dumps([str(run), str(run.parent / "other"), str(out)]), json.dumps(verbs(run, out))]
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, *code],
        cwd=out, env=environ | {"TMPDIR": str(out)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "RESULT" in done.stdout, done.stderr[-3000:]
    codes, touched = json.loads(done.stdout.rpartition("RESULT")[2])
    assert len(codes) == len(verbs(run, out)) and 2 not in codes, (codes, done.stderr)
    assert touched == [], "\n".join(touched)
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    written = {".git", "base.json", "csv", "merged", "page.html", "report.json", "run.pftrace"}
    assert {path.name for path in out.iterdir()} == written
    assert str(outside / "mine.py") in (out / "report.json").read_text(), "the report does name them"
