"""Adapters: a connector, or a user, says what the metadata declares."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvtrace.agent.metadata import DeclaredEntry, read
from kvtrace.agent.metadata.adapters import GROUP, Adapter, AdapterContext, Adapters
from kvtrace.trace.format import Flag

from .fakes import KVConnectorMetadata
from .holding import Req, step

ROOT = Path(__file__).resolve().parent.parent.parent
A = "req-a"
STORE, LOAD = int(Flag.STORE), int(Flag.LOAD)


def one_step(**sizes: Any) -> Any:
    return step({A: Req(([11, 12, 13, 14],), prompt=64, before=16, now=48)}, **sizes)


def answer(function: Any, meta: Any = None, **sizes: Any) -> Any:
    holdings = one_step(**sizes)
    given = Adapter("mine:fn", function).entries(meta, holdings)
    return read(meta or SimpleNamespace(jobs=[]), holdings, given)


def test_the_example_of_the_page():
    page = (ROOT / "docs" / "metadata-adapter.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "metadata-adapter.md", "exec"), names)
    put, get = names["Job"](A, [(0, 2, 5), (3, 1, 5)]), names["Job"](A, [(2, 1, 0)])
    meta = names["MyMetadata"]([put], [get])
    assert not read(meta, one_step()).readable  # kvtrace by itself can't know what the triples are
    declared = answer(names["kv_entries"], meta)
    assert declared.readable and declared.store_slots == 48
    assert [(one.req_id, one.direction, one.start, one.slots) for one in declared.entries] == [
        (A, STORE, 0, 32),
        (A, STORE, 48, 16),
        (A, LOAD, 32, 16),
    ]
    assert names["kv_entries"](SimpleNamespace(), None) is None


@pytest.mark.parametrize(
    "given",
    [
        (A, "store", 0, 32),
        (A, "store", 0, 2, "blocks"),
        {"request_id": A, "direction": "store", "start": 0, "end": 32},
        SimpleNamespace(request_id=A, direction="store", start=0, end=2, unit="blocks"),
    ],
)
def test_an_entry_is_a_tuple_a_mapping_or_an_object(given: Any):
    declared = answer(lambda meta, context: iter([given]))
    assert declared.readable and declared.entries == [DeclaredEntry(A, STORE, 32, 32, 0)]


@pytest.mark.parametrize(
    "given",
    [
        (A, "store", 0), "store", (7, "store", 0, 1), (A, "save", 0, 1), (A, "store", 2, 1),
        (A, "store", -1, 1), (A, "store", 0.0, 1), (A, "store", 0, 1, "pages"), None, (A, "store", True, 1),
    ],
)  # fmt: skip
def test_a_broken_entry_leaves_the_step_unread_by_its_adapter(given: Any):
    declared = answer(lambda meta, context: [given])
    assert not declared.readable and not declared.entries
    assert declared.problems[0].shape.startswith("the adapter mine:fn raised ValueError")


def test_an_adapter_that_raises_costs_the_step():
    declared = answer(lambda meta, context: meta.no_such_field)
    assert not declared.readable
    assert "the adapter mine:fn raised AttributeError" in declared.problems[0].shape


def test_blocks_need_one_block_size():
    assert answer(lambda meta, context: [(A, "store", 0, 32)], sizes=(16, 32)).readable
    assert not answer(lambda meta, context: [(A, "store", 0, 2, "blocks")], sizes=(16, 32)).readable


def test_nothing_and_no_answer():
    assert answer(lambda meta, context: []).entries == []
    meta = SimpleNamespace(saves={A: [11, 12]})
    assert answer(lambda meta, context: None, meta).store_slots == 32  # left to the reader


def test_what_an_adapter_is_given():
    context = AdapterContext(one_step())
    assert context.block_sizes == (16,) and dict(context.scheduled) == {A: 48}
    assert context.block_ids(A) == ((11, 12, 13, 14),) and context.block_ids("x") == ()
    assert context.computed(A) == (16, 64) and context.computed("x") is None


class Connector:
    pass


class Derived(Connector):
    pass


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("an_adapter_of_a_test")
    made.kv_entries = lambda meta, context: [(A, "store", 0, 16)]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made


def entry_point(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    points = [importlib.metadata.EntryPoint(name, value, GROUP)]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)


@pytest.mark.parametrize("name", ["Connector", f"{__name__}:Connector", "Derived"])
def test_a_connector_ships_its_adapter(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str):
    entry_point(monkeypatch, name, f"{module.__name__}:kv_entries")
    adapters = Adapters()
    found = adapters.of(Derived)
    assert found is not None and found.function is module.kv_entries
    assert adapters.of(Derived) is found and adapters.of(Derived, True) == found
    assert Adapters().of(object) is None


def test_the_users_own_comes_first(monkeypatch: pytest.MonkeyPatch, module: ModuleType):
    entry_point(monkeypatch, "Connector", "nowhere:x")
    adapters = Adapters(f"{module.__name__}:kv_entries")
    found, inner = adapters.of(Connector), adapters.of(Connector, inside=True)
    assert found is not None and found.name == f"{module.__name__}:kv_entries" and found.function
    assert inner is not None and inner.function is None


@pytest.mark.parametrize(
    "name", ["no.such.module:f", "an_adapter_of_a_test:missing", "an_adapter_of_a_test:number"]
)
def test_an_adapter_that_is_not_there_is_named(module: ModuleType, name: str):
    module.number = 3  # type: ignore[attr-defined]
    found = Adapters(name).of(Connector)
    assert found is not None
    holdings = one_step()
    declared = read(SimpleNamespace(), holdings, found.entries(None, holdings))
    assert not declared.readable and name in declared.problems[0].shape


def test_adapters_of_connectors_inside_a_connector():
    class Multi(KVConnectorMetadata):
        def __init__(self, *metadata: Any) -> None:
            self.metadata = metadata

    class Odd(KVConnectorMetadata):
        pass

    class Plain(KVConnectorMetadata):
        def __init__(self) -> None:
            self.saves = {A: [13]}

    odd, holdings = Odd(), one_step()
    given = Adapter("x", lambda meta, context: [(A, "store", 0, 16)]).entries(odd, holdings)
    assert given is not None
    declared = read(Multi(odd, Plain()), holdings, None, {id(odd): (odd, given)})
    assert declared.readable
    assert [(one.child, one.start, one.slots) for one in declared.entries] == [(1, 0, 16), (2, 32, 16)]
