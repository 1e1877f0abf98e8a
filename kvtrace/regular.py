"""Opening input files: regular files only. A FIFO would hang, a device never ends. And writing JSON, whole.

Standard library only: any piece may use it.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """`path`, opened for reading without waiting for anybody.

    Raises:
        OSError: nothing there, no permission, a loop of links; or anything but a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, most: int) -> bytes:
    """The first `most` + 1 bytes of a regular file: more than `most` of them say that it is larger.

    Raises:
        OSError: as :func:`open_regular`, or a read failed.
    """
    with open_regular(path) as file:
        return file.read(most + 1)


def write_json(path: Path, value: Any) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part.

    Raises:
        OSError: disk full, no permission, ...; an older file of that name is as it was.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "w", encoding="ascii") as file:
            json.dump(value, file, indent=1)
            file.write("\n")
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
