"""Where a connector's source rounds down to whole units: ``n // unit * unit``, ``n - n % unit``.

A unit counts only where every value that it is given in the source is one and the same: a setting of
vLLM's, a number, or a key of the connector's configuration.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvtrace.agent.code.config_source import DICTIONARY, GETTER
from kvtrace.agent.preflight.facts import BATCHED, BLOCK, Rounding

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_OF_TOKENS = re.compile(r"unit|chunk|block|page|segment|granul|token", re.IGNORECASE)
"""Names of what counts tokens; a number of another name may be of bytes."""
_DEEPEST = 8

_Value = tuple[str, Any]
"""(what says it, its value): a setting of vLLM's has the value None, a constant no name."""


def roundings(texts: Mapping[str, str], extra: Mapping[str, Any]) -> list[Rounding]:
    """Each such place.

    Args:
        texts: module -> source.
        extra: the connector's own configuration.

    Raises:
        SyntaxError: a module is no Python.
    """
    source = _SourceText({name: ast.parse(text) for name, text in texts.items()}, extra)
    found = {}
    for module, tree in source.trees.items():
        for node in ast.walk(tree):
            for unit in _units(node) if isinstance(node, ast.BinOp) else ():
                value = source.value(unit)
                if value is not None and _is_unit(value, unit):
                    where = f"{module}:{unit.lineno}"
                    found[where] = Rounding(where, value[0], value[1])
    return list(found.values())


def _is_unit(value: _Value, unit: ast.expr) -> bool:
    """A setting, or a number of tokens, more than one."""
    if value[0] in (BATCHED, BLOCK):
        return True
    named = f"{value[0]} {getattr(unit, 'attr', getattr(unit, 'id', ''))}"
    return type(value[1]) is int and value[1] > 1 and bool(_OF_TOKENS.search(named))


def _units(node: ast.BinOp) -> Iterator[ast.expr]:
    """The unit, where this is a number rounded down to units."""
    if isinstance(node.op, ast.Mult):
        for part, unit in ((node.left, node.right), (node.right, node.left)):
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.FloorDiv) and _same(part.right, unit):
                yield unit
    elif isinstance(node.op, ast.Sub) and isinstance(node.right, ast.BinOp):
        rest = node.right
        if isinstance(rest.op, ast.Mod) and _same(rest.left, node.left):
            yield rest.right


def _same(one: ast.AST, other: ast.AST) -> bool:
    return ast.dump(one) == ast.dump(other)


class _SourceText:
    def __init__(self, trees: dict[str, ast.Module], extra: Mapping[str, Any]) -> None:
        self.trees, self.extra = trees, extra
        nodes = [node for tree in trees.values() for node in ast.walk(tree)]
        self.parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
        self.calls = [node for node in nodes if isinstance(node, ast.Call)]
        self.attributes: dict[str, list[ast.expr]] = {}
        """Attribute -> all values that it is given; one that is not plainly given is not there."""
        for node in nodes:
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                self.attributes.setdefault(node.attr, []).append(_given(node, self.parents[node]))

    def value(self, node: ast.expr, depth: int = 0) -> _Value | None:
        """The one thing that an expression can be; None where it can be several, or is not known."""
        if depth > _DEEPEST:
            return None
        if isinstance(node, ast.Constant):
            return ("", node.value)
        if isinstance(node, ast.Call):
            return self._of_call(node, depth)
        if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            return self._first(node.values, depth)
        if isinstance(node, ast.Attribute):
            setting = _setting(node)
            if setting and node.attr not in self.attributes:
                return (setting, None)
            return self._one(self.attributes.get(node.attr, []), depth)
        return self._one(self._of_name(node), depth) if isinstance(node, ast.Name) else None

    def _one(self, nodes: list[ast.expr], depth: int) -> _Value | None:
        values = [self.value(node, depth + 1) for node in nodes]
        return values[0] if values and all(value == values[0] for value in values) else None

    def _first(self, nodes: list[ast.expr], depth: int) -> _Value | None:
        """Of ``a or b``."""
        for node in nodes:
            value = self.value(node, depth + 1)
            if value is None or value[0] in (BATCHED, BLOCK) or value[1]:
                return value
        return None

    def _of_call(self, node: ast.Call, depth: int) -> _Value | None:
        if isinstance(node.func, ast.Name) and node.func.id == "int" and len(node.args) == 1:
            value = self.value(node.args[0], depth + 1)
            return (value[0], int(value[1])) if value and _is_number(value[1]) else value
        if isinstance(node.func, ast.Name) and node.func.id == "getattr":
            named = [arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)]
            return (BATCHED, None) if named == [BATCHED] else None
        if not self._asks(node.func) or not node.args or node.keywords:
            return None
        key = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
        if not isinstance(key, str):
            return None
        if key in self.extra:
            return (key, self.extra[key])
        return self.value(node.args[1], depth + 1) if len(node.args) > 1 else ("", None)

    def _asks(self, function: ast.expr) -> bool:
        """Whether it is the call that asks for a key of the connector's configuration."""
        if isinstance(function, ast.Name):
            named = self._of_name(function)
            return bool(named) and all(getattr(one, "attr", "") == GETTER for one in named)
        if not isinstance(function, ast.Attribute):
            return False
        return function.attr == GETTER or (
            function.attr == "get" and getattr(function.value, "attr", "") == DICTIONARY
        )

    def _of_name(self, name: ast.Name) -> list[ast.expr]:
        """All values of a local name; of a parameter, what its function is called with."""
        scope: ast.AST = name
        while scope in self.parents and not isinstance(scope, _FUNCTIONS):
            scope = self.parents[scope]
        if isinstance(scope, _FUNCTIONS):
            names = [one.arg for one in (*scope.args.posonlyargs, *scope.args.args)]
            if name.id in names:
                method = isinstance(self.parents[scope], ast.ClassDef)
                made = scope.name == "__init__"  # it is called by other names than its own
                return [] if made else self._arguments(scope.name, name.id, names.index(name.id) - method)
        return [
            _given(node, self.parents[node])
            for node in ast.walk(scope)
            if isinstance(node, ast.Name) and node.id == name.id and not isinstance(node.ctx, ast.Load)
        ]

    def _arguments(self, function: str, parameter: str, place: int) -> list[ast.expr]:
        found: list[ast.expr] = []
        for call in self.calls:
            if getattr(call.func, "attr", getattr(call.func, "id", "")) != function:
                continue
            named = [one.value for one in call.keywords if one.arg == parameter]
            given = named or call.args[place : place + 1]
            found += given or [ast.Name("?", ast.Load())]
        return found


def _setting(node: ast.Attribute) -> str:
    """A setting of vLLM's by its name; "" where it is none."""
    if node.attr == BATCHED:
        return BATCHED
    holder = getattr(node.value, "attr", getattr(node.value, "id", ""))
    return BLOCK if (node.attr, holder) == (BLOCK, "cache_config") else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, str) and value.isdigit())


def _given(target: ast.expr, parent: ast.AST) -> ast.expr:
    """What an assignment gives its target; an unknown name where it is none of one value to one name."""
    if isinstance(parent, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and parent.value is not None:
        return parent.value
    return ast.Name("?", ast.Load())
