"""Rules in a file: ``[tool.kvtrace.check]`` of pyproject.toml, or ``[check]`` of kvtrace.toml."""

from __future__ import annotations

import importlib
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtrace.gate.baseline import GateError
from kvtrace.gate.rules import Rules, from_table, nearest
from kvtrace.regular import read_regular

KVTRACE_TOML = "kvtrace.toml"
PYPROJECT = "pyproject.toml"
MAX_BYTES = 4 << 20
_OURS = re.compile(r"^\s*\[{1,2}\s*tool\s*\.\s*[\"']?kvtrace\b|^\s*tool\s*\.\s*kvtrace\b", re.MULTILINE)


def find_rules(start: Path) -> Rules:
    """Rules of the nearest file at or above `start` that has any; empty ones where there is none.

    The search ends at the root of the repository. kvtrace.toml wins over pyproject.toml beside it.

    Raises:
        GateError: such a file that cannot be used.
    """
    for folder in (start, *start.parents):
        file, project = folder / KVTRACE_TOML, folder / PYPROJECT
        if file.is_file():
            return read_rules(file)
        if project.is_file() and (rules := _read(project, needed=False)) is not None:
            return rules
        if (folder / ".git").exists():
            break
    return Rules()


def read_rules(path: Path) -> Rules:
    """The rules in the TOML file at `path`; it has to hold some.

    Raises:
        GateError: unreadable, no TOML, no rules, unknown keys or causes; a Python without a TOML parser.
    """
    rules = _read(path, needed=True)
    assert rules is not None
    return rules


def _read(path: Path, needed: bool) -> Rules | None:
    """None where a pyproject.toml that nobody asked for says nothing of kvtrace."""
    shown = _shown(path)
    try:
        data = read_regular(path, MAX_BYTES)
        if len(data) > MAX_BYTES:
            raise GateError(f"larger than any configuration ({MAX_BYTES >> 20} MiB)", shown)
        text = data.decode("utf-8-sig")
    except FileNotFoundError:
        raise GateError(
            "no such configuration", shown, f"write a {KVTRACE_TOML} with a [check] table"
        ) from None
    except OSError as error:
        raise GateError("cannot read", shown, error.strerror or str(error)) from None
    except UnicodeDecodeError:
        if not needed:
            return None
        raise GateError("not TOML (not UTF-8 text)", shown) from None
    if not needed and not _OURS.search(text):
        return None
    parser = _parser(shown)
    try:
        document: dict[str, Any] = parser.loads(text)
    except (ValueError, RecursionError) as error:
        raise GateError("not TOML", shown, str(error)[:200]) from None
    if path.name == PYPROJECT:
        tool = document.get("tool")
        section: object = tool.get("kvtrace") if isinstance(tool, dict) else None
        place = f"{shown} [tool.kvtrace.check]"
    else:
        section, place = document, f"{shown} [check]"
    if section is not None and not isinstance(section, dict):
        raise GateError(place, "should be a table")
    for key in section or {}:
        if key != "check":
            raise GateError(
                f"unknown key {key!a}", place, nearest(str(key), ["check"], "rules stand in check")
            )
    if not section or "check" not in section:
        if needed:
            raise GateError("no rules in this file", shown, f"write them into {place[len(shown) + 1 :]}")
        return None
    rules = from_table(section["check"], place)
    if rules.baseline is None:
        return rules
    # a path in a configuration is meant from where that file is
    return replace(rules, baseline=_shown(path.parent / os.path.expanduser(rules.baseline)))


def _parser(shown: str) -> Any:
    for name in ("tomllib", "tomli"):
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    version = ".".join(map(str, sys.version_info[:2]))
    raise GateError(
        f"Python {version} has no TOML parser",
        shown,
        "install tomli, or give the rules as options with --no-config",
    )


def _shown(path: Path) -> str:
    """Relative to here where that is shorter to read."""
    try:
        return str(Path(os.path.realpath(path)).relative_to(os.path.realpath(Path.cwd())))
    except (ValueError, OSError):
        return str(path)
