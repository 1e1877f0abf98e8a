"""Each signal reaches the child exactly once, wherever it comes from."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from launching import ENVIRON, RUN, until

RECORD = [*RUN, "-o", "run", "--"]
# Writes down every signal that it gets. SIGUSR2 ends it: kvtrace passes signals on in their order, so a
# second copy of an earlier one would stand before it.
LISTENER = """
import os, signal, sys
log = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def heard(signum, frame):
    os.write(log, signal.Signals(signum).name.encode() + b"\\n")
    if signum == signal.SIGUSR2:
        os._exit(23)
for name in "INT TERM HUP QUIT USR1 USR2".split():
    signal.signal(getattr(signal, "SIG" + name), heard)
os.write(log, b"pid %d\\n" % os.getpid())
while True:
    signal.pause()
"""


class Run:
    """A traced listener in ``folder``."""

    def __init__(self, folder: Path, pid: int) -> None:
        self.folder = folder
        self.pid = pid
        self.child = int(self._wait_for("pid ").split()[1])
        until(lambda: "processes" in (folder / "run/run.json").read_text())
        # the witness that tells group signals apart is in place
        until(lambda: len(_children(pid)) == 2)

    def _wait_for(self, start: str) -> str:
        until(lambda: any(line.startswith(start) for line in self.lines()))
        return next(line for line in self.lines() if line.startswith(start))

    def lines(self) -> list[str]:
        log = self.folder / "log"
        return log.read_text().splitlines() if log.exists() else []

    def hears(self, name: str) -> None:
        self._wait_for(name)

    def heard_in_the_end(self) -> list[str]:
        os.kill(self.pid, signal.SIGUSR2)
        until(lambda: self.lines()[-1] == "SIGUSR2")
        return self.lines()[1:-1]


def _children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def _listener(folder: Path) -> list[str]:
    return [*RECORD, sys.executable, "-c", LISTENER, str(folder / "log")]


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        _listener(tmp_path), cwd=tmp_path, env=ENVIRON, start_new_session=True, stderr=subprocess.PIPE
    )
    yield process
    process.kill()
    process.communicate()


@pytest.fixture
def run(process: subprocess.Popen[bytes], tmp_path: Path) -> Run:
    return Run(tmp_path, process.pid)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1"])
@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["kvtrace alone", "the whole group"])
def test_a_signal_is_heard_once(run: Run, name: str, send: Callable[[int, int], None]) -> None:
    """Passed on where kvtrace alone got it, and not again where the group did."""
    send(run.pid, getattr(signal, name))
    run.hears(name)
    assert run.heard_in_the_end() == [name]


def test_group_and_single_signals_mix(run: Run) -> None:
    for send in (os.killpg, os.kill, os.kill, os.killpg, os.kill):
        before = len(run.lines())
        send(run.pid, signal.SIGINT)
        until(lambda before=before: len(run.lines()) > before)  # type: ignore[misc]
        # settle: kvtrace has asked its witness, no signal waits any more
        until(lambda: not int(_status(run.pid, "ShdPnd"), 16) and not int(_status(run.pid, "SigPnd"), 16))
        time.sleep(0.1)
    assert run.heard_in_the_end() == ["SIGINT"] * 5


def test_the_code_after_a_signal_is_the_childs_and_recorded(
    run: Run, process: subprocess.Popen[bytes]
) -> None:
    run.heard_in_the_end()
    assert process.wait(30) == 23
    record = json.loads((run.folder / "run/run.json").read_text())
    assert (record["exit_code"], record["signal"]) == (23, None)
    assert record["ended_wall_ns"] > record["started_wall_ns"]
    assert [row["pid"] for row in record["processes"]] == [run.child]
    until(lambda: not Path(f"/proc/{run.child}").exists())


def test_a_killed_kvtrace_leaves_the_run_on_disk(run: Run, process: subprocess.Popen[bytes]) -> None:
    witness = next(pid for pid in _children(run.pid) if int(pid) != run.child)
    process.kill()
    process.wait()
    try:
        record = json.loads((run.folder / "run/run.json").read_text())
        assert record["schema"] == "kvtrace.run/1" and record["exit_code"] is None
        assert [row["pid"] for row in record["processes"]] == [run.child]
        until(lambda: not Path(f"/proc/{witness}").exists())
    finally:
        os.kill(run.child, signal.SIGKILL)


def test_ctrl_c_on_a_terminal_reaches_the_child_once(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(sys.executable, _listener(tmp_path), ENVIRON)
    try:
        run = Run(tmp_path, pid)
        os.write(terminal, b"\x03")
        run.hears("SIGINT")
        os.write(terminal, b"\x1c")
        run.hears("SIGQUIT")
        assert run.heard_in_the_end() == ["SIGINT", "SIGQUIT"]
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 23
        pid = 0
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        os.close(terminal)


def test_the_child_reads_from_the_terminal(tmp_path: Path) -> None:
    code = "import sys; print('got', sys.stdin.readline().strip(), sys.stdin.isatty(), flush=True)"
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(sys.executable, [*RECORD, sys.executable, "-c", code], ENVIRON)
    os.write(terminal, b"hello\n")
    output = b""
    try:
        while b"got hello True" not in output:
            output += os.read(terminal, 1000)
        os.waitpid(pid, 0)
    finally:
        os.close(terminal)


def test_the_child_starts_with_ordinary_signals(tmp_path: Path) -> None:
    internal = 1 << 31 | 1 << 32  # signals 32 and 33: the C library's own, posix_spawn ignores them
    seen = []
    for prefix in ([], RECORD):
        done = subprocess.run(
            # a shell, unlike Python, changes nothing before it starts the command
            ["/bin/sh", "-c", '"$@"; exit 0', "sh", *prefix, "/bin/cat", "/proc/self/status"],
            cwd=tmp_path,
            env=ENVIRON,
            capture_output=True,
            text=True,
            check=True,
        )
        fields = dict(line.split(":\t", 1) for line in done.stdout.splitlines() if line.startswith("Sig"))
        seen.append({name: int(fields[name], 16) & ~internal for name in ("SigBlk", "SigIgn", "SigCgt")})
    assert seen[0] == seen[1]


def _status(pid: int, field: str) -> str:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return line.split()[1]
    raise AssertionError(field)
