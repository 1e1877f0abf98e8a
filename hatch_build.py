"""Builds the recorder in C (``kvtrace/trace/_recorder.c``) for the Python that installs kvtrace, where there
is a compiler. Without one, or where it does not compile or load, the package is pure Python and records all
the same.

    python hatch_build.py      # in place, for this Python, as an editable install does it
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand
    BuildHookInterface = object

ROOT = Path(__file__).resolve().parent
FOLDER = "kvtrace/trace"
SOURCE = ROOT / FOLDER / "_recorder.c"
FLAGS = ("-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread")


class NotBuilt(Exception):
    """Why there is no recorder in C: one line."""


def build(folder: Path, flags: tuple[str, ...] = FLAGS) -> Path:
    """The extension module, in `folder`.

    Raises:
        NotBuilt: it can't be.
    """
    if sys.platform != "linux" or sys.implementation.name != "cpython":
        raise NotBuilt("it needs CPython on Linux")
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        raise NotBuilt("it needs a Python with its global lock")
    include = sysconfig.get_paths()["include"]
    if not Path(include, "Python.h").is_file():
        raise NotBuilt("this Python's header files are not installed")
    target = folder / f"_recorder{sysconfig.get_config_var('EXT_SUFFIX')}"
    # Beside its place, and put there at once: a process may have the old one loaded.
    with tempfile.TemporaryDirectory(dir=folder) as beside:
        made = Path(beside) / target.name
        command = [*_compiler(), *flags, f"-I{include}", str(SOURCE), "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            last = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
            raise NotBuilt(f"{command[0]} failed: {last.strip()[:200]}")
        if "-fsanitize=address" not in flags:
            _load(made)
        os.replace(made, target)
    return target


def _compiler() -> list[str]:
    for words in (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc", "gcc", "clang"):
        command = shlex.split(words or "")
        if command and shutil.which(command[0]):
            return command
    raise NotBuilt("there is no C compiler")


def _load(made: Path) -> None:
    code = "import sys, importlib.util as u; s = u.spec_from_file_location('_recorder', sys.argv[1]); "
    code += "s.loader.exec_module(u.module_from_spec(s))"
    done = subprocess.run([sys.executable, "-I", "-c", code, str(made)], capture_output=True, check=False)
    if done.returncode:
        raise NotBuilt("what was built does not load")


class CustomBuildHook(BuildHookInterface):  # type: ignore[misc, unused-ignore]
    """For wheels: in the package's own folder where they are editable, else in the wheel alone."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel":
            return
        editable = version == "editable"
        self._made = None if editable else tempfile.mkdtemp(prefix="kvtrace-build-")
        try:
            built = build(Path(self._made or ROOT / FOLDER))
        except (NotBuilt, OSError) as error:
            self.app.display_warning(f"kvtrace is installed without its recorder in C ({error})")
            return
        if not editable:
            build_data["force_include"][str(built)] = f"{FOLDER}/{built.name}"
            build_data["pure_python"] = False
            build_data["infer_tag"] = True

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if getattr(self, "_made", None):
            shutil.rmtree(self._made, ignore_errors=True)


if __name__ == "__main__":
    try:
        print(build(ROOT / FOLDER).relative_to(ROOT))
    except NotBuilt as error:
        raise SystemExit(f"the recorder in C was not built: {error}") from None
