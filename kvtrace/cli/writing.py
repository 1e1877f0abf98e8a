"""Files that a verb writes: whole or not at all."""

from __future__ import annotations

from pathlib import Path

from kvtrace.export.folder import into_file


def write_file(path: Path, text: str, replace: bool) -> None:
    """Writes `text` to `path` in one go; its folder is made where it is missing.

    Raises:
        KvtraceError: something is there and `replace` is not set; or it is no place for a file.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        path.write_text(text, encoding="utf-8")  # /dev/stdout and the like
    else:
        into_file(path, replace, lambda part: part.write_text(text, encoding="utf-8"))
