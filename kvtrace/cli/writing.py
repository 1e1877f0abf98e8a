"""Files that a verb writes: whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from kvtrace.errors import KvtraceError


def _mode() -> int:
    """That of a file which ``open`` makes: as the umask leaves it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o666 & ~mask


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
    if not replace and os.path.lexists(path):
        raise KvtraceError("this file is there already", path, "give another name, or --force to replace it")
    part: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(prefix=f".{path.name[:60]}.", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(part, _mode())
        if replace:
            os.replace(part, path)
            part = None
        else:
            os.link(part, path)  # fails where somebody else was quicker
    except FileExistsError:
        raise KvtraceError(
            "this file is there already", path, "give another name, or --force to replace it"
        ) from None
    except OSError as error:
        raise KvtraceError("cannot write", path, error.strerror or str(error)) from None
    finally:
        if part is not None:
            Path(part).unlink(missing_ok=True)
