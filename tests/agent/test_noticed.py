"""What a connector can notice of being traced: what docs/concepts.md's table says and no more."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtrace.agent.connector import traced
from kvtrace.trace.format import Role

from . import fakes

PAGE = Path(__file__).resolve().parents[2] / "docs" / "concepts.md"
EXTRA = {"path": "/x", "nested": {"unit": [1, 2]}}


class Mine(fakes.KVConnectorBase_V1):
    """A connector's own documentation."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = EXTRA

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self.called_by = sys._getframe(1).f_code
        self.stack = [frame.function for frame in inspect.stack()]


def seen(connector: Any) -> Any:
    """What stands around the connector's own hook while it runs."""
    connector.save_kv_layer("layer.0", None, None)
    stack, caller = connector.stack, connector.called_by
    del connector.stack, connector.called_by
    return stack, caller.co_name, caller.co_filename


LOOKS: dict[str, Callable[[Any], Any]] = {
    "self.__class__ is MyClass": lambda self: self.__class__ is Mine,
    "isinstance(self, MyClass)": lambda self: isinstance(self, Mine),
    "type(self) == MyClass": lambda self: type(self) == Mine,  # noqa: E721
    "{MyClass: ...}[type(self)]": lambda self: {Mine: 1}[type(self)],
    "type(self).__name__, __qualname__, __module__, __doc__": lambda self: (
        type(self).__name__, type(self).__qualname__, type(self).__module__, type(self).__doc__,
    ),
    "inspect.signature(self.save_kv_layer)": lambda self: str(inspect.signature(self.save_kv_layer)),
    "inspect.getsource(self.save_kv_layer)": lambda self: inspect.getsource(self.save_kv_layer),
    "inspect.getsource(self.__class__)": lambda self: inspect.getsource(self.__class__),
    "vars(self)": lambda self: sorted(vars(self)),
    "pickle.dumps(self)": lambda self: type(pickle.loads(pickle.dumps(self))) is Mine,
    "copy.copy(self), copy.deepcopy(self)": lambda self: (
        copy.copy(self).__class__ is Mine, copy.deepcopy(self).__class__ is Mine,
    ),
    "yaml, json, pickle and type of its configuration": lambda self: (
        yaml.safe_dump(self.extra), json.dumps(self.extra), pickle.dumps(self.extra),
        type(self.extra) is dict,
    ),
    "MyClass.save_kv_layer, vars(MyClass)": lambda self: (Mine.save_kv_layer, sorted(vars(Mine))),
    "type(self) is MyClass": lambda self: type(self) is Mine,
    "type(self).__mro__, type(self).__bases__": lambda self: [id(one) for one in type(self).__mro__],
    "vars(type(self))": lambda self: sorted(vars(type(self))),
    "type(type(self))": lambda self: id(type(type(self))),
    "MyClass.__subclasses__()": lambda self: any(
        one is type(self) for one in Mine.__subclasses__()
    ),
    "self.save_kv_layer.__func__, its __code__": lambda self: (
        self.save_kv_layer.__func__ is Mine.save_kv_layer
    ),
    "inspect.stack(), sys._getframe(1) in a hook": seen,
}  # fmt: skip
"""What connectors do to look at themselves."""


def table() -> dict[str, str]:
    """The page's rows: what is looked at -> the same, or different."""
    text = (
        PAGE.read_text(encoding="utf-8").partition("## What a connector can notice")[2].partition("\n## ")[0]
    )
    rows = re.findall(r"^\| `(.+?)` \| (same|different) \|", text, re.MULTILINE)
    return dict(rows)


@pytest.mark.parametrize("look", LOOKS)
def test_the_page_says_what_differs(trace: Any, look: str) -> None:
    def answer(connector: Any) -> str:
        try:
            return repr(LOOKS[look](connector))
        except Exception as error:
            return repr(error)

    plain = answer(Mine())
    connector = Mine()
    traced(connector, Role.WORKER, "Mine")
    assert table().get(look) == ("same" if answer(connector) == plain else "different")


def test_the_page_lists_nothing_else() -> None:
    assert set(table()) == set(LOOKS)
