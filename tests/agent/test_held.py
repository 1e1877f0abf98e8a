"""Where vLLM holds a connector, the proxy is put, however the connector came there."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import pytest

from kvtrace.agent.hooks import connector, held
from kvtrace.agent.state import AGENT
from kvtrace.agent.wrap import proxy
from kvtrace.trace import hooks
from kvtrace.trace.format import Fact, Kind
from kvtrace.trace.rows import detail

from . import fakes
from .fakes import on_scheduler, on_worker

STATE = "vllm.distributed.kv_transfer.kv_transfer_state"


class Asked(fakes.Storing):
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False


def engine(**more: Any) -> SimpleNamespace:
    transfer = SimpleNamespace(kv_connector="Mine", kv_connector_module_path=None)
    return SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=transfer), **more)


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No connector of another test that nobody has collected yet."""
    monkeypatch.setattr(connector, "_outermost", WeakValueDictionary())


@pytest.fixture
def state(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """vLLM's module that holds a worker's connector."""
    made = SimpleNamespace(_KV_CONNECTOR_AGENT=None)
    monkeypatch.setitem(sys.modules, STATE, made)  # type: ignore[arg-type]
    return made


def said(trace: Any) -> list[str]:
    return [fact["error"] for fact in trace.facts(Fact.AGENT_ERROR) if fact["where"] == "hooks"]


def calls(trace: Any, hook: hooks.Hook) -> int:
    return len(trace.calls(hook))


def test_a_schedulers_connector_past_the_factory_is_seen(trace: Any) -> None:
    own = Asked()
    scheduler = engine(connector=own)
    for _ in range(3):
        held.of_scheduler(scheduler)
    assert scheduler.connector == own and proxy.index_of(scheduler.connector)
    scheduler.connector.get_num_new_matched_tokens(SimpleNamespace(request_id="r"), 0)
    assert calls(trace, hooks.LOOKUP) == 1
    (line,) = said(trace)
    assert line == f"of Asked on the scheduler (get_num_new_matched_tokens): {held.LATE}"
    (fact,) = trace.facts(Fact.CONNECTOR)
    assert (fact["configured"], fact["class"], fact["proxy"]) == ("Mine", "Asked", "object")


def test_a_workers_connector_is_found_in_module_and_runner(trace: Any, state: Any) -> None:
    own = fakes.Storing()
    state._KV_CONNECTOR_AGENT = own
    runner = SimpleNamespace(kv_connector=SimpleNamespace(kv_connector=own))
    held.of_worker(engine(worker=SimpleNamespace(model_runner=runner)))
    assert state._KV_CONNECTOR_AGENT is runner.kv_connector.kv_connector
    runner.kv_connector.kv_connector.save_kv_layer("layer.0", "kv", None)
    assert calls(trace, hooks.SAVE_LAYER) == 1 and len(said(trace)) == len(trace.facts(Fact.CONNECTOR)) == 1


def test_what_the_factory_made_is_neither_changed_nor_spoken_of(trace: Any, state: Any) -> None:
    made = state._KV_CONNECTOR_AGENT = on_worker(fakes.Storing())
    scheduler = engine(connector=on_scheduler(Asked()))
    for _ in range(3):
        held.of_worker(engine())
        held.of_scheduler(scheduler)
        held.of_scheduler(engine(connector=None))
    assert state._KV_CONNECTOR_AGENT is made and not said(trace)


def test_a_connector_put_in_its_proxys_place_gets_it_again(trace: Any) -> None:
    scheduler = engine(connector=(made := on_scheduler(Asked())))
    scheduler.connector = proxy.its(made)
    held.of_scheduler(scheduler)
    assert scheduler.connector is made
    assert len(said(trace)) == len(trace.facts(Fact.CONNECTOR)) == 1


class HandsOn(fakes.KVConnectorBase_V1):
    """A user's own recorder, around what vLLM's factory made."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        self.inner.save_kv_layer(*args, **kwargs)


def test_a_call_handed_on_to_the_factorys_is_recorded_once(trace: Any, state: Any) -> None:
    made = on_worker(fakes.Storing())
    outer = state._KV_CONNECTOR_AGENT = HandsOn(made)
    for _ in range(3):
        held.of_worker(engine())
        assert state._KV_CONNECTOR_AGENT is outer
        outer.save_kv_layer("layer.0", "kv", None)
    assert calls(trace, hooks.SAVE_LAYER) == 3
    assert said(trace) == [f"of HandsOn on the worker (save_kv_layer): {held.OTHER}"]
    facts = [fact["proxy"] for fact in trace.facts(Fact.CONNECTOR)]
    assert facts == ["object", "none"], "nothing is concluded from what it was not asked"


def test_a_second_connector_is_seen_once_the_first_is_gone(trace: Any) -> None:
    scheduler = engine(connector=on_scheduler(Asked()))
    scheduler.connector = Asked()
    held.of_scheduler(scheduler)
    assert proxy.index_of(scheduler.connector)


@pytest.mark.parametrize("keep", [tuple, lambda children: dict(enumerate(children))])
def test_the_report_says_where_vllm_keeps_children_otherwise(trace: Any, keep: Any) -> None:
    parent = fakes.Parent()
    parent._connectors = keep([fakes.Storing()])
    scheduler = engine(connector=on_scheduler(parent, "MultiConnector"))
    held.of_scheduler(scheduler)
    assert said(trace) == [f"of Storing on the scheduler (none of its own): {held.INSIDE}"]


def test_a_child_that_comes_later_is_spoken_of(trace: Any, state: Any) -> None:
    parent = fakes.Parent(fakes.Storing())
    state._KV_CONNECTOR_AGENT = on_worker(parent, "MultiConnector")
    held.of_worker(engine())
    assert not said(trace)
    parent._connectors.append(Asked())
    held.of_worker(engine())
    assert said(trace) == [f"of Asked on the worker (save_kv_layer): {held.INSIDE}"]
    numbers = {fact["ordinal"] for fact in trace.facts(Fact.CONNECTOR)}
    parent._connectors[0].save_kv_layer("layer.0", "kv", None)
    assert set(detail(trace.table(Kind.HOOK)[:, 0]).tolist()) <= numbers


def test_where_no_proxy_can_be_put_it_is_tried_once_and_said(trace: Any, monkeypatch: Any) -> None:
    tries: list[Any] = []
    monkeypatch.setattr(proxy, "make", lambda connector, *args: tries.append(connector) or 1 / 0)
    own = Asked()
    scheduler = engine(connector=own)
    for _ in range(9):
        held.of_scheduler(scheduler)
    assert scheduler.connector is own and tries == [own] and AGENT._failures == 1
    assert said(trace) == [f"of Asked on the scheduler (get_num_new_matched_tokens): {held.NO_PROXY}"]


def test_the_look_before_a_step_costs_a_few_calls(trace: Any, state: Any) -> None:
    """Of functions, which tell the same on a busy machine: about a microsecond."""
    made = on_worker(fakes.Parent(fakes.Storing(), fakes.Storing()), "MultiConnector")
    state._KV_CONNECTOR_AGENT = made
    runner = SimpleNamespace(kv_connector=SimpleNamespace(kv_connector=made))
    wrapper = engine(worker=SimpleNamespace(model_runner=runner))
    calls: list[str] = []

    def counts(frame: Any, event: str, arg: Any) -> None:
        if event in ("call", "c_call"):
            calls.append(frame.f_code.co_name if event == "call" else arg.__name__)

    sys.setprofile(counts)
    held.of_worker(wrapper)
    sys.setprofile(None)
    assert "of_worker" in calls and len(calls) <= 25, calls


def test_of_a_connector_with_none_inside_a_step_asks_once(trace: Any, state: Any, monkeypatch: Any) -> None:
    state._KV_CONNECTOR_AGENT = on_worker(fakes.Storing())
    held.of_worker(engine())
    with monkeypatch.context() as patch:
        patch.setattr(connector, "inside", lambda found: 1 / 0)
        held.of_worker(engine())
    state._KV_CONNECTOR_AGENT = late = fakes.Storing()  # another one, past the factory
    held.of_worker(engine())
    assert proxy.index_of(state._KV_CONNECTOR_AGENT) and proxy.its(state._KV_CONNECTOR_AGENT) is late
