"""KV that a connector still holds in plain memory when it is shut down."""

from __future__ import annotations

import collections
import time
from typing import ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvtrace.agent.connector import traced  # noqa: E402
from kvtrace.agent.left import held  # noqa: E402
from kvtrace.agent.left.pieces import POOL  # noqa: E402
from kvtrace.agent.state import AGENT  # noqa: E402
from kvtrace.agent.watch.caches import CACHES  # noqa: E402
from kvtrace.trace import rows  # noqa: E402
from kvtrace.trace.format import MEMORY, Flag, Form, Kind, Role  # noqa: E402

from . import fakes  # noqa: E402

BLOCKS, BLOCK = 10, 4
SLOTS = torch.tensor([20, 21, 22, 23, 8, 9, 10, 11])
GLOBAL: dict = {}


class Shelf:
    """Where a connector keeps things, in all the ways that there are."""

    of_class: ClassVar[dict] = {}

    def __init__(self):
        self.by_key = {}
        self.in_order = collections.OrderedDict()
        self.arena = bytearray(4096)
        self.listed = []
        self.waiting = collections.deque()
        self.touched = []

    @property
    def asked(self):
        self.touched.append("property")
        return {}

    def __getattr__(self, name):
        object.__getattribute__(self, "touched").append(name)
        raise AttributeError(name)

    def __len__(self):
        self.touched.append("len")
        return 1

    def __iter__(self):
        self.touched.append("iter")
        return iter(())

    def __eq__(self, other):
        self.touched.append("eq")
        return False

    __hash__ = object.__hash__


class Slotted:
    __slots__ = ("entry",)


class Loud(dict):
    """A dict whose methods are the user's."""

    def values(self):
        raise AssertionError("the user's code was called")

    __iter__ = items = __len__ = __bool__ = values


class Keeping(fakes.Copying):
    """A connector that keeps KV in the process's memory."""

    def __init__(self, put, at_shutdown=lambda shelf: None):
        self.shelf = Shelf()
        super().__init__(lambda connector, layer, slots: put(connector.shelf, pick(layer)))
        self.at_shutdown = at_shutdown

    def shutdown(self):
        self.at_shutdown(self.shelf)


@pytest.fixture(autouse=True)
def time_enough(monkeypatch):
    """What is found does not hang on how busy the machine is."""
    monkeypatch.setattr(held, "_MOST_NS", 600 * 10**9)


@pytest.fixture
def kv():
    CACHES.__init__()
    POOL.__init__()
    GLOBAL.clear()
    Shelf.of_class.clear()
    return torch.randn(BLOCKS, BLOCK, 8)


def pick(kv, slots=SLOTS):
    return kv[slots // BLOCK, slots % BLOCK]


def data_of(tensor):
    return tensor.contiguous().numpy().tobytes()


def run(kv, put, at_shutdown=lambda shelf: None):
    """One save, and the end of the connector, which is given back."""
    connector = Keeping(put, at_shutdown)
    traced(connector, Role.WORKER, "Keeping")
    connector.register_kv_caches({"layer.0": kv})
    AGENT.worker.step = AGENT.worker.latest = 1
    connector.bind_connector_metadata(fakes.WorkMetadata(fakes.Work(SLOTS)))
    with torch.inference_mode():
        connector.save_kv_layer("layer.0", kv, None)
        connector.wait_for_save()
    connector.clear_connector_metadata()
    AGENT.worker.step = 0
    connector.shelf.touched.clear()
    connector.shutdown()
    return connector


def found(trace):
    """[(form, set of slots, place)]"""
    spool, table = trace.read()
    made = []
    for words in table[rows.kind(table[:, 0]) == Kind.FOUND].tolist():
        row = rows.decode(words)
        made.append((Form(rows.code(row.head)), spool.names[row.slot_set], spool.names[row.target]))
    return made


def whole(place):
    return [(Form.VERBATIM, "8+4,20+4", MEMORY + place)]


def _slotted(shelf, tensor):
    entry = Slotted()
    entry.entry = tensor.clone()
    shelf.by_key["a"] = entry


WAYS = {
    "a dict of tensors": (lambda s, t: s.by_key.update(a=t.clone()), "Keeping.shelf.by_key"),
    "an ordered dict": (lambda s, t: s.in_order.update(a=t.clone()), "Keeping.shelf.in_order"),
    "bytes": (lambda s, t: s.by_key.update(a=b"head" + data_of(t)), "Keeping.shelf.by_key"),
    "arrays": (lambda s, t: s.by_key.update(a=t.numpy().copy()), "Keeping.shelf.by_key"),
    "another layout": (lambda s, t: s.by_key.update(a=t.flip(0).clone().t()), "Keeping.shelf.by_key"),
    "a list of a key": (lambda s, t: s.by_key.update(a=[t[:4] + 0, t[4:] + 0]), "Keeping.shelf.by_key"),
    "slots of a class": (_slotted, "Keeping.shelf.by_key.entry"),
    "an arena": (lambda s, t: s.arena.__setitem__(slice(256, 512), data_of(t)), "Keeping.shelf.arena"),
    "a global": (lambda s, t: GLOBAL.update(a=t.clone()), f"{__name__}.GLOBAL"),
    "a class": (lambda s, t: Shelf.of_class.update(a=t.clone()), f"{__name__}.Shelf.of_class"),
    "a dict of the user's": (lambda s, t: s.by_key.update(x=Loud(a=t.clone())), "Keeping.shelf.by_key"),
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_what_is_held_is_found_by_its_content_and_the_place_is_named(trace, kv, way):
    put, place = WAYS[way]
    connector = run(kv, put)
    assert found(trace) == whole(place)
    assert connector.shelf.touched == [], "no code of the user's runs for it"


OTHERS = {
    "a view of the KV cache": lambda shelf, tensor: None,
    "a queue": lambda shelf, tensor: shelf.waiting.append(tensor.clone()),
    "a list of what waits": lambda shelf, tensor: shelf.listed.append(("a", tensor.clone())),
    "numbers of another kind": lambda shelf, tensor: shelf.by_key.update(a=tensor.double()),
}


@pytest.mark.parametrize("way", OTHERS)
def test_what_is_no_store_is_not_taken_for_one(trace, kv, way):
    run(kv, OTHERS[way])
    assert found(trace) == []


def test_what_is_cut_is_found_cut(trace, kv):
    run(kv, lambda shelf, tensor: shelf.by_key.update(a=data_of(tensor)[:140]))
    assert [form for form, _, _ in found(trace)] == [Form.CUT]


def test_what_shutdown_clears_was_held(trace, kv):
    run(kv, lambda shelf, tensor: shelf.by_key.update(a=tensor.clone()), lambda shelf: shelf.by_key.clear())
    assert found(trace) == whole("Keeping.shelf.by_key")


def test_what_shutdown_puts_away_is_held(trace, kv):
    def drain(shelf):
        shelf.by_key["a"] = shelf.waiting.popleft()

    run(kv, lambda shelf, tensor: shelf.waiting.append(tensor.clone()), drain)
    assert found(trace) == whole("Keeping.shelf.by_key")


@pytest.mark.parametrize("alike", [True, False], ids=["of one package", "of two packages"])
def test_what_one_connector_holds_of_kv_that_another_one_read_as_well_is_its_own(
    trace, kv, monkeypatch, alike
):
    """Two children of one connector read the same KV; the second one alone keeps it."""
    monkeypatch.setattr(held.owners.Owner, "is_of", lambda self, other: alike)
    run(kv, lambda shelf, tensor: shelf.waiting.append(tensor.clone()))
    run(kv, lambda shelf, tensor: shelf.by_key.update(a=tensor.clone()))
    assert found(trace) == whole("Keeping.shelf.by_key") * (2 if alike else 1)


def test_connectors_of_one_package_are_alike():
    """One that comes from elsewhere and holds another one is not of its package, but has it."""
    shelf, outer = held.owners.Owner(Shelf()), collections.Counter()
    assert shelf.is_of(held.owners.Owner(Keeping(None)))
    outer.children = [Keeping(None)]
    outer = held.owners.Owner(outer)
    assert shelf.is_of(outer) and not outer.is_of(shelf)


def test_an_exception_of_shutdown_passes_and_kv_is_found_all_the_same(trace, kv):
    def fail(shelf):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no") as caught:
        run(kv, lambda shelf, tensor: shelf.by_key.update(a=tensor.clone()), fail)
    assert not [one for one in caught.traceback if "kvtrace/agent" in str(one.path)]
    assert found(trace) == whole("Keeping.shelf.by_key")


def test_nothing_is_looked_at_where_no_kv_waits_to_be_found(trace, kv, monkeypatch):
    monkeypatch.setattr(held, "_Walk", None)
    connector = Keeping(None)
    traced(connector, Role.WORKER, "Keeping")
    connector.shutdown()
    _, table = trace.read()
    assert not len(table[rows.kind(table[:, 0]) == Kind.FOUND])


@pytest.mark.parametrize("bound", ["_MOST_OBJECTS", "_MOST_BYTES", "_MOST_NS"])
def test_past_its_bounds_it_stops_and_says_nothing(trace, kv, monkeypatch, bound):
    monkeypatch.setattr(held, bound, 0)
    many = {n: [n] for n in range(2000)}

    def put(shelf, tensor):
        shelf.in_order.update(many)
        shelf.listed.append(many)
        shelf.by_key.update(many, a=tensor.clone())

    run(kv, put)
    assert found(trace) == []


def test_it_is_said_whether_all_was_looked_at(trace, kv, monkeypatch):
    marks = []
    for most in (held._MOST_BYTES, 2048):
        monkeypatch.setattr(held, "_MOST_BYTES", most)
        run(kv, lambda shelf, tensor: shelf.by_key.update(a=tensor.clone()))
        _, table = trace.read()
        heads = table[rows.kind(table[:, 0]) == Kind.FOUND][:, 0]
        marks.append(bool(rows.flags(int(heads[-1])) & Flag.KEPT))
    assert marks == [True, False], "the arena has no room left"


def test_every_object_is_looked_at_once():
    shelf = Shelf()
    shelf.by_key = {n: np.zeros(64, dtype=np.uint8) for n in range(100)}
    shelf.in_order["again"] = shelf.by_key
    walk = held._Walk(shelf, held.owners.Owner(shelf), time.perf_counter_ns() + 10**12)
    assert [name for name, _ in walk].count("Shelf.by_key") == 100
