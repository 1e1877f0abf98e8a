"""The source of a connector that was imported and not made: its modules, and those that they import.

Of packages of others only those count whose files speak of the connector's configuration at all.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder

from kvtrace.agent.code import owners
from kvtrace.agent.code.config_source import DICTIONARY, GETTER, speaks_of_it

_MOST_FILES = 400
_MOST_CHARACTERS = 16 << 20
_MOST_IN_PACKAGE = 3000
_DYNAMIC = re.compile(r"import_module|__import__|\bexec\(|runpy")
_BUNDLED = re.compile(r"vllm\.(distributed\.kv_transfer|v1\.(kv_offload|simple_kv))")
_BASE = re.compile(r"kv_connector(\.v1)?\.base$|kv_connector\.factory$|kv_connector\.v1$|kv_connector$")
_NAMES = (DICTIONARY, GETTER)


class Unknown(Exception):
    """Not all that may read the configuration can be read."""


def of_class(cls: type) -> dict[str, str]:
    """Module -> text.

    Raises:
        Unknown: a module is no Python source, imports others by a name that is put together, or there are
            too many.
    """
    top = owners.top(cls.__module__)
    todo = [base.__module__ for base in cls.__mro__ if _own(base.__module__)]
    texts: dict[str, str] = {}
    size = 0
    if not todo:
        raise Unknown("no module of its own")
    while todo:
        name = todo.pop()
        if name in texts:
            continue
        spec = find(name)
        if spec is None or not spec.origin:
            raise Unknown(f"{name} is not to be found")
        texts[name] = text = _text(spec.origin)
        size += len(text)
        if len(texts) > _MOST_FILES or size > _MOST_CHARACTERS:
            raise Unknown("too many files")
        if _DYNAMIC.search(text):
            raise Unknown(f"{name} imports modules by names that it puts together")
        todo += [other for other in _imported(name, text, spec) if _counts(other, top)]
    return texts


_NAMED: dict[type, str] = {ast.Attribute: "attr", ast.Name: "id", ast.Constant: "value"}


def uses(texts: dict[str, str]) -> dict[str, int]:
    """How often each name is used: as a name, an attribute or a whole string."""
    found: dict[str, int] = {}
    for node in (node for text in texts.values() for node in ast.walk(ast.parse(text))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.setdefault(node.name, 0)
            continue
        name = getattr(node, _NAMED.get(type(node), ""), "")
        if isinstance(name, str) and name:
            found[name] = found.get(name, 0) + 1
    return found


def find(name: str) -> ModuleSpec | None:
    """Where a module lies, without importing it or what it lies in."""
    loaded: ModuleSpec | None = getattr(sys.modules.get(name), "__spec__", None)
    if loaded is not None:
        return loaded
    path: list[str] | None = None
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        above = ".".join(parts[:count])
        spec = getattr(sys.modules.get(above), "__spec__", None) or PathFinder.find_spec(above, path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
        if not path and count < len(parts):
            return None
    return spec


def _own(name: str) -> bool:
    if owners.is_foreign(name):
        return bool(_BUNDLED.match(name)) and not _BASE.search(name)
    return True


_speaking: dict[str, bool] = {}


def _counts(name: str, top: str) -> bool:
    """Whether a module that is imported may read the configuration."""
    if not _own(name):
        return False
    package = owners.top(name)
    if package in (top, "vllm"):
        return True
    if package not in _speaking:
        _speaking[package] = _speaks(package)
    return _speaking[package]


def _speaks(package: str) -> bool:
    """Whether a file of a package names the configuration; a module beside the connector's always counts."""
    spec = find(package)
    if spec is None:
        return False
    if not spec.submodule_search_locations:
        return "site-packages" not in str(spec.origin) or any(n in _text(str(spec.origin)) for n in _NAMES)
    if "site-packages" not in str(spec.origin or list(spec.submodule_search_locations)):
        return True
    files = 0
    for folder in spec.submodule_search_locations:
        for here, _, names in os.walk(folder):
            for name in names:
                if not name.endswith((".py", ".so")):
                    continue
                files += 1
                if files > _MOST_IN_PACKAGE:
                    raise Unknown(f"{package} is too large to be read")
                if speaks_of_it(os.path.join(here, name), _MOST_CHARACTERS):
                    return True
    return False


def _text(file: str) -> str:
    if not file.endswith(".py"):
        if file.endswith(".so") and not speaks_of_it(file, _MOST_CHARACTERS):
            return ""
        raise Unknown(f"{os.path.basename(file)} is no Python source")
    try:
        with open(file, encoding="utf-8") as source:
            return source.read(_MOST_CHARACTERS)
    except (OSError, UnicodeDecodeError):
        raise Unknown(f"{os.path.basename(file)} cannot be read") from None


def _imported(name: str, text: str, spec: ModuleSpec) -> Iterator[str]:
    """Modules that a module imports, wherever in it; only those that are there."""
    package = name if spec.submodule_search_locations else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if find(alias.name) is not None)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")
            base = ".".join(above[: len(above) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (base, node.module or "") if part)
            if not source or find(source) is None:
                continue
            yield source
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                if (find(source) or spec).submodule_search_locations and find(inner) is not None:
                    yield inner


def literal_in_vllm(folder: str, keys: set[str]) -> set[str]:
    """Those of the keys that a file of vLLM which speaks of the configuration names as a string."""
    found: set[str] = set()
    for here, _, names in os.walk(folder):
        for name in names:
            file = os.path.join(here, name)
            if name.endswith(".py") and speaks_of_it(file, _MOST_CHARACTERS):
                with open(file, encoding="utf-8", errors="replace") as source:
                    text = source.read()
                found |= {key for key in keys if f'"{key}"' in text or f"'{key}'" in text}
    return found
