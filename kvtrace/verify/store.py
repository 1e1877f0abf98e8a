"""The connector's directory, where the user names it: damaged in the ways in which stores fail.

Only what came into it since the start is touched: it has to be empty, or missing, then. It is made slow, full
(where it is no small file system of its own), and read-only for a user who may write everywhere, in the
server's processes: ``agent/outside/conditions.py``.
"""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from kvtrace.trace.config import STORE_CONDITIONS, STORE_FULL, STORE_READ_ONLY, STORE_VARIABLE
from kvtrace.verify.answers import VerifyError
from kvtrace.verify.workload import RESET, STORE_ACTS

_CHUNK = 1 << 20
_MOST_FILLED = 4 << 30
_FILLER = ".kvtrace-verify-filler"
_SLOW_SECONDS = 8.0
"""So long it is slow: of many files an answer would seem never to come."""


class Store:
    """``told``: a path of verify's own, where its server is told how the store is to be.

    Raises VerifyError: it is not empty, or no directory.
    """

    def __init__(self, directory: Path, told: Path) -> None:
        self._directory, self._told = directory, told.absolute()
        self._modes: dict[Path, int] = {}
        self._filler = directory / _FILLER
        if directory.exists() and not directory.is_dir():
            raise VerifyError(f"--store {directory} is no directory")
        if directory.is_dir() and any(directory.iterdir()):
            raise VerifyError(
                f"--store {directory} is not empty",
                "verify damages what is in it: name a new one, and configure the connector for it",
            )

    @property
    def environ(self) -> dict[str, str]:
        """Of the server."""
        return {STORE_VARIABLE: f"{self._told}{os.pathsep}{self._directory.absolute()}"}

    @property
    def met(self) -> frozenset[str]:
        """What it was to the connector, of STORE_ACTS."""
        return frozenset(name for name in STORE_ACTS if self._of(name).exists())

    def act(self, name: str) -> None:
        """One of STORE_ACTS; RESET: as it was. Files that vanish meanwhile are no error."""
        assert name in (RESET, *STORE_ACTS)
        self.restore()
        with suppress(OSError):
            self._of(name).rmdir()
        if damage := _DAMAGES.get(name):
            for path in list(self._files()):
                with suppress(OSError):
                    damage(path)
                    self._of(name).mkdir(exist_ok=True)
        if name == STORE_FULL and fillable(self._directory):
            self._fill()
        elif name in STORE_CONDITIONS:
            self._told.symlink_to(f"{name}:{time.monotonic() + _SLOW_SECONDS}")
        if name == STORE_READ_ONLY:
            if os.geteuid():
                self._of(name).mkdir(exist_ok=True)
            for folder, _, _ in os.walk(self._directory):
                path = Path(folder)
                self._modes[path] = stat.S_IMODE(path.stat().st_mode)
                path.chmod(0o500)

    def restore(self) -> None:
        """Its permissions and its free space, as they were."""
        self._filler.unlink(missing_ok=True)
        self._told.unlink(missing_ok=True)
        for path, mode in self._modes.items():
            if path.is_dir():
                path.chmod(mode)
        self._modes.clear()

    def _of(self, name: str) -> Path:
        return self._told.with_name(f"{self._told.name}-{name}")

    def _fill(self) -> None:
        self._of(STORE_FULL).mkdir(exist_ok=True)
        with open(self._filler, "wb", buffering=0) as file, suppress(OSError):
            left = shutil.disk_usage(self._directory).free
            while left > 0:
                left -= file.write(b"x" * _CHUNK)

    def _files(self) -> Iterator[Path]:
        for folder, _, names in os.walk(self._directory):
            for name in names:
                path = Path(folder) / name
                if path.is_file() and not path.is_symlink():
                    yield path


def fillable(directory: Path) -> bool:
    """Whether filling it harms nobody else: a small file system of its own."""
    return os.path.ismount(directory) and shutil.disk_usage(directory).total <= _MOST_FILLED


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _overwrite(path: Path) -> None:
    """Random bytes, as many as there are."""
    left = path.stat().st_size
    with open(path, "r+b") as file:
        while left > 0:
            left -= file.write(os.urandom(min(left, _CHUNK)))


_DAMAGES: Mapping[str, Callable[[Path], None]] = {"gone": Path.unlink, "cut": _cut, "garbage": _overwrite}
