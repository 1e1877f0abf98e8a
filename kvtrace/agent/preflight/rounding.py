"""Where a connector's source rounds down to whole multiples of max_num_batched_tokens: ``n // unit * unit``,
``n - n % unit``. Only where every value that the unit is given in the source is that setting."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

SETTING = "max_num_batched_tokens"
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEEPEST = 8


def to_batched_tokens(texts: Mapping[str, str]) -> list[str]:
    """``module:line`` of each such place.

    Args:
        texts: module -> source.

    Raises:
        SyntaxError: a module is no Python.
    """
    source = _SourceText({name: ast.parse(text) for name, text in texts.items()})
    found = (
        f"{module}:{unit.lineno}"
        for module, tree in source.trees.items()
        for node in ast.walk(tree)
        for unit in (_units(node) if isinstance(node, ast.BinOp) else ())
        if source.is_setting(unit)
    )
    return list(dict.fromkeys(found))


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
    def __init__(self, trees: dict[str, ast.Module]) -> None:
        self.trees = trees
        nodes = [node for tree in trees.values() for node in ast.walk(tree)]
        self.parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
        self.calls = [node for node in nodes if isinstance(node, ast.Call)]
        self.attributes: dict[str, list[ast.expr]] = {}
        """Attribute -> all values that it is given; one that is not plainly given is not there."""
        for node in nodes:
            if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                self.attributes.setdefault(node.attr, []).append(_given(node, self.parents[node]))

    def is_setting(self, node: ast.expr, depth: int = 0) -> bool:
        """Whether an expression can be nothing but the setting."""
        if depth > _DEEPEST:
            return False
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == "int" and len(node.args) == 1:
                return self.is_setting(node.args[0], depth + 1)
            named = [arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)]
            return node.func.id == "getattr" and named == [SETTING]
        if isinstance(node, ast.Attribute) and node.attr == SETTING and node.attr not in self.attributes:
            return True
        values = self.attributes.get(node.attr, []) if isinstance(node, ast.Attribute) else []
        values = self._of_name(node) if isinstance(node, ast.Name) else values
        return bool(values) and all(self.is_setting(value, depth + 1) for value in values)

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


def _given(target: ast.expr, parent: ast.AST) -> ast.expr:
    """What an assignment gives its target; an unknown name where it is none of one value to one name."""
    if isinstance(parent, (ast.Assign, ast.AnnAssign, ast.NamedExpr)) and parent.value is not None:
        return parent.value
    return ast.Name("?", ast.Load())
