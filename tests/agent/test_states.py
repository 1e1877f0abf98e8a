"""STATES records: which states of Mamba and linear attention a watched call read and wrote."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvtrace.agent.errors.swallowed import THREAD  # noqa: E402
from kvtrace.agent.kv.caches import CACHES  # noqa: E402
from kvtrace.agent.origin import WorkOrigin  # noqa: E402
from kvtrace.agent.watch.states import STATES  # noqa: E402
from kvtrace.agent.watch.work import begin  # noqa: E402
from kvtrace.trace import hooks, rows  # noqa: E402
from kvtrace.trace.format import Flag, Kind  # noqa: E402

from . import fakes  # noqa: E402
from .fakes import on_worker  # noqa: E402

BLOCKS, PAGE = 6, 128

pytestmark = pytest.mark.usefixtures("torch_is_ready")
Do = Callable[[Any], Any]


class Keeping(fakes.KVConnectorBase_V1):
    """Does as told with the caches in ``wait_for_save``, and in ``start_load_kv``."""

    def __init__(self, saves: Do = lambda caches: None, loads: Do = lambda caches: None) -> None:
        super().__init__()
        self.saves, self.loads = saves, loads
        self.kept: list[Any] = []

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.loads(self.caches)

    def wait_for_save(self) -> None:
        self.kept.append(self.saves(self.caches))


@pytest.fixture
def caches():
    """As vLLM lays them out: pages of one block each, with the KV of an attention layer, or with the two
    tensors of a state and a rest that nobody uses."""
    CACHES.__init__()
    STATES.__init__()
    raw = torch.arange(BLOCKS * PAGE, dtype=torch.float32)
    conv = raw.as_strided((BLOCKS, 3, 5), (PAGE, 5, 1), 0)
    recurrent = raw.as_strided((BLOCKS, 2, 4, 8), (PAGE, 32, 8, 1), 15)
    kv = raw.as_strided((BLOCKS, 1, 4, 32), (PAGE, 128, 32, 1))
    yield {"m": [conv, recurrent], "a": kv}
    CACHES.__init__()
    STATES.__init__()


def run(trace, caches, saves: Do = lambda caches: None, loads: Do = lambda caches: None, configured=BLOCKS):
    """[(hook, "read" or "wrote" or "given out" or "end", blocks, part, parts)] of one step."""
    connector = on_worker(Keeping(saves, loads))
    connector.register_kv_caches(caches)
    config = fakes.kv_cache_config(configured, 4, ["a"])
    CACHES.configure(config, {})
    STATES.configure(config, {}, {"m": "state"})
    fakes.step(connector, {}, fakes.Work(torch.tensor([5])))
    names, found = trace.names(), []
    for row in trace.rows(Kind.STATES):
        ways = {int(Flag.STORE): "read", int(Flag.LOAD): "wrote", 0: "end"}
        way = ways.get(rows.flags(row.head), "given out")
        assert (row.layer == 0) == (way == "end") and (not row.layer or names[row.layer] == "m")
        blocks = names[row.blocks] if row.blocks else None
        found.append((hooks.name_of(rows.code(row.head)), way, blocks, row.part, row.parts))
    return found


def of_save(found):
    return [one[1:] for one in found if one[0] == "wait_for_save"]


@pytest.mark.parametrize(
    ("saves", "seen"),
    [
        (lambda caches: [one[2].clone() for one in caches["m"]], [("2+1", 0), ("2+1", 1)]),
        (lambda caches: caches["m"][1][torch.tensor([5, 1, 2])], [("1+2,5+1", 1)]),
        (lambda caches: caches["m"][1][2, 0].clone(), [("/2+1", 1)]),
        (lambda caches: None, []),
    ],
    ids=["both tensors", "of several requests at once", "a piece is no state", "nothing"],
)
def test_the_states_that_a_call_reads_are_named_and_its_end(trace, caches, saves, seen):
    found = [("read", blocks, part, 2) for blocks, part in seen]
    assert of_save(run(trace, caches, saves)) == [*found, ("end", None, 1, 0)]


def test_a_state_that_a_load_writes_is_seen(trace, caches):
    def fills(caches):
        for one in caches["m"]:
            one[3] = 0.0

    found = run(trace, caches, loads=fills)
    of_load = [one[1:] for one in found if one[0] == "start_load_kv"]
    assert of_load == [("wrote", "3+1", 0, 2), ("wrote", "3+1", 1, 2), ("end", None, 1, 0)]


def test_kv_of_tokens_that_is_copied_leaves_the_call_clear(trace, caches):
    """The block is an attention layer's then: its bytes are a state's only where one holds the block."""
    found = run(trace, caches, lambda caches: caches["a"][4].clone())
    assert of_save(found)[-1] == ("end", None, 1, 0)


def test_a_thread_with_work_after_kv_was_copied_may_take_state(trace, caches):
    def hands_over(caches):
        kept = caches["a"][4].clone()
        thread = threading.Thread(target=kept.sum)
        thread.start()
        thread.join()

    assert of_save(run(trace, caches, hands_over))[-1] == ("end", None, 0, 0)


def test_work_that_began_before_there_were_states_is_seen(trace, caches):
    seen = []

    def works():  # in a thread of its own: what watches a thread stays until that ends
        work = begin(THREAD, WorkOrigin(1, 0), __file__)
        seen.append(work.sees_states)
        STATES.register(caches)
        STATES.configure(SimpleNamespace(num_blocks=BLOCKS), {}, {"m": "state"})
        work.got(1, None, None)
        seen.append(work.sees_states)
        with torch.inference_mode():
            caches["m"][0][2].clone()
        work.stop()

    thread = threading.Thread(target=works)
    thread.start()
    thread.join()
    assert seen == [False, True]
    (row,) = trace.rows(Kind.STATES)
    assert trace.names()[row.blocks] == "2+1" and (rows.code(row.head), row.part) == (0, 0)


def test_a_taken_address_is_no_read_and_leaves_all_open(trace, caches):
    found = of_save(run(trace, caches, lambda caches: caches["m"][0][2].data_ptr()))
    assert ("given out", None, 0, 2) in found and found[-1] == ("end", None, 0, 0)


def test_tensors_of_another_number_of_blocks_are_not_known(trace, caches):
    assert of_save(run(trace, caches, lambda caches: caches["m"][0][2].clone(), configured=7)) == []


def test_a_layer_of_which_no_tensors_are_known_leaves_all_open(trace, caches):
    found = []

    def saves(caches):
        STATES.configure(SimpleNamespace(num_blocks=BLOCKS), {}, {"m": "state", "other": "state"})
        found.append(STATES.complete)

    assert of_save(run(trace, caches, saves)) == [("end", None, 0, 0)] and found == [False]


def test_a_model_without_states_has_no_such_records(trace, caches):
    del caches["m"]
    assert run(trace, caches, lambda caches: caches["a"][4].clone()) == []
    assert not STATES.layers and not STATES.complete
