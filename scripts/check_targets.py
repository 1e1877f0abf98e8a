#!/usr/bin/env python3
"""Hold the agent's table of targets against vLLM's sources, without importing them.

    python scripts/check_targets.py PATH [--version X.Y.Z]

PATH is a wheel of vLLM (CUDA or CPU build: their Python sources are the same), an unpacked one, a checkout
or an installed `vllm` package. Each row of `kvtrace/agent/targets.py` that is meant for that version must be
there, with the functions and parameters that the wrappers rely on. Nothing of vLLM runs: the files are
parsed. Exit code 0, 1 where something is missing, 2 where PATH holds no vLLM.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvtrace.agent.targets import TARGETS, Target

Version = tuple[int, ...]
Read = Callable[[str], "str | None"]
"""Text of a file below the folder that holds `vllm/`, or None."""

Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class NoVllm(Exception):
    """PATH holds no vLLM; one line."""


@dataclass(frozen=True)
class Found:
    target: Target
    expected: bool
    problems: tuple[str, ...]


def open_sources(path: Path) -> Read:
    """A reader of the sources at ``path``.

    Raises:
        NoVllm: it is no wheel and no folder with vLLM in it.
    """
    if path.is_file():
        try:
            wheel = zipfile.ZipFile(path)
        except zipfile.BadZipFile:
            raise NoVllm(f"{path} is no wheel") from None
        names = set(wheel.namelist())
        if "vllm/__init__.py" not in names:
            raise NoVllm(f"{path} holds no vllm package")
        return lambda name: wheel.read(name).decode("utf-8", "replace") if name in names else None
    for root in (path, path.parent) if path.name == "vllm" else (path,):
        if (root / "vllm" / "__init__.py").is_file():
            return lambda name: (root / name).read_text("utf-8") if (root / name).is_file() else None
    raise NoVllm(f"{path} holds no vllm package: give a wheel or the folder that has vllm/ in it")


def version_of(read: Read, path: Path) -> Version | None:
    """From `vllm/_version.py`, else from the name of the wheel or of a dist-info beside the package."""
    match = re.search(r"version\s*=\s*['\"](\d+(?:\.\d+)*)", read("vllm/_version.py") or "")
    names = [path.name]
    if path.is_dir():
        names += [info.name for root in (path, path.parent) for info in root.glob("vllm*.dist-info")]
    for name in names:
        match = match or re.match(r"vllm(?:_cpu)?-(\d+(?:\.\d+)*)", name)
    return parse_version(match[1]) if match else None


def parse_version(text: str) -> Version:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def meant_for(versions: str, version: Version) -> bool:
    """Whether ``0.15.0 .. 0.15.1`` holds a version."""
    first, last = (parse_version(part) for part in versions.split(".. "))
    return first <= version <= last


def check(read: Read, version: Version, targets: tuple[Target, ...] = TARGETS) -> list[Found]:
    """What each target lacks in these sources."""
    found = []
    for target in targets:
        name = target.module.replace(".", "/")
        text = read(f"{name}.py")
        if text is None:
            text = read(f"{name}/__init__.py")
        problems = (
            [f"no module {target.module}"] if text is None else list(_problems(ast.parse(text), target))
        )
        found.append(Found(target, meant_for(target.versions, version), tuple(problems)))
    return found


def _problems(module: ast.Module, target: Target) -> Iterator[str]:
    if _find(module, target.attr.split(".")) is None:
        yield f"no {target.attr}"
    for line in target.expects:
        dotted, bracket, rest = line.partition("(")
        if not bracket:
            if not any(_has_field(module, name.strip()) for name in dotted.split("|")):
                yield f"no field {dotted}"
            continue
        node = _find(module, dotted.split("."))
        if not isinstance(node, Function):
            yield f"no function {dotted}"
            continue
        wanted = [name.strip() for name in rest.rstrip(")").split(",") if name.strip()]
        arguments = node.args
        have = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        rest_of = iter(have)
        if not all(name in rest_of for name in wanted):  # in this order, others may stand between
            yield f"{dotted} has parameters ({', '.join(have)}), wanted {', '.join(wanted)}"


def _find(node: ast.AST, path: list[str]) -> ast.AST | None:
    """The definition of a dotted name: in branches of ``if`` and ``try`` too; the last one counts."""
    for name in path:
        found = None
        for child in _statements(node):
            if isinstance(child, (*Function, ast.ClassDef)) and child.name == name:
                found = child
        if found is None:
            return None
        node = found
    return node


def _has_field(module: ast.AST, dotted: str) -> bool:
    """Whether a class has a field of that name in its body, as dataclasses have."""
    owner, _, name = dotted.rpartition(".")
    node = _find(module, owner.split("."))
    return any(
        isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name) and child.target.id == name
        for child in (_statements(node) if node is not None else ())
    )


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, (ast.If, ast.Try, ast.With)):
            yield from _statements(child)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=Path, help="a wheel, or a folder with vllm/ in it")
    parser.add_argument("--version", help="vLLM's version, where the sources do not say")
    options = parser.parse_args(arguments)
    try:
        read = open_sources(options.path)
        version = parse_version(options.version) if options.version else version_of(read, options.path)
        if not version:
            raise NoVllm(f"{options.path} does not say which vLLM it is: add --version X.Y.Z")
    except (NoVllm, OSError) as error:
        print(f"check_targets: {error}", file=sys.stderr)
        return 2
    bad = 0
    for one in check(read, version):
        state = "ok" if not one.problems else "missing"
        if not one.expected:
            state = "not meant for it"
        bad += one.expected and bool(one.problems)
        print(f"{one.target.id:26} {state:17} {one.target.versions:18} {'; '.join(one.problems)}".rstrip())
    print(f"vLLM {'.'.join(map(str, version))}: {bad or 'no'} target{'' if bad == 1 else 's'} missing")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
