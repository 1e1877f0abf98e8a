"""The agent's tables of targets and reads held against vLLM's sources, parsed and not imported."""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtrace.agent.reads import READS, Reads
from kvtrace.agent.targets import TARGETS, Target
from kvtrace.versions import NEWEST

Version = tuple[int, ...]
Read = Callable[[str], "str | None"]
"""Text of a file below the folder that holds `vllm/`, or None."""

Function = (ast.FunctionDef, ast.AsyncFunctionDef)
_MAX_IMPORTS = 8
"""Modules through which a name may be handed on."""


class NoVllm(Exception):
    """PATH holds no vLLM; one line."""


@dataclass(frozen=True)
class FoundTarget:
    """``expected``: whether the row is meant for that version."""

    target: Target | Reads
    expected: bool
    problems: tuple[str, ...]

    @property
    def hooked(self) -> bool:
        """Else it is only read."""
        return isinstance(self.target, Target)


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


def parse_version(text: str) -> Version:
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def meant_for(versions: str, version: Version) -> bool:
    """Whether ``0.15.0 .. 0.15.1`` holds a version.

    What holds up to the newest vLLM that was read is expected of newer ones, too.
    """
    first, last = (parse_version(part) for part in versions.split(".. "))
    return first <= version and (version <= last or last == parse_version(NEWEST))


def check(
    read: Read, version: Version, rows: Sequence[Target | Reads] = (*TARGETS, *READS)
) -> list[FoundTarget]:
    """What each row lacks in these sources."""
    sources = Sources(read)
    found = []
    for row in rows:
        if sources.module(row.module) is None:
            problems = [f"no module {row.module}"]
        elif isinstance(row, Target):
            problems = list(_target_problems(sources, row))
        else:
            problems = list(_read_problems(sources, row))
        found.append(FoundTarget(row, meant_for(row.versions, version), tuple(problems)))
    return found


def _target_problems(sources: Sources, target: Target) -> Iterator[str]:
    """What is hooked must be defined in the module itself: there the agent puts something in its place."""
    if sources.find(target.module, target.attr, inherited=False) is None:
        yield f"no {target.attr}"
    for line in target.expects:
        dotted, _, parameters = line.partition("(")
        node = sources.find(target.module, dotted, inherited=False)
        if not isinstance(node, Function):
            yield f"no function {dotted}"
        else:
            yield from _parameter_problems(dotted, node, parameters)


def _read_problems(sources: Sources, row: Reads) -> Iterator[str]:
    """What is read may be inherited, imported from elsewhere, or made in a method: ``self.name = ...``."""
    if row.holder and sources.find(row.module, row.holder) is None:
        yield f"no {row.holder}"
        return
    for name in row.names:
        name, _, parameters = name.partition("(")
        dotted = f"{row.holder}.{name}" if row.holder else name
        node = sources.find(row.module, dotted)
        if node is None:
            yield f"no {dotted}"
        elif isinstance(node, Function):
            yield from _parameter_problems(dotted, node, parameters)


def _parameter_problems(dotted: str, node: ast.AST, parameters: str) -> Iterator[str]:
    wanted = [name.strip() for name in parameters.rstrip(")").split(",") if name.strip()]
    arguments = node.args  # type: ignore[attr-defined]
    have = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    rest = iter(have)
    if not all(name in rest for name in wanted):  # in this order, others may stand between
        yield f"{dotted} has parameters ({', '.join(have)}), wanted {', '.join(wanted)}"


class Sources:
    """The parsed modules of one vLLM, and what their names stand for."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._parsed: dict[str, tuple[ast.Module, bool] | None] = {}

    def module(self, name: str) -> ast.Module | None:
        parsed = self._parse(name)
        return None if parsed is None else parsed[0]

    def _parse(self, name: str) -> tuple[ast.Module, bool] | None:
        """(the module, whether it is a package)."""
        if name not in self._parsed:
            path = name.replace(".", "/")
            plain = self._read(f"{path}.py")
            text = plain if plain is not None else self._read(f"{path}/__init__.py")
            self._parsed[name] = None if text is None else (ast.parse(text), plain is None)
        return self._parsed[name]

    def find(self, module: str, dotted: str, inherited: bool = True) -> ast.AST | None:
        """What stands for ``name`` or ``Class.name``: a definition, or the statement that binds it.

        Args:
            inherited: whether imports and base classes are followed.
        """
        holder, _, name = dotted.rpartition(".")
        if not holder:
            found = self._top(module, name, imports=inherited)
            return None if found is None else found[1]
        return self._member(module, holder, name, inherited)

    def _member(self, module: str, holder: str, name: str, inherited: bool) -> ast.AST | None:
        found = self._top(module, holder, imports=inherited)
        if found is None:
            return None
        where, cls = found
        if not isinstance(cls, ast.ClassDef):
            return None
        member = _last(_statements(cls), name) or (_made_in_methods(cls, name) if inherited else None)
        bases = [base.value if isinstance(base, ast.Subscript) else base for base in cls.bases]
        for base in bases if inherited else []:
            if member is None and isinstance(base, ast.Name) and base.id != holder:
                member = self._member(where, base.id, name, inherited)
        return member

    def _top(self, module: str, name: str, imports: bool, depth: int = 0) -> tuple[str, ast.AST] | None:
        """(module, node) of a name at the top of a module; an import is followed to where it comes from."""
        parsed = self._parse(module)
        if parsed is None or depth > _MAX_IMPORTS:
            return None
        tree, package = parsed
        node = _last(_statements(tree), name)
        if node is not None or not imports:
            return None if node is None else (module, node)
        for one in _statements(tree):
            if not isinstance(one, ast.ImportFrom):
                continue
            source = _absolute(module, package, one)
            for alias in one.names:
                if alias.name == "*" or (alias.asname or alias.name) == name:
                    wanted = name if alias.name == "*" else alias.name
                    found = self._top(source, wanted, imports, depth + 1)
                    if found is not None:
                        return found
        return None


def _last(statements: Iterable[ast.AST], name: str) -> ast.AST | None:
    """The last statement that defines or binds a name."""
    found: ast.AST | None = None
    for one in statements:
        if isinstance(one, (*Function, ast.ClassDef)):
            if one.name == name:
                found = one
        elif any(isinstance(target, ast.Name) and target.id == name for target in _bound(one)):
            found = one
    return found


def _bound(node: ast.AST) -> list[ast.AST]:
    """The targets of an assignment."""
    if isinstance(node, ast.Assign):
        return [inner for target in node.targets for inner in ast.walk(target)]
    return [node.target] if isinstance(node, (ast.AnnAssign, ast.AugAssign)) else []


def _made_in_methods(cls: ast.ClassDef, name: str) -> ast.AST | None:
    """The assignment ``self.name = ...`` in a method."""
    for method in _statements(cls):
        for node in ast.walk(method) if isinstance(method, Function) else ():
            for target in _bound(node):
                if ast.unparse(target) == f"self.{name}":
                    return node
    return None


def _absolute(module: str, package: bool, node: ast.ImportFrom) -> str:
    """The module that an import names."""
    if not node.level:
        return node.module or ""
    parts = module.split(".") if package else module.split(".")[:-1]
    parts = parts[: len(parts) - node.level + 1]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Also those in branches of ``if``, ``try`` and ``with``."""
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from _statements(child)
