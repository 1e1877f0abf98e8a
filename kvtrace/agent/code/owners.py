"""Whose code a source file is: a connector's own, or vLLM's, torch's, the standard library's.

A connector's own: everything outside the environment's packages and the standard library
(people keep connectors beside their scripts), and inside them the packages that its class
and the objects it holds come from. Of vLLM only a bundled connector's own modules count.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

from kvtrace.agent.code.attributes import attributes

_FOREIGN = {"builtins", "torch", "numpy", "vllm", "kvtrace", "safetensors"}
_BUNDLED = ("kv_transfer", "kv_offload", "kv_connector")
BASES = ("kv_connector/v1/base.py", "kv_connector/base.py")
_MAX_OWNERS = 64


class Owner:
    """Tells one connector's source files; answers are cached per file."""

    def __init__(self, connector: Any, index: int) -> None:
        self.index = index
        base = type(connector)
        modules = {cls.__module__ for cls in (*base.__mro__, *map(type, _held(connector)))}
        own = [name for name in modules if not is_foreign(name)]
        self._modules = {str(getattr(sys.modules.get(name), "__file__", None)) for name in own}
        self._packages = set(map(top, own))
        self._bundled = any(
            cls.__module__.startswith("vllm.") and not cls.__module__.endswith("base") for cls in base.__mro__
        )
        self._known: dict[str, bool] = {}

    def owns(self, filename: str) -> bool:
        known = self._known.get(filename)
        if known is None:
            known = self._known[filename] = self._look(filename)
        return known

    def holds(self, filename: str) -> bool:
        """The file of its class, or of what it holds."""
        return filename in self._modules

    def surely_owns(self, filename: str) -> bool:
        """Not only "nobody else's": the file of its class or of what it holds, or its package."""
        if filename in self._modules:
            return True
        folders = [_folder(name) for name in (*self._packages, "vllm")]
        inside = any(folder and filename.startswith(folder) for folder in folders)
        return inside and self.owns(filename)

    def _look(self, filename: str) -> bool:
        if filename.startswith("<") or is_stdlib_file(filename):
            return False
        path = filename.replace("\\", "/")
        for name in ("kvtrace", "torch", "vllm"):
            folder = _folder(name)
            if folder and path.startswith(folder):
                inside = name == "vllm" and self._bundled and any(word in path for word in _BUNDLED)
                return inside and not path.endswith(BASES)
        for name in self._packages:
            folder = _folder(name)
            if folder and path.startswith(folder):
                return True
        return "/site-packages/" not in path and "/dist-packages/" not in path


class OwnerToCome:
    """Of code that runs before its connector is made, as a thread of its constructor: whose shows then."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._asked = -1
        self._owner: Owner | None = None

    @property
    def index(self) -> int:
        if self._owner is None and self._asked != _registered:
            self._asked, self._owner = _registered, _owners.get(index_of(self._file))
        return 0 if self._owner is None else self._owner.index

    def owns(self, filename: str) -> bool:
        return self.index > 0 and self._owner is not None and self._owner.owns(filename)


_owners: dict[int, Owner] = {}
_registered = 0


def register(connector: Any, index: int) -> Owner:
    """Learn (again) what is the connector's own: what it holds may have changed."""
    global _registered
    _registered += 1
    owner = _owners[index] = Owner(connector, index)
    while len(_owners) > _MAX_OWNERS:
        del _owners[next(iter(_owners))]
    return owner


def generation() -> int:
    """Another number after each registration: what was not owned before may be now."""
    return _registered


def owner_of(index: int) -> Owner | None:
    return _owners.get(index)


def index_of(filename: str) -> int:
    """Index of the connector (the last made one) whose code a file is; 0 where it is nobody's."""
    return _index_at(filename, _registered)


@functools.lru_cache(maxsize=4096)
def _index_at(filename: str, registered: int) -> int:
    """As of so many registrations: each may change it."""
    for index in sorted(_owners, reverse=True):
        if _owners[index].surely_owns(filename):
            return index
    return 0


def _held(connector: Any) -> list[Any]:
    found: list[Any] = []
    for value in attributes(connector).values():
        found.extend(value[:16] if isinstance(value, (list, tuple)) else (value,))
    return found


def is_foreign(module: str) -> bool:
    """Whether a module of that name is no connector's own: vLLM's, torch's, the standard library's."""
    return top(module) in _FOREIGN or is_stdlib_module(top(module))


def top(module: str | None) -> str:
    return (module or "builtins").partition(".")[0]


def is_stdlib_module(name: str) -> bool:
    return name in sys.stdlib_module_names


_STDLIB = os.path.dirname(os.__file__).replace("\\", "/") + "/"


def is_stdlib_file(filename: str) -> bool:
    path = filename.replace("\\", "/")
    if path.startswith("<frozen "):
        return True
    return path.startswith(_STDLIB) and "/site-packages/" not in path and "/dist-packages/" not in path


def package_of(filename: str) -> str:
    """The package of an environment that a file lies in, "vllm" wherever that lies; "" of any other."""
    parts = filename.replace("\\", "/").split("/")
    if "vllm" in parts:
        return "vllm"
    known = [at for at, part in enumerate(parts) if part in ("site-packages", "dist-packages")]
    return parts[known[-1] + 1] if known else ""


_folders: dict[str, tuple[Any, str]] = {}
"""Package -> its module, and where that lies: asked for each file of thousands."""


def _folder(package: str) -> str:
    """``/where/it/lies/`` of an imported package; "" for a plain module."""
    module = sys.modules.get(package)
    known = _folders.get(package)
    if known is None or known[0] is not module:
        known = _folders[package] = module, _folder_of(module)
    return known[1]


def _folder_of(module: Any) -> str:
    file = getattr(module, "__file__", None)
    if not file or os.path.basename(file) != "__init__.py":
        paths = list(getattr(module, "__path__", ()))
        return str(paths[0]).replace("\\", "/") + "/" if paths else ""
    return os.path.dirname(str(file)).replace("\\", "/") + "/"
