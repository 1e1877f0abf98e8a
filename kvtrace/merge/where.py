"""Which merged directory a path means. Light: every verb asks it first."""

from __future__ import annotations

from pathlib import Path

MERGED_FILE = "merged.json"


def merged_directory(path: str | Path) -> Path | None:
    """The merged directory that `path` is, or lies in as its merged.json; None for neither."""
    path = Path(path)
    try:
        folder = path if path.is_dir() else path.parent if path.name == MERGED_FILE else None
        return folder if folder is not None and (folder / MERGED_FILE).is_file() else None
    except (OSError, ValueError):
        return None
