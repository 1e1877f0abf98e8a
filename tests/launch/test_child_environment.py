"""What the child is given, and in which Python the agent is then found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kvtrace
from kvtrace.launch.environment import child_environment
from kvtrace.launch.errors import LaunchError
from kvtrace.launch.interpreter import find_program
from kvtrace.launch.overlay import make_overlay

RAY = "VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY"
# The overlay must be all that a foreign Python needs: nothing of this checkout may be on its path.
CLEAN = {"PATH": os.environ["PATH"]}


@pytest.mark.parametrize(
    ("given", "handed"),
    [
        (None, None),
        ("", "kvtrace"),
        ("lora", "lora,kvtrace"),
        ("kvtrace", "kvtrace"),
        ("a,kvtrace,b", "a,kvtrace,b"),
        ("my_kvtrace", "my_kvtrace,kvtrace"),
    ],
)
def test_vllm_plugins(given: str | None, handed: str | None) -> None:
    environ = {} if given is None else {"VLLM_PLUGINS": given}
    assert child_environment(environ, ["vllm"], "{}", Path("/o")).get("VLLM_PLUGINS") == handed


def test_ray_hears_of_our_variable_only_where_there_is_ray() -> None:
    def handed(environ: dict[str, str], *command: str) -> str | None:
        return child_environment(environ, command, "{}", Path("/o")).get(RAY)

    assert handed({}, "vllm", "serve", "gray-array") is None
    assert handed({}, "vllm", "serve", "--distributed-executor-backend", "ray") == "KVTRACE_"
    assert handed({}, "vllm", "--distributed-executor-backend=ray") == "KVTRACE_"
    assert handed({"RAY_ADDRESS": "auto"}, "vllm") == "KVTRACE_"
    assert handed({RAY: "MY_"}, "vllm") == "MY_,KVTRACE_"


def test_pythonpath_and_the_rest() -> None:
    environ = {"PYTHONPATH": "/theirs", "HOME": "/h"}
    child = child_environment(environ, ["vllm"], "CONFIG", Path("/run/overlay"))
    assert child == {"PYTHONPATH": "/run/overlay:/theirs", "HOME": "/h", "KVTRACE_CONFIG": "CONFIG"}
    assert environ == {"PYTHONPATH": "/theirs", "HOME": "/h"}
    assert child_environment({}, ["vllm"], "C", Path("/o"))["PYTHONPATH"] == "/o"
    # an empty entry would put the working directory on the path
    assert child_environment({"PYTHONPATH": ""}, ["vllm"], "C", Path("/o"))["PYTHONPATH"] == "/o"


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with nothing in it."""
    folder = tmp_path_factory.mktemp("foreign") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder


def _find(python: Path, overlay: Path, environ: dict[str, str] = CLEAN) -> dict[str, object]:
    code = (
        "import importlib.metadata as m, json, sys\n"
        "points = [p for p in m.entry_points(group='vllm.general_plugins') if p.name == 'kvtrace']\n"
        "import kvtrace, kvtrace.agent.plugin, kvtrace.trace.format, kvtrace.trace.writer\n"
        "print(json.dumps({'points': [p.value for p in points], 'version': m.version('kvtrace'),"
        " 'own': kvtrace.__version__, 'file': kvtrace.__file__,"
        " 'heavy': sorted({'numpy', 'pandas', 'rich', 'typer', 'psutil'} & set(sys.modules))}))\n"
    )
    environ = child_environment(environ, [str(python)], "{}", overlay)
    # away from the checkout: `-c` puts the working directory on the path
    done = subprocess.run([python, "-c", code], env=environ, cwd=overlay, check=True, capture_output=True)
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("pythonpath", [None, "/nowhere"])
def test_a_foreign_python_finds_the_agent(foreign: Path, tmp_path: Path, pythonpath: str | None) -> None:
    overlay = make_overlay(tmp_path / "overlay")
    environ = CLEAN | ({"PYTHONPATH": pythonpath} if pythonpath else {})
    found = _find(foreign / "bin/python", overlay, environ)
    assert found == {
        "points": ["kvtrace.agent.plugin:activate"],
        "version": kvtrace.__version__,
        "own": kvtrace.__version__,
        "file": str(overlay / "kvtrace/__init__.py"),
        "heavy": [],
    }


def test_found_once_where_kvtrace_is_installed_too(foreign: Path, tmp_path: Path) -> None:
    first, second = (
        make_overlay(tmp_path / "one"),
        make_overlay(tmp_path / "two"),
    )
    found = _find(foreign / "bin/python", first, CLEAN | {"PYTHONPATH": str(second)})
    assert found["points"] == ["kvtrace.agent.plugin:activate"]


def test_the_overlay_does_not_hide_an_installed_kvtrace(foreign: Path, tmp_path: Path) -> None:
    overlay = make_overlay(tmp_path / "overlay")
    source = str(Path(kvtrace.__file__).parent.parent)
    environ = child_environment(CLEAN | {"PYTHONPATH": source}, [], "{}", overlay)
    code = "import kvtrace.agent, kvtrace.launch.rundir as r; print(kvtrace.agent.__file__, r.__file__)"
    python = foreign / "bin/python"
    done = subprocess.run([python, "-c", code], env=environ, cwd=overlay, check=True, capture_output=True)
    agent, rundir = done.stdout.decode().split()
    assert agent.startswith(str(overlay)) and rundir.startswith(source)


def test_the_overlay_is_small_and_carries_no_byte_code(tmp_path: Path) -> None:
    overlay = make_overlay(tmp_path / "overlay")
    names = {path.name for path in overlay.iterdir()}
    assert names == {"kvtrace", f"kvtrace-{kvtrace.__version__}.dist-info", "sitecustomize.py"}
    assert {path.name for path in (overlay / "kvtrace").iterdir()} == {
        "__init__.py",
        "agent",
        "errors.py",
        "trace",
        "versions.py",
    }
    assert not list(overlay.rglob("*.pyc"))


def test_a_path_that_cannot_stand_in_pythonpath(tmp_path: Path) -> None:
    overlay = make_overlay(tmp_path / "a:b" / "overlay")
    try:
        assert os.pathsep not in str(overlay) and (overlay / "kvtrace/agent").is_dir()
    finally:
        shutil.rmtree(overlay)


def _script(path: Path, first: str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{first}\n")
    path.chmod(0o755)
    return str(path)


def test_programs_are_found_like_a_shell_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tool = _script(tmp_path / "bin/tool", "#!/bin/sh")
    assert find_program(["tool"], {"PATH": str(tmp_path / "bin")}) == tool
    assert find_program(["bin/tool"], {"PATH": ""}) == "bin/tool"
    with pytest.raises(LaunchError, match="command not found: tool"):
        find_program(["tool"], {"PATH": ""})
