"""Which program does a command run, and which Python?"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvtrace.launch.commands import is_python
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
