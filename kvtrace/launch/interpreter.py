"""Which Python will the command run in, and is it the one that kvtrace is installed in?

A wrong "no" costs nothing (an overlay on PYTHONPATH that is not needed), a wrong "yes"
costs the run. So only what is certain counts: this environment's own ``vllm`` or
``python -m vllm``. Any other script may start a vLLM of another environment in the end.
"""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvtrace import ENTRY_POINT_GROUP
from kvtrace.launch.commands import is_python, is_vllm
from kvtrace.launch.errors import LaunchError

ENTRY_POINT_NAME = "kvtrace"


def find_program(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """The file that the shell would execute for this command.

    Raises:
        LaunchError: there is none, or it cannot be executed.
    """
    name = command[0]
    if not name:
        raise LaunchError("the command is an empty word", "write the command after --")
    found = _which(name, environ)
    if found is not None:
        return found
    if os.sep not in name:
        raise LaunchError(f"command not found: {name}", "no program of that name is on PATH")
    if os.path.isdir(name):
        raise LaunchError(f"cannot run {name}", "it is a directory")
    if os.path.exists(name):
        raise LaunchError(f"cannot run {name}", "it is not executable", f"try chmod +x {shlex.quote(name)}")
    raise LaunchError(f"command not found: {name}", "no such file")


def runs_in_our_environment(program: str, command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """True where the command surely is vLLM in this environment's Python, with kvtrace installed."""
    if os.path.basename(program) != "vllm" and not is_vllm([os.path.basename(program), *command[1:]]):
        return False
    python = interpreter_of(program, environ)
    return python is not None and _is_ours(python) and _installed()


def interpreter_of(program: str, environ: Mapping[str, str]) -> Path | None:
    """The Python that a program is, or that its first line names; None where that is not certain."""
    path = Path(os.path.abspath(program))
    if is_python([path.name]) and not _is_script(path):
        return path
    words = _shebang(path)
    if words and Path(words[0]).name == "env":
        named = next((word for word in words[1:] if not word.startswith("-") and "=" not in word), "")
        found = _which(named, environ) if named else None
        words = [found] if found else []
    if not words or not is_python(words) or _is_script(Path(words[0])):
        return None
    return Path(words[0])


def _is_ours(python: Path) -> bool:
    """Same environment: the same ``bin`` of a virtual environment, or the same bare Python.

    Paths are compared, not inodes: conda and uv hard-link one binary into many environments.
    """
    ours = Path(sys.executable)
    if os.path.realpath(python) != os.path.realpath(ours):
        return False
    if _environment_of(python) or _environment_of(ours):
        return os.path.realpath(python.parent) == os.path.realpath(ours.parent)
    return True


def _environment_of(python: Path) -> bool:
    return (python.parent.parent / "pyvenv.cfg").is_file() or (python.parent / "pyvenv.cfg").is_file()


def _installed() -> bool:
    """The entry point lies in this environment's own site-packages (not on our PYTHONPATH or in
    our working directory, which the child may not share)."""
    folders = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    return any(
        point.group == ENTRY_POINT_GROUP and point.name == ENTRY_POINT_NAME
        for dist in importlib.metadata.distributions(name="kvtrace", path=folders)
        for point in dist.entry_points
    )


def _shebang(path: Path) -> list[str]:
    head = _head(path)
    if not head.startswith(b"#!"):
        return []
    return os.fsdecode(head[2:].split(b"\n", 1)[0]).split()


def _is_script(path: Path) -> bool:
    """A text file that only is named ``python``: a pyenv shim, a wrapper."""
    return _head(path, 2) == b"#!"


def _head(path: Path, size: int = 512) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(size)
    except OSError:
        return b""


def _which(name: str, environ: Mapping[str, str]) -> str | None:
    return shutil.which(name, path=environ.get("PATH", os.defpath))
