"""A front without its engine core is said once, with what to end; who outlives a run stands in
run.json and in what explain says."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launching import RUN, Clocked, until

from kvtrace.launch.hanging import FrontWatch
from kvtrace.launch.processes import RunProcess
from kvtrace.report.running import left_behind
from kvtrace.trace.run_file import ListedProcess, RunFile, read_run_file

FRONT = ["/usr/bin/python3", "/x/bin/vllm", "serve", "m"]


class Scene(Clocked):
    """A server of three processes."""

    def __init__(
        self, folder: Path, after: float = 30.0, front: list[str] = FRONT, core: str = "VLLM::EngineCore"
    ) -> None:
        (folder / "spool").mkdir()
        self.notes: list[str] = []
        self.front, self.core = RunProcess(10, 1, 0, list(front)), RunProcess(11, 10, 0, [core])
        self.worker = RunProcess(12, 11, 0, ["VLLM::Worker_TP0"])
        self.processes = [self.front, self.core, self.worker]
        clock = lambda: self.now  # noqa: E731
        seen = lambda: self.processes  # noqa: E731
        self.watch = FrontWatch(folder, after, seen, self.notes.append, clock)


def test_a_front_whose_engine_core_is_gone_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = Scene(tmp_path)
    scene.passes(100)
    scene.core.alive = False
    scene.passes(29)
    assert not scene.notes
    scene.passes(200)
    (line,) = scene.notes
    assert capsys.readouterr().err == f"kvtrace: {line}\n"
    for part in (
        "(pid 11 (VLLM::EngineCore))", "never end: pid 10 (python3), pid 12 (VLLM::Worker_TP0)", "kill 10 12",
    ):  # fmt: skip
        assert part in line


@pytest.mark.parametrize("what", ["script", "another core", "front gone", "off", "no core yet"])
def test_of_what_may_go_on_nothing_is_said(tmp_path: Path, what: str) -> None:
    script = [sys.executable, "bench.py"]
    scene = Scene(tmp_path, after=0 if what == "off" else 30, front=script if what == "script" else FRONT)
    scene.core.alive = False
    if what == "another core":
        scene.processes.append(RunProcess(14, 10, 0, ["VLLM::EngineCore_DP1"]))
    elif what == "front gone":
        scene.front.alive = scene.worker.alive = False
    elif what == "no core yet":
        scene.processes.remove(scene.core)
    scene.passes(300)
    assert not scene.notes


def test_an_engine_core_without_a_title_is_known_by_its_spool(tmp_path: Path) -> None:
    scene = Scene(tmp_path, core="python3")
    scene.core.alive = False
    scene.passes(60)
    assert not scene.notes
    (tmp_path / "spool" / "scheduler-dp0-11-ab12cd34.kvt").write_text("")
    scene.passes(60)
    assert len(scene.notes) == 1


VLLM = ListedProcess(12, 1, "VLLM::Worker_TP0", "VLLM::Worker_TP0", True, True)


def test_who_was_left_is_said() -> None:
    (line,) = left_behind(RunFile(ended_wall_ns=1, host="h", left=(VLLM,)))
    assert line.startswith("pid 12 (VLLM::Worker_TP0) outlived the command") and line.endswith(
        "on h: kill 12"
    )
    assert not left_behind(RunFile(ended_wall_ns=1, processes=(VLLM,)))


def test_of_a_killed_launcher_the_processes_alive_are_said() -> None:
    host = os.uname().nodename
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    killed = RunFile(started_wall_ns=time.time_ns(), host=host, launcher=dead.pid, processes=(VLLM,))
    assert left_behind(killed)[0].startswith(
        "kvtrace run was killed, and pid 12 (VLLM::Worker_TP0) lived then"
    )
    goes_on = RunFile(started_wall_ns=time.time_ns(), host=host, launcher=os.getpid(), processes=(VLLM,))
    elsewhere = RunFile(started_wall_ns=1, host="elsewhere", launcher=dead.pid, processes=(VLLM,))
    assert not left_behind(goes_on) and not left_behind(elsewhere)


# A `vllm` that leaves a worker behind: it ends itself as a kill would.
SERVES = """
import os, signal, subprocess, sys
quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
child = subprocess.Popen(["VLLM::Worker_TP0", "300"], executable="/bin/sleep", **quiet)
print(child.pid, flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_front_leaves_its_workers_in_run_json(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [*RUN, "-o", str(run), "--", sys.executable, "-c", SERVES]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        worker = int(process.stdout.readline())
        try:
            until(lambda: worker in [row["pid"] for row in _run(run)["processes"]])
            process.stdin.write("\n")
            process.stdin.close()
            assert process.wait() == 128 + signal.SIGKILL
            said = process.stderr.read()
        finally:
            os.kill(worker, signal.SIGKILL)
    file, _ = read_run_file(run)
    assert [(one.pid, one.name) for one in file.left] == [(worker, "VLLM::Worker_TP0")]
    assert f"vLLM still runs, pid {worker} (VLLM::Worker_TP0)" in said and f"kill {worker}" in said


# A `vllm` whose engine core goes, and which waits for it.
HANGS = """
import subprocess, sys
quiet = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
core = subprocess.Popen(["VLLM::EngineCore", "300"], executable="/bin/sleep", **quiet)
sys.stdin.readline()
core.kill()
core.wait()
sys.stdin.readline()
sys.exit(5)
"""


def test_run_says_what_to_end_where_vllms_front_hangs(tmp_path: Path) -> None:
    run, vllm = tmp_path / "run", tmp_path / "vllm"
    vllm.write_text(HANGS)
    options = ["-o", str(run), "--stuck-after", "1"]
    command = [*RUN, *options, "--", sys.executable, str(vllm), "serve", "m"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stderr is not None
        until(lambda: _cores(run))
        process.stdin.write("\n")
        process.stdin.flush()
        until(lambda: _run(run).get("notes"))
        assert process.poll() is None, "it waits as long as its command, as it would untraced"
        process.stdin.close()
        assert process.wait() == 5
        (line,) = (line for line in process.stderr if "the engine core" in line)
    (core,) = _cores(run)
    assert f"(pid {core['pid']} (VLLM::EngineCore)) has been gone for 1 s" in line
    assert f"kill {core['ppid']}" in line


def _run(run: Path) -> dict[str, Any]:
    file = run / "run.json"
    return json.loads(file.read_text()) if file.exists() else {}


def _cores(run: Path) -> list[dict[str, Any]]:
    return [row for row in _run(run).get("processes", ()) if "EngineCore" in row["name"]]
