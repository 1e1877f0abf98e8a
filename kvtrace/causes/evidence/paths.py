"""Paths in findings."""

from __future__ import annotations


def short_path(file: str) -> str:
    """The end of a path: enough to know the file, nothing of where it is installed."""
    parts = [part for part in file.replace("\\", "/").split("/") if part]
    return "/".join(parts[-2:])
