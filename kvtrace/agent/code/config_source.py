"""Which keys of ``kv_connector_extra_config`` a connector's source asks for.

The dictionary is vLLM's own and stays so: nothing watches it. Every place where the source takes hold of it
is followed through variables and attributes, and each use must be one that says its key: ``extra["path"]``,
``extra.get("unit")``, ``get_from_extra_config("path", None)``. Where one does not (``for key in extra``,
``Settings(**extra)``, a key that is put together), nothing is said.

A name is taken for the dictionary rather once too often: then too many keys count as asked for, or nothing is
said.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

DICTIONARY = "kv_connector_extra_config"
GETTER = "get_from_extra_config"

_HANDED = "requires_piecewise_for_cudagraph"
"""A connector's class method that vLLM hands the dictionary (``KVConnectorBase_V1``, from 0.17.1)."""

_BY_KEY = {"get", "pop", "setdefault", "__getitem__", "__contains__"}
_COPIES = {"dict", "copy", "deepcopy", "cast"}
_LOOKS = {"len", "bool", "isinstance", "type", "id", "repr", "str", "print", "hasattr", "callable"}
_LOGS = {"debug", "info", "warning", "error", "exception", "critical", "log", "info_once", "warning_once"}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_MOST_FILES = 200
_Alias = tuple[object, str]
"""Where a name holds (a function or module; "" for an attribute, which holds everywhere), and the name."""
_Asked = tuple[int, str]
"""Which argument of a function is the key: its place and its name."""
_KEY: _Asked = (0, "key")


class Hidden(Exception):
    """Somewhere the source reads the dictionary in a way that does not say which keys."""


def speaks_of_it(file: str, most: int = -1) -> bool:
    """Whether the first so many bytes of a file, source or compiled, name the dictionary; True where it can't
    be read."""
    try:
        with open(file, "rb") as source:
            data = source.read(most)
    except OSError:
        return True
    return DICTIONARY.encode() in data or GETTER.encode() in data


def keys_named(sources: Sequence[str]) -> set[str]:
    """All keys that these files ask for; most of them need not speak of the dictionary.

    Raises:
        Hidden: they may ask for others as well.
        SyntaxError: a file is no Python.
    """
    return _Search(sources).run()


class _Tree:
    """One file, with the way from each node to what is around it."""

    def __init__(self, module: ast.Module) -> None:
        self.module = module
        self.nodes = list(ast.walk(module))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}

    def scopes(self, node: ast.AST) -> Iterator[ast.AST]:
        """The functions around a node, from inside out, then the module."""
        while node is not self.module:
            node = self.parents[node]
            if isinstance(node, _FUNCTIONS):
                yield node
        yield self.module


class _Search:
    def __init__(self, sources: Sequence[str]) -> None:
        self.unread = list(sources)
        self.trees: list[_Tree] = []
        self.keys: set[str] = set()
        self.dictionaries: set[_Alias] = {("", DICTIONARY)}
        self.getters: dict[_Alias, _Asked] = {("", GETTER): _KEY}
        """Functions that are asked for a key."""
        self.constants: set[str] = set()
        """Attributes that keys are written as."""
        self.tree: _Tree

    def run(self) -> set[str]:
        known = -1
        while known != self._known():
            known = self._known()
            self._read()
            for tree in self.trees:
                self.tree = tree
                for node in tree.nodes:
                    self._look(node)
        return self.keys

    def _known(self) -> int:
        return len(self.dictionaries) + len(self.getters) + len(self.constants)

    def _read(self) -> None:
        """The files in which a name stands that holds everywhere."""
        names = {name for where, name in (*self.dictionaries, *self.getters) if where == ""}
        names |= self.constants | {_HANDED}
        wanted = [source for source in self.unread if any(name in source for name in names)]
        self.unread = [source for source in self.unread if source not in wanted]
        if len(self.trees) + len(wanted) > _MOST_FILES:
            raise Hidden
        self.trees += [_Tree(ast.parse(source)) for source in wanted]

    def _look(self, node: ast.AST) -> None:
        if isinstance(node, ast.Constant) and node.value in (DICTIONARY, GETTER):
            self._by_name(node)
        elif isinstance(node, _FUNCTIONS) and node.name == _HANDED:
            self.dictionaries.update((node, one.arg) for one in node.args.args[1:2])
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Load):
            if any(alias in self.dictionaries for alias in self._aliases(node)):
                self._used(node)
            asked = next((self.getters[a] for a in self._aliases(node) if a in self.getters), None)
            if asked is not None:
                self._asked(node, asked)

    def _aliases(self, node: ast.Name | ast.Attribute) -> Iterator[_Alias]:
        if isinstance(node, ast.Attribute):
            yield "", node.attr
        else:
            for scope in self.tree.scopes(node):
                yield scope, node.id

    def _by_name(self, text: ast.Constant) -> None:
        """``getattr(config, "kv_connector_extra_config")``, ``child["kv_connector_extra_config"]``."""
        parent = self.tree.parents[text]
        if isinstance(parent, ast.Subscript) and text.value == DICTIONARY:
            self._used(parent)
        elif isinstance(parent, ast.Call) and _name(parent.func) in ("getattr", *_BY_KEY):
            self._used(parent) if text.value == DICTIONARY else self._asked(parent, _KEY)
        elif not isinstance(parent, (ast.Dict, ast.Compare, ast.Expr)) and not _is_call_of(
            parent, _LOOKS | _LOGS
        ):
            raise Hidden

    def _used(self, node: ast.expr) -> None:
        """An expression that is the dictionary, or a copy of it."""
        parent = self.tree.parents[node]
        if isinstance(parent, ast.Subscript) and parent.value is node:
            self._key(parent.slice)
        elif isinstance(parent, ast.Attribute):
            self._method(parent)
        elif isinstance(parent, ast.Compare):
            if parent.left is not node and isinstance(parent.ops[0], (ast.In, ast.NotIn)):
                self._key(parent.left)
        elif isinstance(parent, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
            for alias in self._targets(parent):
                self.dictionaries.add(alias)
            if isinstance(parent, ast.NamedExpr):
                self._used(parent)
        elif isinstance(parent, ast.BoolOp) or (isinstance(parent, ast.IfExp) and parent.test is not node):
            self._used(parent)
        elif _is_call_of(parent, _COPIES):
            self._used(parent)  # type: ignore[arg-type]
        elif not _only_looks(parent):
            raise Hidden

    def _method(self, method: ast.Attribute) -> None:
        call = self.tree.parents[method]
        called = isinstance(call, ast.Call) and call.func is method
        if method.attr in _BY_KEY:
            self._asked(method, _KEY)
        elif method.attr == "copy" and called:
            self._used(call)  # type: ignore[arg-type]
        else:
            raise Hidden

    def _asked(self, function: ast.expr, asked: _Asked) -> None:
        """An expression that is a function which is asked for a key."""
        parent = self.tree.parents[function]
        if isinstance(parent, ast.Call) and parent.func is function:
            place, name = asked
            by_name = [keyword.value for keyword in parent.keywords if keyword.arg == name]
            if any(isinstance(given, ast.Starred) for given in parent.args[: place + 1]):
                raise Hidden
            if len(parent.args) <= place and not by_name:
                raise Hidden
            self._key(parent.args[place] if len(parent.args) > place else by_name[0])
        elif isinstance(parent, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
            self.getters.update(dict.fromkeys(self._targets(parent), asked))
        elif not _only_looks(parent):
            raise Hidden

    def _targets(self, node: ast.Assign | ast.AnnAssign | ast.NamedExpr) -> Iterator[_Alias]:
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Name):
                scope = next(self.tree.scopes(node))
                if any(
                    isinstance(n, (ast.Global, ast.Nonlocal)) and target.id in n.names
                    for n in ast.walk(scope)
                ):
                    raise Hidden
                yield scope, target.id
                if isinstance(self.tree.parents[node], ast.ClassDef):
                    yield "", target.id
            elif isinstance(target, ast.Attribute):
                yield "", target.attr
            else:
                raise Hidden

    def _key(self, node: ast.expr) -> None:
        if isinstance(node, ast.Constant):
            self.keys.add(str(node.value))
        elif isinstance(node, ast.Name) and self._parameter(node):
            pass
        elif isinstance(node, (ast.Name, ast.Attribute)):
            self.keys.update(self._constants(node))
        else:
            raise Hidden

    def _parameter(self, name: ast.Name) -> bool:
        """The key is a parameter: who calls that function says it."""
        function = next(self.tree.scopes(name))
        if not isinstance(function, _FUNCTIONS) or function.decorator_list:
            return False
        given = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        if name.id not in given:
            return False
        method = isinstance(self.tree.parents[function], ast.ClassDef)
        asked = (given.index(name.id) - method, name.id)
        around = next(self.tree.scopes(function))
        if method or around is self.tree.module:  # who imports it calls it by its name
            self.getters.update({(tree.module, function.name): asked for tree in self.trees if not method})
            self.getters[("", function.name)] = asked
        else:
            self.getters[(around, function.name)] = asked
        return True

    def _constants(self, node: ast.Name | ast.Attribute) -> set[str]:
        """What a name stands for, where it only ever stands for strings that are written there."""
        wanted = node.id if isinstance(node, ast.Name) else node.attr
        found: set[str] = set()
        if isinstance(node, ast.Attribute):
            self.constants.add(wanted)
        for tree in self.trees if isinstance(node, ast.Attribute) else [self.tree]:
            for other in tree.nodes:
                if isinstance(other, (ast.Name, ast.Attribute)) and not isinstance(other.ctx, ast.Load):
                    if wanted == (other.id if isinstance(other, ast.Name) else other.attr):
                        found |= _written(tree.parents[other], tree)
                elif isinstance(other, ast.arg) and other.arg == wanted and isinstance(node, ast.Name):
                    raise Hidden
        if not found:
            raise Hidden
        return found


def _written(binding: ast.AST, tree: _Tree) -> set[str]:
    """The strings that an assignment, or a loop over some that are written there, gives its name."""
    if isinstance(binding, (ast.Assign, ast.AnnAssign)) and binding.value is not None:
        values = [binding.value]
    elif isinstance(binding, (ast.For, ast.comprehension)):
        values = _listed(binding.iter, tree)
    else:
        raise Hidden
    if not all(isinstance(value, ast.Constant) and isinstance(value.value, str) for value in values):
        raise Hidden
    return {str(value.value) for value in values if isinstance(value, ast.Constant)}


def _listed(node: ast.expr, tree: _Tree) -> list[ast.expr]:
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return list(node.elts)
    assigned = [
        statement.value
        for statement in tree.module.body
        if isinstance(node, ast.Name) and isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name) and target.id == node.id
    ]
    if len(assigned) == 1 and isinstance(assigned[0], (ast.Tuple, ast.List, ast.Set)):
        return list(assigned[0].elts)
    raise Hidden


def _name(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _is_call_of(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Call) and _name(node.func) in names


def _only_looks(node: ast.AST) -> bool:
    """What is done with it reads no key: it is tested, or printed as a whole."""
    tested = (ast.If, ast.IfExp, ast.While, ast.Assert, ast.UnaryOp, ast.Expr, ast.FormattedValue)
    return isinstance(node, tested) or _is_call_of(node, _LOOKS | _LOGS)
