"""Two runs at once and a run inside a run: each has the spools of its own processes, and no other's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import kvtrace
from kvtrace.trace.reader import Spool, spool_paths

SOURCE = str(Path(kvtrace.__file__).parent.parent)
# Stands for a vLLM process: a spool where the agent would write it, and then whatever comes after.
FAKE = """
import json, os, subprocess, sys
from pathlib import Path
from kvtrace.trace.facts import Header
from kvtrace.trace.writer import Recorder
config = json.loads(os.environ["KVTRACE_CONFIG"])
path = Path(config["dir"]) / "spool" / f"fake-{os.getpid()}.kvt"
Recorder(path, Header(pid=os.getpid(), run=config["run"], process=sys.argv[1]), 1 << 20).flush()
print("ready", flush=True)
if len(sys.argv) > 2:
    sys.exit(subprocess.run(sys.argv[2:], stdin=subprocess.DEVNULL).returncode)
sys.stdin.readline()
"""
RUN = [sys.executable, "-m", "kvtrace", "run"]


def start(here: Path, *words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*RUN, *words],
        cwd=here,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": SOURCE},
    )


def who(run: Path) -> list[str]:
    """The processes that wrote the spools of a run, by name; its run.json lists the same files."""
    record = json.loads((run / "run.json").read_text())
    assert sorted(record["spools"]) == [path.name for path in spool_paths(run)]
    return [Spool(path).header["process"] for path in spool_paths(run)]


def test_two_runs_of_one_name_at_the_same_time(tmp_path: Path) -> None:
    runs = [start(tmp_path, "--name", "same", "--", sys.executable, "-c", FAKE, name) for name in "ab"]
    for run in runs:
        assert run.stdout is not None and run.stdout.readline() == b"ready\n"
    for run in runs:
        run.communicate(b"\n")
        assert run.returncode == 0
    folders = sorted((tmp_path / "reports").iterdir())
    assert len(folders) == 2
    assert sorted(who(folder) for folder in folders) == [["a"], ["b"]]


def test_a_run_inside_a_run(tmp_path: Path) -> None:
    inner = [*RUN, "-o", "inner", "--", sys.executable, "-c", FAKE, "inside"]
    outer = start(tmp_path, "-o", "outer", "--", sys.executable, "-c", FAKE, "outside", *inner)
    out, err = outer.communicate()
    assert outer.returncode == 0, err
    assert out == b"ready\nready\n"
    assert who(tmp_path / "outer") == ["outside"] and who(tmp_path / "inner") == ["inside"]
