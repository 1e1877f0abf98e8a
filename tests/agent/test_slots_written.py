"""SLOTS records of watched calls, and indexes that lie on a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvtrace.agent import ids  # noqa: E402
from kvtrace.agent.kv import access  # noqa: E402
from kvtrace.agent.kv.caches import Caches  # noqa: E402
from kvtrace.agent.state import AGENT  # noqa: E402
from kvtrace.agent.watch import records  # noqa: E402
from kvtrace.agent.watch.operations import READ, CopyWatch  # noqa: E402
from kvtrace.trace import hooks, rows  # noqa: E402
from kvtrace.trace.format import Flag, Kind  # noqa: E402

from . import fakes  # noqa: E402
from .fakes import BLOCK, BLOCKS, kv_cache_config, on_worker  # noqa: E402


def pick(connector, kv, slots):
    return kv[slots // BLOCK, slots % BLOCK].clone()


def run(caches, *works, how=pick, number=1):
    connector = on_worker(fakes.Copying(how))
    connector.register_kv_caches(caches)
    fakes.step(connector, caches, *works, number=number)


def written(trace):
    """[(hook, flags, layer, set, slots, partly, call)] in order."""
    names, found = trace.names(), []
    for row in trace.rows(Kind.SLOTS):
        name = names[row.slot_set] if row.slot_set else None
        flags = rows.flags(row.head)
        found.append(
            (hooks.name_of(rows.code(row.head)), flags, names[row.layer], name, row.slots,
             row.partly, row.call)
        )  # fmt: skip
    return found


def test_a_save_names_its_slots_layer_by_layer_and_a_load_too(trace, caches):
    first = next(ids._calls) + 2  # the one between is bind_connector_metadata's
    slots = torch.tensor([5, 6, 7, 21, 20, 39])
    run(caches, fakes.Work(slots), fakes.Work(torch.tensor([0, 1, 12]), is_store=False))
    assert written(trace) == [
        ("start_load_kv", Flag.LOAD, "layer.0", "0+2,12+1", 3, 0, first),
        ("start_load_kv", Flag.LOAD, "layer.1", "0+2,12+1", 3, 0, first),
        ("save_kv_layer", Flag.STORE, "layer.0", "5+3,20+2,39+1", 6, 0, first + 1),
        ("save_kv_layer", Flag.STORE, "layer.1", "5+3,20+2,39+1", 6, 0, first + 2),
    ]
    sets = [name for name in trace.names().values() if "+" in name]
    assert len(sets) == len(set(sets)) == 2, "layers share the names of their sets"
    assert {*trace.table(Kind.SLOTS)[:, 1]} <= {*trace.table(Kind.EFFECT)[:, 1]}, "joined by time"


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (lambda c, kv, s: kv[1, :, :3].clone(), (Flag.STORE, "/4+4", 0, 4)),
        (lambda c, kv, s: kv[1:3].numpy().tobytes(), (Flag.STORE | Flag.LOAD, "4+8", 8, 0)),
        (lambda c, kv, s: kv[1].topk(2), (Flag.STORE, None, -1, -1)),
    ],
)
def test_in_part_by_address_and_not_known(trace, caches, how, expected):
    run(caches, fakes.Work(torch.tensor([5])), how=how)
    saves = [row for row in written(trace) if row[0] == "save_kv_layer"]
    assert [(row[1], *row[3:6]) for row in saves] == [expected, expected]


def test_names_of_sets_are_forgotten_and_memory_stays_bounded(trace, caches):
    for at in range(100):
        records._NAMES.id(f"{at}+1")
    assert AGENT.recorder is not None
    assert len(records._NAMES._ids) == records._MOST_NAMES
    assert not AGENT.recorder.knows("0+1") and AGENT.recorder.knows("99+1")


# --- an index on a device -----------------------------------------------------------------------------


class Device:
    """Stands in for ``torch.cuda``: copies are done when somebody says so; who waits fails."""

    def __init__(self) -> None:
        self.done = False
        device = self

        class Event:
            def record(self, stream: Any) -> None:
                assert stream == "stream"

            def query(self) -> bool:
                return device.done

            def synchronize(self) -> None:
                raise AssertionError("the agent waited for the device")

        self.Event = Event

    def current_stream(self, device: Any) -> str:
        return "stream"


class OnDevice:
    """An index tensor on the device: its values can't be had but by a copy that does not block."""

    device = SimpleNamespace(type="cuda")

    def __init__(self, values: Any) -> None:
        self._values = values
        self.shape, self.dtype = values.shape, values.dtype

    def stride(self) -> Any:
        return self._values.stride()

    def narrow(self, *args: int) -> OnDevice:
        return OnDevice(self._values.narrow(*args))

    def to(self, device: str, non_blocking: bool) -> Any:
        assert device == "cpu" and non_blocking
        return self._values.clone()


def noted(watch: CopyWatch, kv: Any, index: Any) -> None:
    """As ``Watch.ran`` does with ``kv[index]``."""
    seen = access.access_of(kv, access.READS, "index", {"self": kv, "indices": [index]})
    watch._note(watch.caches.at(kv, seen.view), READ, seen)


def cache_of(kv: Any) -> Caches:
    caches = Caches()
    caches.register({"layer.0": kv})
    caches.configure(kv_cache_config(BLOCKS, BLOCK, ["layer.0"]), {})
    return caches


def write(watch: CopyWatch, at: int = 0) -> None:
    """As a save hook in step 9 that was watched."""
    effect = records.CallEffect((READ,), None)
    records.Touching(watch, hooks.SAVE_LAYER.code, 1, 9, 1000 + at, 0, effect=effect).write()


def test_values_on_a_device_are_read_when_they_have_come(trace, monkeypatch):
    device = Device()
    monkeypatch.setattr(torch, "cuda", device)
    kv = torch.randn(BLOCKS, BLOCK, 8)
    first, second = (CopyWatch(cache_of(kv), None) for _ in range(2))
    noted(first, kv, OnDevice(torch.tensor([1, 2])))
    noted(second, kv, torch.tensor([7]))
    AGENT.id("layer.0")
    for at, watch in enumerate((first, second)):
        write(watch, at)
    records.settle()
    # what is known is not held back by what is not
    assert [row[3] for row in written(trace)] == ["28+4"]
    device.done = True
    records.settle()
    assert [row[3:6] for row in written(trace)] == [("28+4", 4, 0), ("4+8", 8, 0)]
    assert [row.slots for row in trace.rows(Kind.EFFECT)] == [4, 8]
    assert not records._waiting


def test_halves_that_two_calls_of_a_step_read_are_all_of_a_slot(trace):
    """K in one job of an executor, V in another."""
    kv = torch.randn(2, BLOCKS, BLOCK, 8)
    AGENT.id("layer.0")
    one, other = slice(1, 3), slice(4, 5)

    def reads(step: int, half: int, blocks: slice) -> None:
        watch = CopyWatch(cache_of(kv), None)
        seen = access.access_of(kv[half, blocks], access.READS, "clone", {})
        watch._note(watch.caches.at(kv, seen.view), READ, seen)
        records.Touching(watch, 0, 1, step, 1000, 0).write()

    of_step = ((1, one), (0, one), (0, other), (1, other), (1, one))
    for asked in ((9, 0, one), *((10, *half) for half in of_step), (0, 1, one), (0, 0, one)):
        reads(*asked)
    part, whole = ("/4+8", 0, 8), ("4+8", 8, 8)
    # each slot is whole once: in the call that completes it
    then = [("/16+4", 0, 4), ("16+4", 4, 4), part]
    assert [row[3:6] for row in written(trace)] == [part, part, whole, *then, part, part]
    for step in range(1, 3 * records._MOST_HALVES):
        reads(step, 0, one)
    assert len(records._halves) <= records._MOST_HALVES + 1, "memory is bounded"


def test_what_never_comes_ends_unknown_and_memory_is_bounded(trace, monkeypatch):
    monkeypatch.setattr(torch, "cuda", Device())
    kv = torch.randn(BLOCKS, BLOCK, 8)
    for at in range(records._MOST_WAITING + 3):
        watch = CopyWatch(cache_of(kv), None)
        noted(watch, kv, OnDevice(torch.tensor([1, 2])))
        write(watch, at)
    assert len(records._waiting) == records._MOST_WAITING
    records._waiting.clear()
    assert [row[3:6] for row in written(trace)] == [(None, -1, -1)] * 3


def test_an_expanded_index_is_copied_without_what_it_repeats(monkeypatch):
    monkeypatch.setattr(torch, "cuda", Device())
    index = OnDevice(torch.tensor([[3], [5]]).expand(2, 8))
    aside = access._kept(index)
    assert tuple(aside.host.shape) == (2, 1) and tuple(aside.shape) == (2, 8)
    kv = torch.arange(80.0).view(10, 8)
    seen = access.access_of(kv, access.READS, "gather", {"self": kv, "index": index, "dim": 0})
    pattern = access.pattern_of(seen, 0)
    assert sorted(pattern.bases.tolist()) == [96, 160] and pattern.dims == ((8, 4),)
