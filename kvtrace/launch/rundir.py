"""The run directory: made once, private, never written over."""

from __future__ import annotations

import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

from kvtrace.launch.errors import LaunchError, reason
from kvtrace.launch.private import require_private
from kvtrace.trace.format import SPOOL_DIR

REPORTS = "reports"
RUN_FILE = "run.json"
_PRIVATE = 0o700
_PARENT = 0o755
"""Whatever the umask: where others can write, the directory below could be exchanged."""


def safe_name(text: str) -> str:
    """``text`` as one path component: letters, digits, ``.``, ``_`` and ``-``; never empty."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:64] or "run"


class RunDir:
    """A directory of this run alone.

    Attributes:
        path: absolute.
    """

    def __init__(self, path: Path, created: list[Path]) -> None:
        self.path = path
        self._created = created  # outermost first; empty where the user's own directory is used

    @classmethod
    def create(cls, name: str, output: Path | None = None, now: float | None = None) -> RunDir:
        """``output``, or ``reports/<YYYYmmdd-HHMMSS>-<name>`` under the working directory.

        Raises:
            LaunchError: it exists and is not empty, is no directory, cannot be written, or somebody else
                could write to it or exchange it.
        """
        try:
            stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
            path = Path(os.path.abspath(Path(REPORTS) / f"{stamp}-{name}" if output is None else output))
        except OSError as error:
            raise LaunchError("the working directory is gone", reason(error)) from error
        created: list[Path] = []
        try:
            _make_parents(path.parent, created)
            rundir = cls(_claim(path, fresh=output is None, created=created), created)
            require_private(rundir.path, rundir.shown)
            # whoever makes spool/ owns the directory: two runs never share one
            os.mkdir(rundir.path / SPOOL_DIR, _PRIVATE)
        except LaunchError:
            _remove_empty(created)
            raise
        except OSError as error:
            _remove_empty(created)
            raise LaunchError(
                f"cannot make the run directory {path}", reason(error), "choose another one with -o DIR"
            ) from error
        return rundir

    @property
    def shown(self) -> str:
        """The path as a person would type it here."""
        return shown(self.path)

    def withdraw(self) -> None:
        """Remove run.json, and what this run made of the directory where it is then empty. Never raises."""
        with suppress(OSError):
            (self.path / RUN_FILE).unlink()
        _remove_empty(self._created)

    def discard(self) -> None:
        """Remove what :meth:`create` and this run made: it was empty before. Never raises."""
        for target in _entries(self.path):
            if target.is_dir() and not target.is_symlink():
                shutil.rmtree(target, ignore_errors=True)
            else:
                with suppress(OSError):
                    target.unlink()
        _remove_empty(self._created)


def shown(path: Path) -> str:
    """``path`` relative to the working directory where it lies below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (OSError, ValueError):
        return str(path)


def _make_parents(path: Path, created: list[Path]) -> None:
    if path.is_dir():
        return
    _make_parents(path.parent, created)
    try:
        os.mkdir(path, _PARENT)
    except FileExistsError:
        if not path.is_dir():
            raise NotADirectoryError(20, "Not a directory", str(path)) from None
        return
    created.append(path)


def _claim(path: Path, fresh: bool, created: list[Path]) -> Path:
    """Make ``path``; where ``fresh``, the first of ``path``, ``path-2``, ... that does not exist."""
    attempt = 1
    while True:
        candidate = path if attempt == 1 else path.with_name(f"{path.name}-{attempt}")
        try:
            os.mkdir(candidate, _PRIVATE)
        except FileExistsError:
            if not fresh:
                _require_empty(candidate)
                return candidate
            attempt += 1
            continue
        created.append(candidate)
        return candidate


def _require_empty(path: Path) -> None:
    if not path.is_dir():
        raise LaunchError(f"{shown(path)} is not a directory", "choose another one with -o DIR")
    if os.listdir(path):
        raise LaunchError(
            f"{shown(path)} is not empty",
            "a run is never written over another",
            "choose another one with -o DIR",
        )
    if path.stat().st_uid == os.geteuid():  # root could change what is somebody else's, and leaves it alone
        with suppress(OSError):
            os.chmod(path, _PRIVATE)


def _entries(path: Path) -> list[Path]:
    try:
        return list(path.iterdir())
    except OSError:
        return []


def _remove_empty(created: list[Path]) -> None:
    for path in reversed(created):
        with suppress(OSError):
            path.rmdir()
