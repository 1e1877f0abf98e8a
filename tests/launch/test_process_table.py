"""The processes of a run, seen through /proc."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtrace.launch import processes
from kvtrace.launch.commands import is_vllm
from kvtrace.launch.processes import ProcessTable, RunProcess

CONFIG = '{"dir": "/x", "salt": "5a17"}'
SLEEP = [sys.executable, "-c", "import time; time.sleep(300)"]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def table() -> ProcessTable:
    return ProcessTable(CONFIG, Path("/run/overlay"))


def _start(stack: ExitStack, *argv: str, **environ: str) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        argv, env=os.environ | {"KVTRACE_CONFIG": CONFIG} | environ, stdout=subprocess.PIPE
    )
    stack.callback(child.wait)
    stack.callback(child.kill)
    return child


def _until(table: ProcessTable, true: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, [(p.pid, p.argv, p.alive) for p in table.processes]
        table.scan()
        time.sleep(0.01)


def test_grandchildren_are_seen_with_their_parents(table: ProcessTable) -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    table.start(child.pid)
    _until(table, lambda: len(table.processes) == 2 and "input()" in table.processes[1].argv)
    rows = table.rows()
    assert rows[0]["pid"] == child.pid and rows[0]["ppid"] == os.getpid()
    assert rows[1]["ppid"] == child.pid and rows[1]["name"] == os.path.basename(sys.executable)
    assert not any(row["vllm"] for row in rows)
    assert [row["vllm"] for row in table.rows(frozenset([child.pid]))] == [True, False]
    child.communicate(b"\n")
    _until(table, lambda: not table.living())
    assert len(table.processes) == 2


def test_an_orphan_is_known_by_its_environment(stack: ExitStack, table: ProcessTable) -> None:
    shell = _start(stack, "/bin/sh", "-c", "sleep 300 & echo $!")
    assert shell.stdout is not None
    orphan = int(shell.stdout.readline())
    stack.callback(lambda: os.kill(orphan, signal.SIGKILL))
    shell.wait()  # its child has another parent by now, and the table saw neither
    _until(table, lambda: orphan in [process.pid for process in table.living()])


def test_strangers_stay_out(stack: ExitStack, table: ProcessTable) -> None:
    stranger = _start(stack, *SLEEP, KVTRACE_CONFIG=CONFIG.replace("5a17", "other"))
    ours = _start(stack, *SLEEP)
    table.start(ours.pid)
    table.scan()
    assert [process.pid for process in table.living()] == [ours.pid]
    assert stranger.pid not in [process.pid for process in table.processes]


def test_a_process_that_nobody_waits_for_has_ended(stack: ExitStack, table: ProcessTable) -> None:
    child = _start(stack, *SLEEP)
    table.start(child.pid)
    child.kill()
    _until(table, lambda: not table.living())
    assert [row["alive"] for row in table.rows()] == [False]


@pytest.mark.parametrize(
    ("environ", "options", "obstacle"),
    [
        ({}, [], None),
        ({"VLLM_PLUGINS": "a,kvtrace"}, [], None),
        ({"VLLM_PLUGINS": ""}, [], None),  # the folder on PYTHONPATH is enough
        ({"VLLM_PLUGINS": "", "PYTHONPATH": "/other"}, [], "folder out, and VLLM_PLUGINS=''"),
        ({"VLLM_PLUGINS": "lora"}, ["-I"], "-E ignores PYTHONPATH, and VLLM_PLUGINS='lora'"),
        ({"KVTRACE_CONFIG": ""}, [], "lacks KVTRACE_CONFIG"),
        ({"PYTHONPATH": "/other"}, [], "PYTHONPATH was replaced"),
        ({}, ["-I"], "-I or -E"),
        ({}, ["-uE"], "-I or -E"),
        ({}, ["-u"], None),
    ],
)
def test_why_an_agent_would_not_load(
    stack: ExitStack, table: ProcessTable, environ: dict[str, str], options: list[str], obstacle: str | None
) -> None:
    environ = {"PYTHONPATH": "/run/overlay:/more"} | environ
    child = _start(stack, SLEEP[0], *options, *SLEEP[1:], **environ)
    table.start(child.pid, [SLEEP[0], *options, *SLEEP[1:]])
    _until(table, lambda: table.processes[0].looked_at)
    found = table.processes[0].obstacle
    assert found is None if obstacle is None else obstacle in (found or "")


@pytest.mark.parametrize(
    ("argv", "vllm"),
    [
        (["VLLM::EngineCore"], True),
        (["VLLM::Worker_TP0"], True),
        (["/usr/bin/python3", "/x/bin/vllm", "serve"], True),
        (["python", "-u", "-X", "dev", "/x/bin/vllm", "serve"], True),
        (["python3.12", "-m", "vllm.entrypoints.openai.api_server"], True),
        (["python", "-Im", "vllm"], True),
        (["python", "-mvllm", "serve"], True),
        (["python", "-m", "vllm_other"], False),
        (["python", "-c", "import vllm", "vllm"], False),
        (["python", "train.py", "vllm"], False),
        (["bash", "-c", "vllm serve"], False),
        (["vllm", "serve"], True),
        (["less", "vllm"], False),
        ([], False),
    ],
)
def test_what_counts_as_vllm(argv: list[str], vllm: bool) -> None:
    assert is_vllm(argv) is vllm


def test_names_and_commands() -> None:
    assert RunProcess(1, 0, 0, ["VLLM::EngineCore"]).name == "VLLM::EngineCore"
    assert RunProcess(1, 0, 0, ["/usr/bin/python3", "x.py"]).name == "python3"
    assert RunProcess(1, 0, 0, []).name == "?"
    assert "abc" not in RunProcess(1, 0, 0, ["x", "--api-key", "abc"]).command
    assert len(RunProcess(1, 0, 0, ["x"] * 500).command) == 200


def test_the_table_is_bounded(stack: ExitStack, table: ProcessTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MAX_PROCESSES", 1)
    one, two = _start(stack, *SLEEP), _start(stack, *SLEEP)
    table.start(one.pid)
    _until(table, lambda: len(table.living()) == 2)
    assert [process.pid for process in table.processes] == [one.pid] and table.overflow == 1
    assert two.pid in [process.pid for process in table.living()]


def test_a_hostile_proc_is_survived(tmp_path: Path) -> None:
    table = ProcessTable(CONFIG, tmp_path, proc=tmp_path)
    for pid, stat in (("7", "garbage"), ("8", "8 (a) b) S x"), ("9", "")):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "stat").write_text(stat)
    table.start(7)
    assert table.scan() is False and table.processes == []
