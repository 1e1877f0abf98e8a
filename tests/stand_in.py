"""A stand-in for a package: sources without anything behind them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_sources(folder: Path, sources: Mapping[str, str]) -> Path:
    """Write them below a folder, by path, each folder on the way a package; the folder."""
    for name, text in sources.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for parent in path.parents:
            if parent == folder:
                break
            (parent / "__init__.py").touch()
    return folder
