"""A folder for PYTHONPATH that gives a foreign Python the agent and its entry point.

It holds the parts of kvtrace that need nothing but the standard library, as copies: a Python
of another version then writes its byte code here and not into kvtrace's own installation.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import kvtrace
from kvtrace.launch.interpreter import ENTRY_POINT_GROUP, ENTRY_POINT_NAME

_FOLDERS = ("agent", "trace")
_FILES = ("__init__.py", "errors.py", "versions.py")
_TARGET = "kvtrace.agent.plugin:activate"
# Where kvtrace is installed beside, its other parts stay importable through this package.
_EXTEND = "\nfrom pkgutil import extend_path as _extend_path\n\n__path__ = _extend_path(__path__, __name__)\n"


def make_overlay(where: Path) -> Path:
    """Create ``where`` (or, where its path cannot stand in PYTHONPATH, a temporary folder).

    Raises:
        OSError: it cannot be written.
    """
    if os.pathsep in str(where):
        where = Path(tempfile.mkdtemp(prefix="kvtrace-overlay-"))
    source = Path(kvtrace.__file__).parent
    package = where / "kvtrace"
    package.mkdir(mode=0o700, parents=True)
    for name in _FOLDERS:
        for file in sorted((source / name).rglob("*.py")):
            _copy(file, package / file.relative_to(source))
    for name in _FILES:
        _copy(source / name, package / name)
    with open(package / "__init__.py", "a", encoding="utf-8") as text:
        text.write(_EXTEND)
    info = where / f"kvtrace-{kvtrace.__version__}.dist-info"
    info.mkdir(mode=0o700)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: kvtrace\nVersion: {kvtrace.__version__}\n", encoding="ascii"
    )
    (info / "entry_points.txt").write_text(
        f"[{ENTRY_POINT_GROUP}]\n{ENTRY_POINT_NAME} = {_TARGET}\n", encoding="ascii"
    )
    return where


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(mode=0o700, exist_ok=True, parents=True)
    target.write_bytes(source.read_bytes())
