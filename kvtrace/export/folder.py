"""Where an export is written: whole or not at all.

Everything is written beside its place first, and put there when all of it is done; what an earlier export
left of the same run is replaced only where the user says so.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from kvtrace.errors import KvtraceError

T = TypeVar("T")
_AGAIN = "give another name with -o, or --force to replace it"


class Output:
    """A folder that is being filled; ``file`` gives a path in it."""

    def __init__(self, part: Path, place: Path, force: bool) -> None:
        self.part, self._place, self._force = part, place, force
        self.files: list[Path] = []
        self.folders: list[Path] = []

    def replaces(self, relative: Path) -> None:
        """Says that the folder at `relative` is written anew: what an earlier export left in it goes.

        Raises:
            KvtraceError: there is one, and it is not to be replaced.
        """
        self._check(relative)
        self.folders.append(relative)

    def _check(self, relative: Path) -> None:
        if not self._force and os.path.lexists(self._place / relative):
            raise KvtraceError("there already", self._place / relative, _AGAIN)

    def file(self, relative: Path) -> Path:
        """Where to write a file that is to stand at `relative` in the export's folder.

        Raises:
            KvtraceError: there is one, and it is not to be replaced.
        """
        self._check(relative)
        path = self.part / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        self.files.append(relative)
        return path


def into_folder(place: Path, force: bool, write: Callable[[Output], T]) -> T:
    """Calls `write` with an empty folder and puts what it wrote into the folder `place`, file by file.

    Files of other names stay, so that several runs can go into one folder.

    Raises:
        KvtraceError: a file of the same name is there and `force` is not set; it cannot be written.
    """
    if place.exists() and not place.is_dir():
        raise KvtraceError("this is no directory", place, "name a directory with -o")
    with _beside(place) as part:
        output = Output(part, place, force)
        result = write(output)
        for one in output.folders:
            if os.path.lexists(place / one):
                shutil.rmtree(place / one)
        for one in output.files:
            (place / one).parent.mkdir(parents=True, exist_ok=True)
            os.replace(part / one, place / one)
    return result


def into_file(place: Path, force: bool, write: Callable[[Path], T]) -> T:
    """Calls `write` with a path, and puts the file that it wrote there to `place`.

    Raises:
        KvtraceError: something is there and `force` is not set; it cannot be written.
    """
    if place.is_dir():
        raise KvtraceError("a directory, not a file", place, "name a file with -o")
    if os.path.lexists(place) and not force:
        raise KvtraceError("there already", place, _AGAIN)
    with _beside(place) as part:
        result = write(part / "file")
        os.replace(part / "file", place)
    return result


@contextmanager
def _beside(place: Path) -> Iterator[Path]:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{place.name[:60]}."
        with tempfile.TemporaryDirectory(prefix=prefix, dir=place.parent, ignore_cleanup_errors=True) as part:
            yield Path(part)
    except OSError as error:
        raise KvtraceError("cannot write", place, error.strerror or str(error)) from None
