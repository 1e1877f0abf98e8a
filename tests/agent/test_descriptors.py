"""Code that closes descriptors it did not open, forks or becomes a daemon: the spool stops, or goes on in a
file of its own, and nobody else's file is touched. Each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from kvtrace.trace import format as fmt
from kvtrace.trace.format import Kind, Stop
from kvtrace.trace.reader import Spool, spool_paths
from kvtrace.trace.rows import kind

from .conftest import Which

PRELUDE = """
import os, sys
from pathlib import Path
from kvtrace.agent.state import AGENT
from kvtrace.trace.config import AgentConfig, new_salt
from kvtrace.trace.format import Kind

here = Path(sys.argv[1])
AGENT.open(AgentConfig(here / "run", new_salt(), "r", compiled=sys.argv[2] == "True"))
os.register_at_fork(after_in_child=AGENT.after_fork)

def record(count=1):
    for _ in range(count):
        AGENT.add((int(Kind.EXEC),) + (0,) * 7)

def step(count=1):
    record(count)
    AGENT.flush()

step(3)
"""


pytestmark = pytest.mark.usefixtures("each_recorder")


def run(tmp_path: Path, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code), str(tmp_path), str(Which.compiled)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def steps(path: Path) -> int:
    return sum(int((kind(chunk[:, 0]) == Kind.EXEC).sum()) for chunk in Spool(path).chunks())


def stopped(path: Path) -> int | None:
    spool = Spool(path)
    list(spool.chunks())
    assert spool.info().end in ("trailer", "open"), spool.info()
    return spool.info().stop


USERS = "what the user wrote"


@pytest.mark.parametrize(
    "taken",
    [
        "os.closerange(3, 256)",
        "os.close(AGENT.recorder._store.descriptor)",
        "os.closerange(3, 256); os.rename(AGENT.recorder.path, AGENT.recorder.path.with_suffix('.x'))",
    ],
)
def test_a_file_that_gets_the_descriptors_number_is_not_touched(tmp_path: Path, taken: str) -> None:
    run(
        tmp_path,
        f"""
        number = AGENT.recorder._store.descriptor
        {taken}
        mine = os.open(here / "mine", os.O_RDWR | os.O_CREAT, 0o600)
        if mine != number:
            os.dup2(mine, number)
        os.write(number, b"{USERS}")
        step()
        step()
        AGENT.close()
        os.fstat(number)
        os.write(number, b"!")
        """,
    )
    assert (tmp_path / "mine").read_text() == f"{USERS}!"
    kept = [*spool_paths(tmp_path / "run"), *(tmp_path / "run").rglob("*.x")]
    renamed = kept[0].suffix == ".x" and not Which.compiled  # nothing is written, and it is not found again
    assert [steps(path) for path in kept] == [3 if renamed else 5]
    assert stopped(kept[0]) == (None if renamed else Stop.CLEAN)


def test_a_descriptor_that_was_only_closed_is_opened_anew(tmp_path: Path) -> None:
    run(tmp_path, "os.closerange(3, 256)\nstep()\nassert AGENT.recorder.alive\nstep()\nAGENT.close()\n")
    (path,) = spool_paths(tmp_path / "run")
    assert steps(path) == 5 and stopped(path) == Stop.CLEAN


def test_a_descriptor_that_is_lost_for_good_stops_the_recording(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        os.closerange(3, 256)
        os.rename(AGENT.recorder.path, here / "moved.kvt")
        step(10_000)
        assert not AGENT.recorder.alive and AGENT.recorder._store.lost
        AGENT.close()
        """,
    )
    assert not spool_paths(tmp_path / "run")
    in_window = 3 < steps(tmp_path / "moved.kvt") <= fmt.WINDOW
    assert in_window if Which.compiled else steps(tmp_path / "moved.kvt") == 3
    assert stopped(tmp_path / "moved.kvt") == (Stop.DESCRIPTOR_LOST if Which.compiled else None)


def test_a_spool_put_in_the_place_of_ours_is_not_touched(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        path = AGENT.recorder.path
        os.closerange(3, 256)
        os.rename(path, here / "moved")
        path.write_text("theirs")
        step()
        AGENT.close()
        """,
    )
    (path,) = spool_paths(tmp_path / "run")
    assert path.read_text() == "theirs" and steps(tmp_path / "moved") == (4 if Which.compiled else 3)


def test_a_fork_within_a_step_leaves_each_process_its_records(tmp_path: Path) -> None:
    run(
        tmp_path,
        """
        record(2)  # of the parent's open step
        pid = os.fork()
        if pid == 0:
            step(5)
            os._exit(0)
        os.waitpid(pid, 0)
        record(4)
        AGENT.flush()
        AGENT.close()
        """,
    )
    assert sorted(map(steps, spool_paths(tmp_path / "run"))) == [5, 3 + 2 + 4]
    assert sorted(map(str, map(stopped, spool_paths(tmp_path / "run")))) == ["1", "None"]


def test_a_daemon_records_to_a_file_of_its_own(tmp_path: Path) -> None:
    """Two forks, a session of its own, every descriptor closed, and 0 to 2 opened anew."""
    out = run(
        tmp_path,
        """
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            os.chdir("/")
            os.closerange(0, writing)
            os.closerange(writing + 1, 256)
            for number in range(3):
                os.open(os.devnull, os.O_RDWR)
            mine = os.open(here / "mine", os.O_WRONLY | os.O_CREAT, 0o600)
            step(7)
            os.write(mine, b"log")
            AGENT.close()
            os._exit(0)
        os.close(writing)
        os.waitpid(pid, 0)
        os.read(reading, 1)  # until the daemon has ended
        step()
        AGENT.close()
        print("ended")
        """,
    )
    assert out == "ended\n" and (tmp_path / "mine").read_text() == "log"
    assert sorted(map(steps, spool_paths(tmp_path / "run"))) == [4, 7]
    assert list(map(stopped, spool_paths(tmp_path / "run"))) == [Stop.CLEAN, Stop.CLEAN]
