"""--sample: a profile of each worker, made by py-spy from outside, and what is said where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvtrace.launch import sample as sample_module
from kvtrace.launch.rundir import RunDir
from kvtrace.launch.sample import MOST_SAMPLES, Sampler
from kvtrace.trace import format as fmt
from kvtrace.trace.facts import Header
from kvtrace.trace.writer import Recorder

# What py-spy does: it writes its profile when it is told to end, or when the process has ended.
RECORDS = """
import os, pathlib, signal, sys
given = sys.argv[sys.argv.index("--output") + 1]
if "2" in sys.argv:
    open(os.path.join(os.path.dirname(sys.argv[0]), "waits"), "w").close()  # a pipe: somebody reads it
    signal.sigwait({signal.SIGINT})
pathlib.Path(given).write_text(repr(sys.argv[1:]))
"""
REFUSED = "import sys; sys.exit('Permission Denied: Try running again with elevated permissions')"


class Scene:
    """A run directory with spools, a set of living processes, and a stand-in for py-spy."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, body: str | None) -> None:
        self.rundir = RunDir.create("run", folder / "run")
        self.living: set[int] = set()
        fake = folder / "py-spy"
        if body is not None:
            fake.write_text(f"#!{sys.executable}\nimport signal\n{BLOCK}\n{body}")
            fake.chmod(0o755)
        monkeypatch.setattr(sample_module, "program", lambda: str(fake) if body is not None else None)
        self.sampler = Sampler(self.rundir, 50, lambda: self.living)

    def starts(self, pid: int, role: str = "worker-r0") -> None:
        Recorder(self.rundir.path / fmt.SPOOL_DIR / f"{role}-{pid}-ab.kvt", Header(pid=pid), 1 << 30)
        self.living.add(pid)

    def ends(self, pid: int) -> None:
        """And the stand-in that looked at it."""
        self.living.discard(pid)
        for one in self.sampler._open:
            if f"-{pid}-" in one.path.name:
                one.process.wait(60)


BLOCK = "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})"


def test_each_worker_gets_a_profile_those_that_start_later_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = Scene(tmp_path, monkeypatch, RECORDS)
    scene.starts(1)
    scene.starts(3, "front")  # neither a worker nor an engine core
    scene.sampler.tick()
    scene.starts(4, "engine")
    scene.sampler.tick()
    scene.sampler.tick()
    for pid in (1, 4):
        scene.ends(pid)
    found = scene.sampler.finish()
    assert [path.name for path in found] == [
        "engine-4-ab.speedscope.json", "worker-r0-1-ab.speedscope.json",
    ]  # fmt: skip
    words = found[1].read_text()
    for word in (
        "'--rate', '50'",
        "'speedscope'",
        "'--nonblocking'",
        f"'--duration', '{MOST_SAMPLES // 50}'",
    ):
        assert word in words
    assert capsys.readouterr().err.count("2 profiles in ") == 1


def test_a_process_that_outlives_the_command_has_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(tmp_path, monkeypatch, RECORDS)
    os.mkfifo(tmp_path / "waits")
    scene.starts(2)
    scene.sampler.tick()
    (tmp_path / "waits").read_bytes()
    (one,) = scene.sampler._open
    assert len(scene.sampler.finish()) == 1
    assert one.process.returncode == 0 and not scene.sampler._open


def test_without_the_right_to_trace_one_line_names_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = Scene(tmp_path, monkeypatch, REFUSED)
    scene.starts(1)
    scene.starts(4)
    scene.sampler.tick()
    for pid in (1, 4):
        scene.ends(pid)
    assert scene.sampler.finish() == []
    (line,) = capsys.readouterr().err.splitlines()
    assert "kernel.yama.ptrace_scope=0" in line and "SYS_PTRACE" in line


def test_without_py_spy_one_line_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scene = Scene(tmp_path, monkeypatch, None)
    scene.starts(1)
    scene.sampler.tick()
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'kvtrace[spy]'" in line
    assert scene.sampler.finish() == [] and not (scene.rundir.path / "profiles").exists()


@pytest.mark.parametrize("given", ["-1", "fast", "1001", "2.5"])
def test_a_rate_that_is_none_is_one_clear_line(
    shell: Callable[..., tuple[int, str, str]], given: str
) -> None:
    code, out, err = shell("run", "--sample", given, "--", "true")
    assert (code, out, err.count("\n")) == (2, "", 1) and "--sample" in err


def test_a_real_profile_is_speedscopes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a process that waits until its input ends: its function is in every sample."""
    code = "import sys\ndef waits():\n    print('here', flush=True)\n    sys.stdin.read()\nwaits()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )  # fmt: skip
    assert child.stdout is not None and child.stdout.readline() == b"here\n"
    rundir = RunDir.create("run", tmp_path / "run")
    Recorder(rundir.path / fmt.SPOOL_DIR / f"worker-r0-{child.pid}-ab.kvt", Header(pid=child.pid), 1 << 30)
    monkeypatch.setattr(sample_module, "MOST_SAMPLES", 100)  # py-spy ends by itself after a second
    sampler = Sampler(rundir, 100, lambda: {child.pid})
    try:
        sampler.tick()
        (one,) = sampler._open
        one.process.wait(120)
    finally:
        child.communicate()
    (path,) = sampler.finish()
    profile = json.loads(path.read_text())
    assert "speedscope" in profile["$schema"]
    assert "waits" in {frame["name"] for frame in profile["shared"]["frames"]}
