"""What an object holds, and that it is read as fast afterwards."""

from __future__ import annotations

import gc
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvtrace.agent.code.attributes import attributes
from kvtrace.agent.hooks.connector import traced
from kvtrace.trace.format import Role

from . import fakes


class Base:
    def __init__(self) -> None:
        self.block_size = 16
        self.late: Any = None


class Plain(Base):
    limit = 3

    def __init__(self) -> None:
        super().__init__()
        self.unit = 256
        self.limit = 4  # stands in the class, too

    @property
    def costly(self) -> int:
        raise AssertionError("nothing of the class is run")


class Slotted(Base):
    __slots__ = ("inside",)


def has_dictionary(value: object) -> bool:
    """Whether Python has made the ``__dict__`` of an object."""
    return any(type(one) is dict and "late" in one for one in gc.get_referents(value))


def test_all_that_an_object_holds_is_found() -> None:
    named = Plain()
    named.__dict__.update(odd=1, block_size=17)
    by_hand = Base()
    setattr(by_hand, "by hand", 2)
    deleted = Base()
    del deleted.late
    slotted = Slotted()
    slotted.inside = 5
    held = SimpleNamespace(a=1)
    for value in (Plain(), named, by_hand, deleted, slotted, held, sys, Plain):
        assert attributes(value) == dict(vars(value))
    assert attributes(5) == attributes([1]) == attributes(object()) == {}


def test_what_is_found_is_a_copy() -> None:
    value = Base()
    attributes(value)["block_size"] = 1
    assert value.block_size == 16


@pytest.mark.skipif(sys.version_info < (3, 11), reason="every object has its __dict__ from the start")
def test_no_dictionary_is_made_of_what_methods_name() -> None:
    value = Base()
    assert attributes(value) == {"block_size": 16, "late": None} and not has_dictionary(value)
    assert vars(value) and has_dictionary(value)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="every object has its __dict__ from the start")
def test_a_traced_connector_is_read_as_fast_as_before(trace: Any) -> None:
    class Example(fakes.Storing):
        def __init__(self) -> None:
            super().__init__()
            self.late = Base()

    connector = Example()
    proxy = traced(connector, Role.WORKER, "Example")
    proxy.save_kv_layer("layer.0", "kv", None)
    assert not has_dictionary(connector) and not has_dictionary(connector.late)
