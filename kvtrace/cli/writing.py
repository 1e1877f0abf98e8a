"""Files that a verb writes: whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from kvtrace.errors import KvtraceError


def write_file(path: Path, text: str, replace: bool) -> None:
    """Writes `text` to `path` in one go; its folder is made where it is missing.

    Raises:
        KvtraceError: something is there and `replace` is not set; or it is no place for a file.
    """
    if path.is_dir():
        raise KvtraceError("a directory, not a file", path, "name a file to write")
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")  # /dev/stdout and the like
        return
    try:
        if not replace and os.path.lexists(path):
            raise FileExistsError
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name[:60]}.", dir=path.parent) as folder:
            part = Path(folder, "file")
            part.write_text(text, encoding="utf-8")
            place = os.replace if replace else os.link  # a link fails where somebody else was quicker
            place(part, path)
    except FileExistsError:
        raise KvtraceError(
            "this file is there already", path, "give another name, or --force to replace it"
        ) from None
    except OSError as error:
        raise KvtraceError("cannot write", path, error.strerror or str(error)) from None
