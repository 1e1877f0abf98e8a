"""KV that is read by the address of a whole tensor: which slots, by their content."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import ctypes  # noqa: E402

from kvtrace.agent.connector import traced  # noqa: E402
from kvtrace.agent.left import paths  # noqa: E402
from kvtrace.agent.left.pieces import POOL  # noqa: E402
from kvtrace.agent.state import AGENT  # noqa: E402
from kvtrace.agent.watch import contents, copies, follow  # noqa: E402
from kvtrace.agent.watch.by_address import BY_ADDRESS, Here  # noqa: E402
from kvtrace.agent.watch.caches import CACHES  # noqa: E402
from kvtrace.agent.watch.contents import Contents, pieces_of  # noqa: E402
from kvtrace.agent.watch.layout import layout_of  # noqa: E402
from kvtrace.trace import rows  # noqa: E402
from kvtrace.trace.format import Flag, Form, Kind, Role  # noqa: E402

from . import fakes  # noqa: E402

BLOCKS, BLOCK = 12, 4
GIVEN = [5, 2, 7]
"""Blocks of the prompt of each step."""


@pytest.fixture
def kv():
    CACHES.__init__()
    POOL.__init__()
    paths.PLACES.__init__()
    BY_ADDRESS.__init__()
    follow.begins()
    copies.install()
    return torch.randn(BLOCKS, BLOCK, 8, generator=torch.Generator().manual_seed(7))


def scheduled(blocks):
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(block_ids=(blocks,))],
        scheduled_cached_reqs=SimpleNamespace(new_block_ids=[]),
    )


class Copies(fakes.Copying):
    def start_load_kv(self, forward_context, **kwargs):
        for work in self._connector_metadata.requests:
            if not work.is_store:
                self.how(self, self.caches["layer.0"], work.slot_mapping)


def run(kv, how, steps=1, is_store=True, kind=Copies):
    """``how(number of the step, KV)`` is what the connector does in its hook for saving, or loading."""
    number = [0]
    connector = kind(lambda connector, layer, slots: how(number[0], layer))
    traced(connector, Role.WORKER, "Copying")
    connector.register_kv_caches({"layer.0": kv})
    CACHES._blocks["layer.0"] = BLOCKS, BLOCK
    for number[0] in range(1, steps + 1):
        AGENT.worker.step = AGENT.worker.latest = number[0]
        BY_ADDRESS.scheduled(scheduled(GIVEN), number[0])
        connector.bind_connector_metadata(fakes.WorkMetadata(fakes.Work(torch.arange(4), is_store)))
        with torch.inference_mode():
            connector.start_load_kv(None)
            connector.save_kv_layer("layer.0", kv, None)
            connector.wait_for_save()
        connector.clear_connector_metadata()
    AGENT.worker.step = 0


def reads(trace, unknown_in=()):
    """[(step, slots, whether pieces were kept)]; there are others in the steps of ``unknown_in``."""
    spool, table = trace.read()
    found = []
    for words in table[rows.kind(table[:, 0]) == Kind.SLOTS].tolist():
        row = rows.decode(words)
        if not rows.flags(row.head) & Flag.STORE:
            continue
        text = spool.names[row.slot_set] if row.slot_set else ""
        found.append((row.step, text, bool(rows.flags(row.head) & Flag.KEPT)))
    # What else was read by address is not known, whatever was found.
    assert {step for step, text, _ in found if not text} >= set(unknown_in)
    return [one for one in found if one[1]]


def forms(trace):
    _, table = trace.read()
    found = table[rows.kind(table[:, 0]) == Kind.FOUND].tolist()
    return [Form(rows.code(words[0])) for words in found]


def taken(kv, blocks):
    return kv.numpy()[np.array(blocks)]


def moved(kv, block):
    out = torch.empty(1, BLOCK, 8)
    size = kv.stride(0) * kv.element_size()
    ctypes.memmove(out.data_ptr(), kv.data_ptr() + block * size, size)
    return out.numpy().tobytes()


def test_what_is_written_to_a_file_says_which_slots_were_read(trace, kv, tmp_path):
    run(kv, lambda number, layer: (tmp_path / "store").write_bytes(taken(layer, [2, 7]).tobytes()))
    assert reads(trace, [1]) == [(1, "8+4,28+4", True)]
    assert forms(trace) == [Form.VERBATIM]


def test_an_array_that_is_kept_from_the_registration_on(trace, kv, tmp_path):
    held = {}

    def how(number, layer):
        held.setdefault("kv", layer.numpy())
        (tmp_path / f"store{number}").write_bytes(held["kv"][GIVEN[number]].tobytes())

    run(kv, how, steps=2)
    assert reads(trace) == [(1, "8+4", True), (2, "28+4", True)]


def test_what_goes_on_in_memory_is_found_in_the_tensors(trace, kv):
    kept = []
    run(kv, lambda number, layer: kept.append(torch.from_numpy(taken(layer, [5])).flip(1)))
    assert reads(trace, [1]) == [(1, "20+4", True)]


def test_what_leaves_altered_says_nothing(trace, kv, tmp_path):
    run(kv, lambda number, layer: (tmp_path / "store").write_bytes((taken(layer, [5]) * 0.5).tobytes()))
    assert reads(trace, [1]) == [] and not forms(trace)


def test_something_else_beside_it_leaves_all_unknown(trace, kv, tmp_path):
    other = np.random.default_rng(3).bytes(8192)
    run(kv, lambda number, layer: (tmp_path / "store").write_bytes(taken(layer, [5]).tobytes() + other))
    assert reads(trace, [1]) == []


def test_zeros_beside_it_are_of_blocks_that_are_not_known(trace, kv, tmp_path):
    """The block behind a prompt's last one, which nobody has: what stands before it was read all the same."""
    kv[3] = 0
    run(kv, lambda number, layer: (tmp_path / "store").write_bytes(taken(layer, [2, 7, 3]).tobytes()))
    assert reads(trace, [1]) == [(1, "8+4,28+4", True)]


def test_a_block_that_holds_the_beginning_of_another_one_is_not_read_by_that(trace, kv, tmp_path):
    """A prompt that ended within a block, and a longer one with the same beginning: one of them was read."""
    kv[5, :3], kv[5, 3] = kv[2, :3], 0
    run(kv, lambda number, layer: (tmp_path / "store").write_bytes(taken(layer, [2, 7]).tobytes()))
    assert reads(trace, [1]) == []


def test_what_is_kept_and_leaves_in_a_later_step_is_read_once(trace, kv, tmp_path):
    kept = []

    def how(number, layer):
        if number == 1:
            kept.append(torch.from_numpy(taken(layer, [5])).clone())
        else:
            (tmp_path / "store").write_bytes(kept[0].numpy().tobytes())

    run(kv, how, steps=2)
    assert reads(trace) == [(1, "20+4", True)]
    assert forms(trace) == [Form.VERBATIM]


def test_blocks_that_no_prompt_got_are_not_looked_at(trace, kv, tmp_path):
    run(kv, lambda number, layer: (tmp_path / "store").write_bytes(taken(layer, [3, 5]).tobytes()))
    assert reads(trace) == [(1, "20+4", True)]


def test_a_load_that_holds_the_same_content_is_no_read(trace, kv):
    stored = torch.from_numpy(kv.numpy()[[5]].copy())

    def how(number, layer):
        layer.numpy()[np.array([7])] = stored.clone().numpy()

    run(kv, how, is_store=False)
    assert reads(trace) == []


def test_content_that_stood_there_before_is_no_piece_of_what_stands_there_now(trace, kv, tmp_path):
    def how(number, layer):
        data = taken(layer, [5]).tobytes()
        kv[5] += 1.0
        (tmp_path / "store").write_bytes(data)

    run(kv, how)
    assert reads(trace) == [(1, "20+4", False)] and not forms(trace)


def test_copies_by_address_that_are_seen_need_no_search(trace, kv, tmp_path):
    def how(number, layer):
        (tmp_path / "store").write_bytes(moved(layer, 5))

    run(kv, how, steps=2)
    assert [one[:2] for one in reads(trace)] == [(1, "20+4"), (2, "20+4")] and not BY_ADDRESS.on


def test_copies_by_address_of_one_connector_say_nothing_of_another_one(trace, kv, tmp_path):
    """The other's are looked for, also where both read the same."""
    run(kv, lambda number, layer: (tmp_path / "one").write_bytes(moved(layer, 5)))
    run(kv, lambda number, layer: (tmp_path / "other").write_bytes(taken(layer, [5]).tobytes()))
    assert reads(trace, [1]) == [(1, "20+4", True), (1, "20+4", True)]


def test_a_thread_that_reads_and_writes(trace, kv, tmp_path):
    """Its own copies of pieces are not taken for the connector's."""
    with ThreadPoolExecutor(1) as pool:

        def job(layer):
            (tmp_path / "store").write_bytes(taken(layer, [7]).tobytes())

        run(kv, lambda number, layer: pool.submit(job, layer).result())
    assert reads(trace) == [(1, "28+4", True)]
    assert forms(trace) == [Form.VERBATIM]


def test_a_thread_that_loaded_before_says_that_more_may_have_been_read_than_was_found(trace, kv, tmp_path):
    """One of two blocks that begin alike was sent by it, and one that is like no other."""
    kv[5, :3], kv[5, 3] = kv[2, :3], 0
    jobs = queue.Queue()

    def works():
        while (job := jobs.get()) is not None:
            job()
            jobs.task_done()

    def sends(layer):
        for block in (7, 2):
            (tmp_path / f"{block}").write_bytes(taken(layer, [block]).tobytes())

    def hands_over(number, layer):
        jobs.put(lambda: sends(layer))
        jobs.join()

    class Begins(Copies):
        """Its thread begins in a hook for loading, and loads first."""

        def start_load_kv(self, forward_context, **kwargs):
            thread.start()
            jobs.put(lambda: None)
            jobs.join()

    thread = threading.Thread(target=works)
    run(kv, hands_over, kind=Begins)
    jobs.put(None)
    thread.join()
    assert reads(trace, [1]) == [(1, "28+4", True)]


@pytest.mark.parametrize(("loads", "ended"), [(True, ["layer.0"]), (False, [])])
def test_a_job_that_may_have_loaded_by_address_says_that_it_is_over(trace, kv, loads, ended):
    """One that saves does not: what it asked an address for is known."""
    with ThreadPoolExecutor(1) as pool:
        run(kv, lambda number, layer: pool.submit(layer.numpy).result(), is_store=not loads)
    spool, table = trace.read()
    slots = [rows.decode(words) for words in table[rows.kind(table[:, 0]) == Kind.SLOTS].tolist()]
    both = Flag.LOAD | Flag.ASYNC
    over = [row for row in slots if rows.flags(row.head) == both and not row.slot_set]
    assert [spool.names[row.layer] for row in over] == ended


def test_what_a_load_opens_stood_there_before(trace, kv, tmp_path):
    """It is no read that it holds what a block of an earlier prompt held, nor what the load wrote."""
    stored = tmp_path / "store"
    stored.write_bytes(taken(kv, [5]).tobytes())

    def how(number, layer):
        with stored.open("r+b") as file:
            layer.numpy()[2] = np.frombuffer(file.read(), np.float32).reshape(BLOCK, 8)

    run(kv, how, steps=2, is_store=False)
    assert reads(trace) == []


def test_memory_that_is_gone_is_not_read(trace, kv):
    run(kv, lambda number, layer: taken(layer, [5]))
    data = kv[5].numpy().tobytes()
    (found,) = BY_ADDRESS.look(data * 9, Here(), 0)
    assert found.now and found.new.tolist() == [20, 21, 22, 23]
    CACHES._tensors["layer.0"] = lambda: None
    BY_ADDRESS._known.clear()
    (found,) = BY_ADDRESS.look(data * 9, Here(), 0)
    assert not found.now
    before = len(BY_ADDRESS._contents)
    kv += 1.0
    BY_ADDRESS.note(99)
    assert len(BY_ADDRESS._contents) == before


def test_nothing_is_noted_before_an_address_is_given_out(trace, kv, tmp_path):
    run(kv, lambda number, layer: (tmp_path / "store").write_bytes(layer[[5]].numpy().tobytes()), steps=2)
    assert not BY_ADDRESS.on and not len(BY_ADDRESS._contents)
    assert [one[1] for one in reads(trace)] == ["20+4", "20+4"]


# --- contents -----------------------------------------------------------------------------------------

HEADS = 2


def layout_for(memory):
    return layout_of(memory.shape, tuple(s // 4 for s in memory.strides), 4, len(memory), BLOCK, (0, 2))


def known(memory, given=None):
    """All blocks of a layer, heads before slots, so that a slot's begin and end lie apart."""
    found, blocks = Contents(), np.arange(len(memory))
    pieces = pieces_of(memory.ctypes.data, memory.nbytes, layout_for(memory), blocks)
    found.add(3, blocks, np.array([(given or {}).get(block, 1) for block in blocks]), pieces, 99)
    return found


def numbers(seed, blocks):
    return np.random.default_rng(seed).standard_normal((blocks, HEADS, BLOCK, 8), dtype=np.float32)


@pytest.mark.parametrize("seed", range(6))
def test_each_block_that_stands_in_some_bytes_is_named_and_no_other(seed):
    rng = np.random.default_rng(seed)
    memory = numbers(seed, 9)
    blocks = rng.choice(9, size=4, replace=False)
    data = rng.bytes(int(rng.integers(0, 40))) + memory[blocks].tobytes() + rng.bytes(77)
    found = known(memory)
    (one,) = found.look(data)
    assert one.layer == 3 and one.blocks.tolist() == sorted(blocks.tolist()) and one.t == 99
    assert one.times.tolist() == [1] * 4 and not found.unsure
    (twice,) = found.look(data + data)
    assert twice.times.tolist() == [2] * 4


def test_a_part_of_a_block_is_no_block():
    memory = numbers(1, 4)
    assert known(memory).look(memory[1, 0].tobytes() + memory[1, 1, 1:].tobytes()) == []


def test_of_two_that_hold_the_same_the_newer_counts_and_of_one_step_none():
    memory = numbers(1, 6)
    memory[4] = memory[1]
    newer = known(memory, {4: 2})
    assert newer.look(memory[1].tobytes())[0].blocks.tolist() == [4] and not newer.unsure
    alike = known(memory)
    assert alike.look(memory[1].tobytes()) == [] and alike.unsure


def test_tokens_that_prompts_share_in_one_layer_are_no_block():
    memory = numbers(1, 6)
    memory[4, :, :2] = memory[1, :, 1:3]
    (one,) = known(memory).look(memory[1].tobytes())
    assert one.blocks.tolist() == [1]


def test_a_block_of_which_little_is_known_is_not_named():
    memory = numbers(1, 3)
    memory[1, :, 1:] = 0.0
    found = known(memory)
    assert found.look(memory[1].tobytes()) == [] and found.unsure


def test_zeros_tell_nothing_and_memory_is_bounded(monkeypatch):
    memory = numbers(1, 6)
    memory[:] = 0.0
    found = known(memory)
    assert found.look(memory.tobytes()) == [] and not len(found)
    monkeypatch.setattr(contents, "MOST_KNOWN", 40)
    for t in range(9):
        memory[:] = numbers(t, 6)
        pieces = pieces_of(memory.ctypes.data, memory.nbytes, layout_for(memory), np.arange(6))
        found.add(0, np.arange(6), np.ones(6, dtype=np.int64), pieces, t)
        assert len(found) <= 40
        assert found.look(memory[2].tobytes())[0].t == t
