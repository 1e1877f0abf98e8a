"""What is no regular file, or too large to be an input: one line and exit code 2, and never a hang."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REAL = ROOT / "reports" / "vllm-0.32.0-cpu" / "healthy-chunk-store.json"
Shell = Callable[..., tuple[int, str, str]]


def special(what: str, path: Path) -> None:
    if what == "fifo":
        os.mkfifo(path)
    elif what == "socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    elif what == "loop":
        path.symlink_to(path.name)
    elif what == "device":
        path.symlink_to("/dev/zero")
    elif what == "terminal":
        path.symlink_to("/dev/tty")
    elif what == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    else:
        path.mkdir()


@pytest.mark.parametrize("what", ["fifo", "socket", "loop", "device", "terminal", "huge", "directory"])
def test_every_input_refuses_it_in_one_line(
    what: str, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".git").mkdir()
    special(what, Path("x"))
    for words in (
        ["explain", "x"],
        ["requests", "x"],
        ["why", "x", "--request", "a"],
        ["baseline", "x"],
        ["diff", REAL, "x"],
        ["check", "x"],
        ["check", REAL, "--baseline", "x"],
        ["check", REAL, "--config", "x"],
    ):
        code, out, err = shell(*words)
        assert (code, out, err.count("\n")) == (2, "", 1) and "internal" not in err, (words, err)


@pytest.mark.parametrize("what", ["fifo", "socket", "loop", "device", "huge", "directory"])
def test_a_run_directory_of_it_is_refused_in_one_line(what: str, shell: Shell, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "spool").mkdir(parents=True)
    special(what, run / "spool" / "x.kvt")
    special(what, run / "run.json")
    special(what, run / "rest.json")
    for words in (["explain", run], ["requests", run], ["why", run, "--request", "a"], ["check", run]):
        code, out, err = shell(*words)
        assert (code, out, err.count("\n")) == (2, "", 1) and "internal" not in err, (words, err)
