"""Every Python that a command starts reads our sitecustomize: where the agent can't run, nothing shows."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pythons import pythons

from kvtrace.agent import plugin
from kvtrace.launch import overlay as overlay_module
from kvtrace.launch.environment import child_environment
from kvtrace.launch.overlay import make_overlay
from kvtrace.trace.config import AgentConfig, new_salt

OLDEST, NEWEST = 6, 15


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("import sys\nsys.theirs = 7\n")
    vllm = theirs / "vllm"
    vllm.mkdir()
    (vllm / "__init__.py").write_text("x = 5\n")
    overlay = make_overlay(tmp_path / "run" / "overlay")
    config = AgentConfig(tmp_path / "run", new_salt()).to_text()
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return child_environment(environ | {"PYTHONPATH": str(theirs)}, [], config, overlay)


CODE = "import sys, sitecustomize, vllm; print((sys.theirs, sitecustomize.sys.theirs, vllm.x))"


def test_every_python_here_is_silent_and_runs_the_users_own(environ: dict[str, str], tmp_path: Path) -> None:
    strict = ["-W", "error", "-bb"]
    names = [f"python3.{minor}" for minor in range(OLDEST, NEWEST + 1)]
    here = (sys.executable, *pythons(names))
    for words in ([sys.executable], *([python, *strict] for python in here)):
        done = subprocess.run(
            [*words, "-c", CODE], env=environ, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "(7, 7, 5)\n", ""), words
    for python in pythons(["python2.7"]):
        done = subprocess.run([python, "-c", "print(5)"], env=environ, capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (0, "5\n", "")


def test_the_file_can_be_read_by_every_version() -> None:
    for minor in range(OLDEST, NEWEST + 1):
        ast.parse(overlay_module._SITECUSTOMIZE, feature_version=(3, minor))
    assert overlay_module._SITECUSTOMIZE.isascii()


@pytest.mark.parametrize(
    ("broken", "source"),
    [
        ("kvtrace/__init__.py", "def (:\n"), ("kvtrace/__init__.py", "raise OSError('x')\n"),
        ("kvtrace/agent/__init__.py", "1 / 0\n"), ("kvtrace/agent/bootstrap.py", "1 / 0\n"),
        ("kvtrace/agent/plugin.py", "from __future__ import what\n"), ("kvtrace/agent/state.py", "def (:\n"),
        ("kvtrace/agent/state.py", "1 / 0\n"),
    ],
)  # fmt: skip
def test_an_agent_that_a_python_cannot_read_is_not_noticed(
    environ: dict[str, str], tmp_path: Path, broken: str, source: str
) -> None:
    (tmp_path / "run" / "overlay" / broken).write_text(source)
    done = subprocess.run(
        [sys.executable, "-c", CODE], env=environ, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "(7, 7, 5)\n")
    # where the agent itself fails in a Python that it is for, one line says so
    said = "kvtrace: the agent did not start" if broken.endswith("state.py") else ""
    assert done.stderr.startswith(said) and done.stderr.count("\n") <= 1 and bool(said) == bool(done.stderr)


def test_a_python_that_is_too_old_is_never_armed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTRACE_CONFIG", "{}")
    monkeypatch.setattr(sys, "version_info", (3, 9, 1))
    monkeypatch.delattr(sys, "orig_argv")  # as in 3.9
    plugin.arm()
    assert not plugin._armed
