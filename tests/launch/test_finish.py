"""After the child: the report or the reason why there is none, always as single lines."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtrace.launch import finish
from kvtrace.launch.child import ChildEnd
from kvtrace.launch.processes import ProcessTable, RunProcess
from kvtrace.launch.rundir import RunDir
from kvtrace.trace.format import pack_header

Builder = Callable[[Any], Any]


@pytest.fixture
def rundir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.chdir(tmp_path)
    return RunDir.create("x", Path("a run"))


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Callable[[Builder], None]:
    def install(builder: Builder) -> None:
        module = types.ModuleType("kvtrace.report.build")
        module.build_report = builder  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "kvtrace.report.build", module)

    return install


def test_the_report_and_the_next_command(
    rundir: RunDir, builds: Callable[[Builder], None], capsys: pytest.CaptureFixture[str]
) -> None:
    builds(lambda path: {"verdict": "Nothing was saved.", "run": str(path)})
    finish.make_report(rundir)
    assert json.loads((rundir.path / "report.json").read_text())["run"] == str(rundir.path)
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "kvtrace: Nothing was saved.\nkvtrace: next: kvtrace explain 'a run/report.json'\n"


def _raise(error: BaseException) -> Builder:
    def build(path: Any) -> Any:
        raise error

    return build


def _kill(path: Any) -> Any:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("builder", "text"),
    [
        (_raise(ValueError("bad\nthing")), "cannot make the report: ValueError: bad thing"),
        (_raise(OSError(errno.ENOSPC, "No space left on device")), "no space left on device"),
        (_raise(KeyboardInterrupt()), "interrupted"),
        (_kill, "interrupted"),
        (lambda path: {"x": object()}, "cannot make the report: TypeError"),
        (_raise(ImportError("no numpy")), "no numpy"),
    ],
)
def test_a_report_that_fails_is_one_line(
    rundir: RunDir,
    builds: Callable[[Builder], None],
    capsys: pytest.CaptureFixture[str],
    builder: Builder,
    text: str,
) -> None:
    builds(builder)
    before = signal.getsignal(signal.SIGTERM)
    finish.make_report(rundir)
    err = capsys.readouterr().err
    assert text in err and err.count("\n") == 1 and "kvtrace explain 'a run'" in err
    assert sorted(os.listdir(rundir.path)) == ["spool"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_spools_and_their_pids(rundir: RunDir) -> None:
    spool = rundir.path / "spool"
    (spool / "a.kvt").write_bytes(pack_header({"pid": 41}))
    (spool / "b.kvt").write_bytes(b"")
    (spool / "c.kvt").write_bytes(pack_header({"pid": "x"}))
    (spool / "other").write_bytes(b"x")
    assert list(finish.traced_pids(rundir.path).values()) == [41, None, None]


def _table(*processes: RunProcess) -> ProcessTable:
    table = ProcessTable("{}", Path("/run/overlay"))
    table.processes.extend(processes)
    return table


SHELL = RunProcess(7, 1, 0, ["bash", "x.sh"])
PYTHON = RunProcess(8, 7, 0, ["python3", "x.py"])
VLLM = RunProcess(9, 7, 0, ["python3", "/bin/vllm", "serve"])


@pytest.mark.parametrize(
    ("outcome", "processes", "texts"),
    [
        (ChildEnd(0, None), [SHELL], ["no vLLM process was seen among 1 process", "container"]),
        (ChildEnd(1, None), [SHELL, PYTHON], ["among 2 processes", "ended with exit code 1"]),
        (ChildEnd(137, "SIGKILL"), [SHELL], ["was ended by SIGKILL"]),
        (ChildEnd(1, None), [VLLM], ["vLLM was seen (pid 9)", "exit code 1"]),
        (ChildEnd(0, None), [VLLM], ["vLLM was seen (pid 9)", "Python 3.10", "VLLM_LOGGING_LEVEL"]),
        (
            ChildEnd(0, None),
            [RunProcess(9, 7, 0, VLLM.argv, obstacle="BLOCKED")],
            ["vLLM ran as pid 9, but BLOCKED"],
        ),
        (ChildEnd(0, None), [RunProcess(8, 7, 0, PYTHON.argv, obstacle="BLOCKED")], ["Python ran as pid 8"]),
        (ChildEnd(0, None), [RunProcess(i, 1, 0, VLLM.argv) for i in range(9)], ["4 and 4 more"]),
    ],
)
def test_why_nothing_was_traced(outcome: ChildEnd, processes: list[RunProcess], texts: list[str]) -> None:
    line = finish.why_nothing(outcome, _table(*processes))
    assert "\n" not in line
    for text in texts:
        assert text in line
