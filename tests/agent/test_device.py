"""Device timing against a fake CUDA: what is recorded, when, on which stream, and at what cost."""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtrace.agent.budget import BudgetAccount
from kvtrace.agent.engine import ops
from kvtrace.agent.hooks import device as device_module
from kvtrace.agent.hooks import wrappers
from kvtrace.agent.hooks.device import Device
from kvtrace.agent.state import AGENT
from kvtrace.trace import hooks
from kvtrace.trace import ops as op_table
from kvtrace.trace.config import AgentConfig
from kvtrace.trace.facts import DeviceTimingFact
from kvtrace.trace.format import DETAIL_IS_OP, Fact, Flag, Kind, Stop
from kvtrace.trace.rows import code, detail, flags

from . import fakes
from .fake_cuda import Cuda, Stream, on_cuda
from .fakes import on_worker

MS = 1_000_000


@pytest.fixture
def cuda(trace: Any, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda()
    on_cuda(monkeypatch, fake)
    monkeypatch.setattr(device_module, "clock", fake.clock)
    return fake


def make(cuda: Cuda, mode: str = "full", budget: float = 0.01, layers: int = 2) -> Device:
    old = AGENT.config
    AGENT.config = replace(old, device_timing=mode, budget=budget)
    device = Device()
    device.open(layers)
    return device


def step(device: Device, number: int, *calls: Any) -> None:
    device.begin(number)
    for call in calls:
        call()
    device.finish()


def hook(device: Device, body: Any, name: str = "save_kv_layer", layer: str = "layer.0") -> Any:
    head = device_module._head(hooks.BY_NAME[name].code, 1)
    return lambda: device.timed(body, head, layer)


# --- what a timed call says ------------------------------------------------------------------------


def test_a_call_is_timed_on_both_clocks_and_read_a_step_later(trace: Any, cuda: Cuda) -> None:
    device = make(cuda)

    def body() -> None:
        cuda.work(3 * MS)
        cuda.host(MS)

    step(device, 7, hook(device, body))
    assert len(trace.table(Kind.DEVICE)) == 0  # 3 ms of work: not done when the step ended, nobody waited
    cuda.host(5 * MS)
    step(device, 8)
    (row,) = trace.table(Kind.DEVICE)
    assert row[2] == 7 and trace.names()[row[3]] == "layer.0"
    assert (code(row[:1])[0], detail(row[:1])[0]) == (hooks.SAVE_LAYER.code, 1)
    assert 3 * MS <= row[4] < 3.01 * MS and row[5] == 0 and MS <= row[6] < 1.01 * MS
    assert flags(row[:1])[0] == Flag.CAUGHT_UP
    (timed,) = [row for row in trace.table(Kind.TIMED).tolist() if row[3]]
    assert timed[2:6] == [7, 1, 0, 0] and 0 < timed[6] < timed[7]


def test_what_the_device_had_left_to_do_is_a_tight_lower_bound(trace: Any, cuda: Cuda) -> None:
    device = make(cuda)
    idle = hook(device, lambda: cuda.host(1_000))
    step(device, 1, idle, lambda: cuda.work(4 * MS), hook(device, lambda: None, layer="layer.1"))
    cuda.host(9 * MS)
    step(device, 2)
    first, second = trace.table(Kind.DEVICE)
    assert first[5] == 0 and flags(first[:1])[0] & Flag.CAUGHT_UP
    # at most the launch of the first event lies between the bound and the truth
    assert 4 * MS - 10_000 <= second[5] <= 4 * MS and not flags(second[:1])[0] & Flag.CAUGHT_UP


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 3 * MS), st.integers(0, MS), st.booleans()), min_size=1, max_size=8))
def test_the_bound_never_says_more_than_there_was(calls: list[tuple[int, int, bool]]) -> None:
    cuda = Cuda()
    truth: list[int] = []
    records: list[tuple[int, ...]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_module, "clock", cuda.clock)
        patch.setattr(AGENT, "add", records.append)
        patch.setattr(AGENT, "recorder", SimpleNamespace(full=False, alive=True))
        device = Device()
        device._cuda, device._sampler = cuda, BudgetAccount("full", 0.01)
        device._free = [device_module.EventPair(cuda.Event(True), cuda.Event(True)) for _ in range(8)]
        device.begin(1)
        for work, host, waits in calls:

            def body(host: int = host, waits: bool = waits) -> None:
                truth.append(cuda.stream.free_at - cuda.now)
                cuda.host(host)
                if waits:
                    cuda.wait()

            cuda.work(work)
            device.timed(body, device_module._head(5, 1), None)
        device.finish()
        cuda.host(10**10)
        device.begin(2)
        device.finish()
    found = [row for row in records if row[0] & 0xFF == Kind.DEVICE]
    assert len(found) == len(calls)
    for row, real in zip(found, truth, strict=True):
        assert 0 <= row[5] <= max(0, real) + 200  # two readings of the clock lie in between


def test_a_hook_that_switches_streams_is_marked_and_both_asked(trace: Any, cuda: Cuda) -> None:
    device = make(cuda)
    other = Stream(99)

    def leaves() -> None:
        cuda.stream = other
        cuda.work(50 * MS)

    def returns() -> None:
        before, cuda.stream = cuda.stream, Stream(5)
        cuda.work(MS)
        cuda.stream = before

    step(device, 1, hook(device, leaves), hook(device, returns))
    cuda.host(10 * MS)
    step(device, 2)
    assert len(trace.table(Kind.DEVICE)) == 0  # the second stream is not done yet
    cuda.host(60 * MS)
    step(device, 3)
    crossed, stayed = trace.table(Kind.DEVICE)
    assert flags(crossed[:1])[0] & Flag.STREAMS
    assert not flags(stayed[:1])[0] & Flag.STREAMS


def test_only_the_call_on_another_device_goes_untimed(trace: Any, cuda: Cuda) -> None:
    """A thread of the connector's has a current device of its own: no event of ours fits it."""
    device = make(cuda)
    mine, other = cuda.stream, Stream(3, device=1)

    def elsewhere() -> None:
        cuda.stream = other
        hook(device, lambda: None)()
        cuda.stream = mine

    def leaves() -> None:
        cuda.stream = other

    step(device, 1, elsewhere, hook(device, lambda: None), hook(device, leaves))
    cuda.stream = mine
    cuda.host(MS)
    step(device, 2, hook(device, lambda: None))
    cuda.host(MS)
    step(device, 3)
    assert {row[2]: (row[3], row[4]) for row in trace.table(Kind.TIMED).tolist()} == {
        1: (1, 2), 2: (1, 0), 3: (0, 0),
    }  # fmt: skip
    assert [fact["on"] for fact in trace.facts(Fact.DEVICE)] == [True]


def test_the_last_pair_may_go_to_another_thread(trace: Any, cuda: Cuda) -> None:
    device = make(cuda)

    class Raced(list[Any]):
        def __bool__(self) -> bool:
            return True  # there was one when we looked

    done: list[int] = []
    device._free = Raced()
    step(device, 1, hook(device, lambda: done.append(1)))
    assert done == [1] and [fact["on"] for fact in trace.facts(Fact.DEVICE)] == [True]


# --- never in the way ------------------------------------------------------------------------------


def test_nothing_is_recorded_or_asked_during_capture(trace: Any, cuda: Cuda) -> None:
    device = make(cuda)
    cuda.work(MS)
    step(device, 1, hook(device, lambda: None))
    cuda.capturing = True
    step(device, 2, hook(device, lambda: None))

    def captures_inside() -> None:
        cuda.capturing = True

    cuda.capturing = False
    step(device, 3, hook(device, captures_inside))
    assert (cuda.recorded_while_capturing, cuda.asked_while_capturing) == (0, 0)
    cuda.capturing = False
    cuda.host(5 * MS)
    step(device, 4)
    assert [row[2] for row in trace.table(Kind.DEVICE)] == [1]
    assert {row[2]: (row[3], row[4]) for row in trace.table(Kind.TIMED).tolist()} == {
        1: (1, 0), 2: (0, 1), 3: (0, 1), 4: (0, 0),
    }  # fmt: skip


def test_an_empty_pool_leaves_calls_untimed_and_says_so(trace: Any, cuda: Cuda) -> None:
    device = make(cuda)
    pairs = len(device._free)
    assert pairs == 64 and cuda.made == 2 * pairs
    cuda.work(100 * MS)
    done: list[int] = []
    step(device, 1, *[hook(device, lambda: done.append(1)) for _ in range(pairs + 3)])
    assert len(done) == pairs + 3 and not device._free
    step(device, 2, hook(device, lambda: done.append(1)))
    cuda.host(200 * MS)
    step(device, 3)
    timed = {row[2]: (row[3], row[4]) for row in trace.table(Kind.TIMED).tolist()}
    assert timed == {1: (pairs, 3), 2: (0, 1), 3: (0, 0)} and len(device._free) == pairs
    assert cuda.made == 2 * pairs  # no event is made in a step


def test_the_pool_is_bounded(trace: Any, cuda: Cuda) -> None:
    assert len(make(cuda, layers=10_000)._free) == 4096


@pytest.mark.parametrize("when", ["open", "start", "stop", "finish"])
def test_a_device_that_fails_costs_one_line_and_no_call(
    trace: Any, cuda: Cuda, capsys: pytest.CaptureFixture[str], when: str
) -> None:
    message = "CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA"
    if when == "open":
        cuda.fails = message
    device = make(cuda)

    def body() -> str:
        if when == "stop":
            cuda.fails = message
        return "result"

    device.begin(1)
    if when == "start":
        cuda.fails = message
    answers = [hook(device, body)() for _ in range(3)]
    if when == "finish":
        cuda.fails = message
    device.finish()
    step(device, 2, hook(device, body))
    assert answers == ["result"] * 3
    assert capsys.readouterr().err.count("\n") == 1
    last = trace.facts(Fact.DEVICE)[-1]
    why = "RuntimeError: CUDA error: out of memory"
    assert last == DeviceTimingFact(on=False, why=why).to_json()
    assert trace.facts(Fact.AGENT_ERROR) == [] and not device.on


def test_an_exception_goes_through_and_gives_its_events_back(trace: Any, cuda: Cuda) -> None:
    device = make(cuda)
    free = len(device._free)

    def bad() -> None:
        raise KeyError("mine")

    device.begin(1)
    with pytest.raises(KeyError, match="mine"):
        hook(device, bad)()
    device.finish()
    assert len(device._free) == free and len(trace.table(Kind.DEVICE)) == 0


# --- the wrappers ----------------------------------------------------------------------------------


def test_off_and_without_cuda_nothing_is_wrapped(
    trace: Any, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def code_of(mode: str, platform: str) -> Any:
        make(cuda, mode)
        monkeypatch.setattr(sys.modules["vllm.platforms"].current_platform, "device_type", platform)
        connector = on_worker(fakes.Storing())
        return [
            "_kvt_timed" in connector.save_kv_layer.__func__.__globals__,
            connector.wait_for_save.__module__ == "never"
            or "timed" in inspect.getclosurevars(connector.wait_for_save.__func__).unbound,
        ]

    assert code_of("sampled", "cuda") == [True, True]
    assert code_of("off", "cuda") == [False, False]
    assert code_of("full", "cpu") == [False, False]


def test_hooks_are_timed_in_timed_steps_alone(
    trace: Any, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = make(cuda)
    monkeypatch.setattr(wrappers, "DEVICE", device)
    parent = on_worker(fakes.Parent(fakes.Storing()))
    layers = ("layer.0", "layer.1")

    def call_hooks() -> None:
        parent.start_load_kv(None)
        for layer in layers:
            parent.wait_for_layer_load(layer)
            parent.save_kv_layer(layer, object(), None)
            parent._connectors[0].save_kv_layer(layer, object(), None)
        parent.wait_for_save()

    call_hooks()
    step(device, 3, call_hooks)
    call_hooks()
    cuda.host(MS)
    step(device, 4)
    seen = [(code(row[0]), trace.names().get(row[3], "")) for row in trace.table(Kind.DEVICE).tolist()]
    wait, save = hooks.WAIT_LAYER.code, hooks.SAVE_LAYER.code
    assert seen == [
        (hooks.START_LOAD.code, ""), (wait, "layer.0"), (save, "layer.0"), (wait, "layer.1"),
        (save, "layer.1"), (hooks.WAIT_SAVE.code, ""),
    ]  # fmt: skip
    calls = [
        row
        for row in trace.table(Kind.HOOK)
        if detail(row[:1])[0] & ~DETAIL_IS_OP == detail(trace.table(Kind.DEVICE)[:1, 0])[0]
    ]
    assert len(calls) == 3 * 6  # recorded in every call, timed or not
    # the hook's own host time does not hold the events
    assert inspect.signature(type(parent).save_kv_layer) == inspect.signature(fakes.Parent.save_kv_layer)


def test_attention_bodies_are_timed(trace: Any, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    device = make(cuda)
    monkeypatch.setattr(ops, "DEVICE", device)

    def unified_attention_with_output(query: Any, output: Any, layer_name: str) -> None:
        cuda.work(2 * MS)

    body = ops.traced_body(unified_attention_with_output, calls_hook=True)
    query = SimpleNamespace(shape=(5, 8))
    step(
        device, 1, lambda: body(query, None, "layer.0"), lambda: body(query, None, SimpleNamespace(value="b"))
    )
    cuda.host(9 * MS)
    step(device, 2)
    first, second = trace.table(Kind.DEVICE)
    assert (code(first[:1])[0], detail(first[:1])[0]) == (
        op_table.ATTENTION_WITH_OUTPUT.code,
        DETAIL_IS_OP,
    )
    assert trace.names()[second[3]] == "b"
    assert 2 * MS <= first[4] < 2.02 * MS and 1.9 * MS < second[5] <= 2 * MS
    assert len(trace.table(Kind.OP)) == 2


# --- the budget ------------------------------------------------------------------------------------


@settings(max_examples=100)
@given(
    st.floats(0.0005, 0.5),
    st.lists(st.tuples(st.integers(10_000, 50 * MS), st.integers(1_000, 3 * MS)), min_size=1, max_size=400),
)
def test_timing_stays_within_its_budget(budget: float, steps: list[tuple[int, int]]) -> None:
    sampler = BudgetAccount("sampled", budget)
    spent = passed = dearest = 0
    for busy, own in steps:
        if sampler.take():
            sampler.spent(own)
            sampler.learned(own)
            spent, dearest = spent + own, max(dearest, own)
        sampler.busy += busy
        passed += busy
    assert spent <= budget * passed + dearest * 1.000001


def test_the_period_follows_cost_and_step_time() -> None:
    def taken(budget: float, busy: int, own: int, steps: int = 10_000) -> int:
        sampler, count = BudgetAccount("sampled", budget), 0
        for _ in range(steps):
            if sampler.take():
                count += 1
                sampler.spent(own)
                sampler.learned(own)
            sampler.busy += busy
        return count

    assert taken(0.01, 10 * MS, MS) == pytest.approx(1000, abs=2)  # 10 % of a step: every tenth
    assert taken(0.01, 20 * MS, MS) == pytest.approx(2000, abs=2)
    assert taken(0.10, 10 * MS, MS) == pytest.approx(10_000, abs=2)
    assert taken(0.001, 10 * MS, MS) == pytest.approx(100, abs=2)


def test_slow_steps_buy_no_burst_and_full_takes_all() -> None:
    sampler = BudgetAccount("sampled", 0.01)
    assert sampler.take()
    sampler.spent(MS)
    sampler.learned(MS)
    sampler.busy += 10**13
    burst = 0
    while sampler.take():
        sampler.spent(MS)
        burst += 1
    assert burst == 2
    full = BudgetAccount("full", 0.01)
    full.spent(10**12)
    assert full.take()


def test_past_the_size_limit_no_step_is_timed(trace: Any, cuda: Cuda) -> None:
    device = make(cuda)
    assert AGENT.recorder is not None
    AGENT.recorder._store.full = True
    device.begin(1)
    assert not device.on
    device.finish()
    AGENT.recorder._store.full = False
    device.begin(0)  # a dummy run
    assert not device.on
    device.begin(1)
    assert device.on
    device.finish()
    AGENT.recorder.stop(Stop.WRITE_FAILED)  # the disk is full: times would be taken for nobody
    device.begin(2)
    assert not device.on
    device.finish()


def test_settings_reach_the_agent(tmp_path: Path) -> None:
    given = AgentConfig(tmp_path, b"k" * 16, "n", 1 << 20, "full", 0.05)
    config = AgentConfig.from_text(given.to_text())
    assert (config.dir, config.run, config.limit_bytes) == (tmp_path, "n", 1 << 20)
    assert (config.device_timing, config.budget) == ("full", 0.05)
