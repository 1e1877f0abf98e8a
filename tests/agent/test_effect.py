"""EFFECT records: what a sampled call copied, by torch's own account; -1 where that can't be told."""

from __future__ import annotations

import itertools
import os
import queue
import sys
import threading
import time
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from kvtrace.agent.kv.caches import CACHES, Caches  # noqa: E402
from kvtrace.agent.state import AGENT  # noqa: E402
from kvtrace.agent.steps.prefixes import digest_of  # noqa: E402
from kvtrace.agent.watch import call, operations, policy, records  # noqa: E402
from kvtrace.agent.watch.operations import READ, WRITTEN, CopyWatch  # noqa: E402
from kvtrace.agent.wrap.proxy import index_of  # noqa: E402
from kvtrace.trace import hooks  # noqa: E402
from kvtrace.trace.config import AgentConfig  # noqa: E402
from kvtrace.trace.format import Fact, Flag, Kind  # noqa: E402
from kvtrace.trace.rows import code, detail, flags  # noqa: E402

from . import fakes  # noqa: E402
from .conftest import recording  # noqa: E402
from .fakes import BLOCK, BLOCKS, on_worker, step  # noqa: E402

CREDIT = round(AgentConfig.credit * 1e9)

pytestmark = pytest.mark.usefixtures("torch_is_ready")


def _hook(row):
    return hooks.name_of(int(code(row[:1])[0]))


def effects(trace):
    """[(hook, direction, layer, slots, bytes, files, target)] in order."""
    names = trace.names()
    return [
        (_hook(row), int(flags(row[:1])[0]), names.get(row[2], ""), *row[4:].tolist())
        for row in trace.table(Kind.EFFECT)
    ]


def watched_steps(trace):
    return sorted(set(trace.table(Kind.EFFECT)[:, 3].tolist()))


def pick(connector, kv, slots):
    return kv[slots // BLOCK, slots % BLOCK].detach().cpu().contiguous()


def make(caches, how=pick, cls=fakes.Copying):
    connector = on_worker(cls(how))
    connector.register_kv_caches(caches)
    return connector


def store(tokens=7):
    return fakes.Work(torch.arange(5, 5 + tokens))


def save(connector, caches, work=None):
    """One call of its save hook, in a step of its own."""
    AGENT.worker.step = 1
    connector.bind_connector_metadata(fakes.WorkMetadata(work or store()))
    connector.save_kv_layer("layer.0", caches["layer.0"], None)


def load(tokens=6):
    return fakes.Work(torch.arange(5, 5 + tokens), is_store=False)


def test_slots_saved_and_loaded_are_counted_layer_by_layer(trace, caches):
    connector = make(caches)
    step(connector, caches, store(7), load(6))
    layers = ("layer.0", "layer.1")
    found = [row[:4] for row in effects(trace) if row[0] in ("start_load_kv", "save_kv_layer")]
    assert found == [
        *(("start_load_kv", Flag.LOAD, layer, 6) for layer in layers),
        *(("save_kv_layer", Flag.STORE, layer, 7) for layer in layers),
    ]
    assert len(connector.kept) == 2 and connector.kept[0].shape == (7, 8)
    assert (caches["layer.1"][1, 1:3] == 1.0).all()


def test_a_save_in_wait_for_save_is_counted_there_alone(trace, caches):
    connector = make(caches, lambda *_: None)
    save(connector, caches, store(5))
    connector.how = None  # all layers in wait_for_save
    connector.wait_for_save()
    rows = [row[:4] for row in effects(trace)]
    assert rows == [
        ("save_kv_layer", Flag.STORE, "layer.0", 0),
        ("wait_for_save", Flag.STORE, "layer.0", 5),
        ("wait_for_save", Flag.STORE, "layer.1", 5),
    ]


def view_only(connector, kv, slots):
    return kv[1:3].reshape(-1, 8)


def address(connector, kv, slots):
    return kv.data_ptr()


def as_numpy(connector, kv, slots):
    return kv.numpy()[slots.numpy() // BLOCK]


def to_thread(connector, kv, slots):
    done = queue.Queue()
    done.put(kv)
    return done


def to_executor_queue(connector, kv, slots):
    done = queue.SimpleQueue()
    done.put(kv)
    return done


@pytest.mark.parametrize(
    ("how", "slots"),
    [
        (view_only, 0),
        (address, -1),
        (as_numpy, -1),
        (to_thread, -1),
        (to_executor_queue, -1),
        # what torch copies is counted in tests/agent/test_slots.py
        (lambda c, kv, s: kv[1:3].to(torch.float16), 8),
        (lambda c, kv, s: torch.index_select(kv, 0, torch.tensor([3]), out=torch.empty(1, BLOCK, 8)), 4),
        (lambda c, kv, s: torch.zeros(99, BLOCK, 8).index_put_((torch.tensor([0]),), kv[2:3]), -1),
        (lambda c, kv, s: (kv[1:3].clone(), kv[2:4].clone()), 16),
        (lambda c, kv, s: (kv[1:3, :, :4].clone(), kv[1:3, :, 4:].clone()), 8),
        (lambda c, kv, s: torch.cat([kv[0:1], torch.zeros(5, BLOCK, 8)]), 4),
    ],
)
def test_ways_out_of_the_cache(trace, caches, how, slots):
    with torch.inference_mode():
        save(make(caches, how), caches)
    assert [row[:4] for row in effects(trace)] == [("save_kv_layer", Flag.STORE, "layer.0", slots)]


def saved(trace):
    return [row[3] for row in effects(trace) if row[0] == "save_kv_layer"]


def test_a_call_that_asked_the_disk_may_have_found_it_there(trace, caches):
    look = [True]

    def how(connector, kv, slots):
        return os.path.exists("/nowhere") if look[0] else pick(connector, kv, slots)

    connector = make(caches, how)
    step(connector, caches, store())
    look[0] = False
    step(connector, caches, store(), number=2)
    look[0] = True
    step(connector, caches, store(), number=3)
    # it can be seen to read, so that afterwards nothing is nothing
    assert saved(trace) == [-1, -1, 7, 7, 0, 0]


def test_a_thread_that_is_not_followed_may_have_copied(trace, caches):
    stop = threading.Event()
    entered = threading.Event()

    def poll():
        entered.set()
        stop.wait(60)

    connector = make(caches, lambda *_: None)
    thread = threading.Thread(target=poll)
    thread.start()
    entered.wait(60)
    step(connector, caches, store())
    stop.set()
    thread.join()
    step(connector, caches, store(), number=2)
    assert saved(trace) == [-1, -1, 0, 0]


def test_a_copy_in_a_hook_not_for_saving_is_recorded(trace, caches):
    class Late(fakes.Copying):
        def get_finished(self, finished_req_ids):
            self.kept.append(self.caches["layer.1"][1:3].clone())
            return None, None

    connector = make(caches, lambda *_: None, Late)
    AGENT.worker.step = 1
    with torch.inference_mode():
        connector.get_finished(set())
    assert [row[:4] for row in effects(trace)] == [("get_finished", Flag.STORE, "layer.1", 8)]


def test_a_hook_not_for_saving_without_a_copy_has_no_record(trace, caches):
    class Plain(fakes.Copying):
        def get_finished(self, finished_req_ids):
            return set(finished_req_ids), None

    connector = make(caches, lambda *_: None, Plain)
    AGENT.worker.step = 1
    connector.get_finished({"a"})
    assert effects(trace) == []


def test_entries_of_no_slots_cost_no_sample(trace, caches):
    """The first samples are for steps in which there is something to see."""
    connector = make(caches)
    for number in range(1, 21):
        step(connector, caches, store(0), number=number)
    step(connector, caches, store(7), number=21)
    assert saved(trace) == [7, 7]


def test_an_address_taken_at_registration_leaves_all_unsure(trace, caches):
    class Pointers(fakes.Copying):
        def register_kv_caches(self, kv_caches):
            super().register_kv_caches(kv_caches)
            self.pointers = [kv.data_ptr() for kv in kv_caches.values()]

    step(make(caches, lambda *_: None, Pointers), caches, store())
    assert saved(trace) == [-1, -1]


def test_a_custom_operation_on_the_cache_is_unknown(trace, caches):
    library = torch.library.Library("kvtrace_test", "DEF")
    library.define("take(Tensor kv) -> Tensor")
    library.impl("take", lambda kv: kv[0:1].clone(), "CPU")
    step(make(caches, lambda c, kv, s: torch.ops.kvtrace_test.take(kv)), caches, store())
    assert saved(trace) == [-1, -1]


def test_layers_that_share_one_storage_are_told_apart(trace, caches):
    whole = torch.randn(2, BLOCKS, BLOCK, 8)
    caches["layer.0"], caches["layer.1"] = whole
    step(make(caches, lambda c, kv, s: whole[1][s // BLOCK, s % BLOCK]), caches, store(3))
    rows = [row[2:4] for row in effects(trace) if row[0] == "save_kv_layer"]
    # while layer.0 is saved the connector (wrongly) reads layer.1: that is what is written down
    assert ("layer.0", 3) not in rows and ("layer.1", 3) in rows


def test_memory_that_several_groups_share_is_not_attributed(trace):
    raw = torch.randn(BLOCKS * BLOCK * 8)
    caches = Caches()
    caches.register({"full": raw.view(BLOCKS, BLOCK, 8), "window": raw.view(BLOCKS, BLOCK, 8)})
    caches.configure(fakes.kv_cache_config(BLOCKS, BLOCK, ["full"], ["window"]), {})
    watch = CopyWatch(caches, None)
    watch.start()
    raw.view(BLOCKS, BLOCK, 8)[0:1].clone()
    watch.stop()
    read = records.CallEffect((READ, WRITTEN), None)
    records.Touching(watch, hooks.WAIT_SAVE.code, 1, 9, 1000, 0, effect=read).write()
    assert [row[1:4] for row in effects(trace)] == [(Flag.STORE, "full", -1), (Flag.STORE, "window", -1)]


def test_slots_come_from_vllms_cache_config_if_there_is_one(caches):
    known = Caches()
    config = fakes.kv_cache_config(BLOCKS * BLOCK // 8, 8, ["layer.0"])
    known.configure(config, {"layer.0": SimpleNamespace(kv_cache=caches["layer.0"])})
    assert known.slot_bytes(known.layers["layer.0"]) == 32


def test_the_files_that_a_call_wrote_and_what_stands_in_them(trace, caches, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")

    def write(connector, kv, slots):
        rows = pick(connector, kv, slots)
        safetensors.save_file({"kv": rows}, str(tmp_path / "kv.part"))
        os.replace(tmp_path / "kv.part", tmp_path / "kv.safetensors")
        torch.save(rows, tmp_path / "kv.pt")
        with open(tmp_path / "kv.txt", "w") as file:
            file.write("x" * 11)
        with open(tmp_path / "kv.txt") as file:
            file.read()

    save(make(caches, write), caches)
    ((_, _, _, slots, size, files, target),) = effects(trace)
    names = ("kv.safetensors", "kv.pt", "kv.txt")
    assert (slots, files) == (7, 3)
    assert size == sum((tmp_path / name).stat().st_size for name in names)
    assert target == digest_of(str(tmp_path / "kv.safetensors"), AGENT.config.salt)


@pytest.mark.parametrize(
    ("how", "before", "size", "files"),
    [
        ("wb", b"", 64, 1),
        ("wb", b"x", 64, 1),
        ("ab", b"x", 64, 1),
        ("r+b", b"x", -1, -1),  # written in place: how much came can't be told
        ("rename", b"x", 64, 1),
    ],
)
def test_how_much_came_into_the_file_of_a_call(trace, caches, tmp_path, how, before, size, files):
    path = tmp_path / "kv.bin"
    path.write_bytes(before)

    def write(connector, kv, slots):
        part = tmp_path / "kv.part" if how == "rename" else path
        with open(part, "wb" if how == "rename" else how) as file:
            file.write(b"y" * 64)
        if how == "rename":
            part.replace(path)

    save(make(caches, write), caches)
    (record,) = effects(trace)
    assert record[4:6] == (size, files) and record[1] & Flag.STORE
    assert record[-1] == digest_of(str(path), AGENT.config.salt)


def test_another_threads_files_and_copies_are_not_this_calls(trace, caches, tmp_path):
    def write(connector, kv, slots):
        def other():
            (tmp_path / "other").write_text("x")
            kv[0:3].clone()

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    save(make(caches, write), caches)
    ((_, _, _, slots, size, files, _),) = effects(trace)
    assert (slots, size, files) == (-1, 0, 0)


def test_every_step_with_work_is_watched_and_says_so(trace, caches):
    connector = make(caches)
    watched = []
    for number in range(1, 71):
        step(connector, caches, store(2), number=number)
        watched.append(AGENT.worker.watched)
        AGENT.worker.watched = 0
        step(connector, caches, number=1000 + number)
        watched.append(AGENT.worker.watched)
    assert watched_steps(trace) == [*range(1, 71)]
    assert watched == [int(Flag.STORE | Flag.LOAD), 0] * 70


def test_only_the_first_steps_are_watched_if_asked_and_said(tmp_path, caches):
    with recording(tmp_path, "first") as trace:
        connector = make(caches)
        for number in range(1, 71):
            step(connector, caches, store(2), number=number)
        assert watched_steps(trace) == [*range(1, 9)]
        (fact,) = trace.facts(Fact.WATCH_LIMITS)
        assert (fact["kind"], fact["what"], fact["step"]) == ("steps", "first", 9)


def test_past_its_budget_the_watch_samples_and_comes_back(trace, caches):
    connector = make(caches)
    step(connector, caches, store(2), number=1)
    policy.POLICY.spent(CREDIT)  # all that it may take at once
    for number in range(2, 41):
        step(connector, caches, store(2), number=number)
    policy.POLICY.account.busy += 10**12  # an hour of steps, and a hundredth of it is the watch's
    step(connector, caches, store(2), number=41)
    # sampled steps are counted from where sampling began
    assert watched_steps(trace) == [*range(1, 10), 34, 41]


@pytest.mark.parametrize("watch", ["full", "sampled"])
def test_a_budget_without_a_credit_holds_from_the_first_step_on(tmp_path, caches, monkeypatch, watch):
    budget, busy, took = 0.02, 2_000_000, 0
    spent = policy.POLICY.spent
    with recording(tmp_path, watch, credit=0.0, budget=budget) as trace:
        connector = make(caches)

        def pays(cost):
            nonlocal took
            took += 1_000_000  # on a busy machine, too
            spent(1_000_000)

        monkeypatch.setattr(policy.POLICY, "spent", pays)
        for number in range(1, 2001):
            AGENT.worker.watched = 0
            step(connector, caches, store(2), number=number)
            policy.POLICY.account.busy += busy
            assert took <= busy * number * budget / 2 + policy.FIRST_COST, number
        steps = watched_steps(trace)
        assert steps and min(steps) > 400  # the account holds what a step is taken to cost
        said = trace.facts(Fact.WATCH_LIMITS)
        assert [(fact["kind"], fact["step"]) for fact in said if fact["kind"] == "steps"] == [("steps", 1)]


def test_what_the_watch_takes_is_paid_for(trace, caches):
    step(make(caches), caches, store(2), number=1)
    account = policy.POLICY.account
    assert account is not None and 0 < CREDIT - account._saved < CREDIT


def test_a_busy_machine_does_not_use_up_the_credit(trace, caches, monkeypatch):
    for module in (call, operations):  # a second passes whenever the watch looks at the clock
        monkeypatch.setattr(module, "clock", itertools.count(time.perf_counter_ns(), 10**9).__next__)
    step(make(caches), caches, store(2), number=1)
    account = policy.POLICY.account
    assert account is not None and 0 < CREDIT - account._saved < 10**9


def test_the_first_steps_with_work_are_sampled_then_every_32nd(sampled, caches):
    trace = sampled
    connector = make(caches)
    for number in range(1, 71):
        step(connector, caches, store(2), number=number)
        step(connector, caches, number=1000 + number)  # no work: never sampled
    assert watched_steps(trace) == [*range(1, 9), 33, 65]
    assert len(connector.kept) == 140


def test_mute_metadata_is_sampled_on_steps_with_prompt_tokens(sampled, caches):
    trace = sampled

    class Own(fakes.Copying):
        def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
            self.kept.append(kv_layer[0:1].clone())

        def start_load_kv(self, forward_context, **kwargs):
            return

    connector = make(caches, cls=Own)
    for number in range(1, 4):
        AGENT.worker.step, AGENT.worker.prompt = number, number != 2
        connector.bind_connector_metadata(fakes.KVConnectorMetadata())
        connector.save_kv_layer("layer.0", caches["layer.0"], None)
        connector.clear_connector_metadata()
    rows = trace.table(Kind.EFFECT)
    assert rows[:, 3].tolist() == [1, 3] and rows[:, 4].tolist() == [4, 4]


def test_dummy_steps_are_never_sampled(trace, caches):
    connector = make(caches)
    step(connector, caches, store(), number=0)
    assert effects(trace) == [] and len(connector.kept) == 2


def test_an_error_in_a_watched_call_passes_and_leaves_nothing(trace, caches):
    def fail(connector, kv, slots):
        pick(connector, kv, slots)
        raise ValueError("disk full")

    before = (sys.gettrace(), sys.getprofile())
    connector = make(caches, fail)
    with pytest.raises(ValueError, match="disk full") as caught:
        save(connector, caches)
    assert caught.traceback[-1].name == "fail"
    assert (sys.gettrace(), sys.getprofile()) == before
    assert torch._C._len_torch_dispatch_stack() == 0 and torch._C._len_torch_function_stack() == 0
    assert [row[3] for row in effects(trace)] == [7]


def test_a_debugger_or_profiler_keeps_its_place(trace, caches):
    seen = []
    mine = lambda *args: seen.append(args[1]) or None  # noqa: E731
    connector = make(caches, lambda *_: None)
    sys.setprofile(mine)
    try:
        save(connector, caches)
        assert sys.getprofile() is mine
    finally:
        sys.setprofile(None)
    # it could not be watched whether native code ran: nothing is sure
    assert [row[3] for row in effects(trace)] == [-1]


def test_a_child_connector_has_records_of_its_own(trace, caches):
    parent = on_worker(fakes.Fan(fakes.Copying(pick)), "MultiConnector")
    top = index_of(parent)
    parent.register_kv_caches(caches)
    save(parent, caches)
    rows = trace.table(Kind.EFFECT)
    rows = rows[rows[:, 2] > 0]  # of a layer: not of binding
    assert sorted(detail(rows[:, 0]).tolist()) == [top, index_of(parent._connectors[0])]
    assert rows[:, 4].tolist() == [7, 7]
    assert not CACHES.address_taken


def test_an_exception_that_a_child_catches_is_the_childs(trace, caches):
    def refused(connector, layer, kv):
        try:
            raise ConnectionRefusedError("store is down")
        except ConnectionRefusedError:
            return pick(connector, layer, kv)

    class Careless(fakes.Fan):
        def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
            super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
            try:
                raise ValueError("in the parent itself")
            except ValueError:
                return

    parent = on_worker(Careless(fakes.Copying(refused)), "MultiConnector")
    top = index_of(parent)
    save(parent, caches)
    caught = {fact["type"]: fact["connector"] for fact in trace.facts(Fact.SWALLOWED)}
    assert caught == {"ConnectionRefusedError": index_of(parent._connectors[0]), "ValueError": top}


def test_a_watch_that_breaks_changes_nothing_for_the_connector(trace, caches, monkeypatch):
    monkeypatch.setattr(call.CopyWatch, "start", lambda self: 1 / 0)
    monkeypatch.setattr(call.OutsideCall, "files", lambda self: 1 / 0)
    connector = make(caches)
    step(connector, caches, store())
    assert len(connector.kept) == 2
    assert sys.getprofile() is None


def test_what_the_watch_took_is_no_time_of_the_hook(trace, caches, monkeypatch):
    """Its record begins later by that, and ends when the call did."""
    write = call.OutsideCall.write
    waits = 500_000_000

    def slow(self, *given):
        time.sleep(waits / 1e9)
        write(self, *given)

    monkeypatch.setattr(call.OutsideCall, "write", slow)
    began = time.perf_counter_ns()
    save(make(caches), caches)
    ended = time.perf_counter_ns()
    assert ended - began > waits
    (row,) = trace.calls(hooks.SAVE_LAYER)
    assert row[2] - row[1] < 0.8 * waits < row[2] - began
