"""A folder for PYTHONPATH: the agent with its entry point, and a ``sitecustomize`` that has it in place
before any of the user's code.

The agent is copied, the parts of kvtrace that need nothing but the standard library: the command may run in
any Python in the end, and one of another version then writes its byte code here and not into kvtrace's own
installation.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import kvtrace
from kvtrace.launch.interpreter import ENTRY_POINT_NAME
from kvtrace.launch.private import require_private

_FOLDERS = ("agent", "trace")
_FILES = ("__init__.py", "errors.py", "versions.py")
_TARGET = "kvtrace.agent.plugin:activate"
# Where kvtrace is installed beside, its other parts stay importable through this package.
_EXTEND = "\nfrom pkgutil import extend_path as _extend_path\n\n__path__ = _extend_path(__path__, __name__)\n"

# Python imports one module of this name: the user's own, which this one hides, is run in its place. Every
# Python of the command reads it; nothing of ours may show where the agent can't run.
_SITECUSTOMIZE = '''\
"""Written by kvtrace run: the agent is in place before vLLM; then the user's own sitecustomize."""

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
if sys.version_info >= (3, 10):
    try:
        from kvtrace.agent.bootstrap import wait_for_vllm

        wait_for_vllm()
    except Exception:  # a Python that has no kvtrace, or one that can't read it
        pass
if sys.version_info >= (3,):
    import importlib.machinery
    import importlib.util

    _others = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _here]
    _spec = importlib.machinery.PathFinder.find_spec("sitecustomize", _others)
    if _spec is not None and _spec.loader is not None:
        _theirs = importlib.util.module_from_spec(_spec)
        sys.modules["sitecustomize"] = _theirs
        _spec.loader.exec_module(_theirs)
'''


def make_overlay(where: Path) -> Path:
    """Create ``where`` (or, where its path cannot stand in PYTHONPATH, a temporary folder).

    Raises:
        OSError: it cannot be written.
        LaunchError: the temporary folder is one that somebody else could exchange.
    """
    if os.pathsep in str(where):
        where = Path(tempfile.mkdtemp(prefix="kvtrace-overlay-"))
        try:
            require_private(where, str(where))
        except BaseException:
            where.rmdir()
            raise
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    (where / "sitecustomize.py").write_text(_SITECUSTOMIZE, encoding="ascii")
    _copy_agent(where)
    return where


def _copy_agent(where: Path) -> None:
    source = Path(kvtrace.__file__).parent
    package = where / "kvtrace"
    package.mkdir(mode=0o700)
    for name in _FOLDERS:
        # What was compiled for this Python another one passes over.
        for file in sorted((source / name).rglob("*.py")) + sorted((source / name).glob("*.so")):
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
        f"[{kvtrace.ENTRY_POINT_GROUP}]\n{ENTRY_POINT_NAME} = {_TARGET}\n", encoding="ascii"
    )


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(mode=0o700, exist_ok=True, parents=True)
    target.write_bytes(source.read_bytes())
