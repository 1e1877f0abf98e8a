"""The proxy: every call is recorded, and the connector is to vLLM what it was before."""

from __future__ import annotations

import types
from dataclasses import replace

import pytest

from kvtrace.agent.facts.connector_facts import answers_alike, resolves
from kvtrace.agent.hooks import hook_records
from kvtrace.agent.hooks.connector import traced
from kvtrace.agent.state import AGENT
from kvtrace.agent.wrap.hooked import Hooked
from kvtrace.agent.wrap.proxy import index_of
from kvtrace.trace import hooks
from kvtrace.trace.format import Fact, Flag, Kind, Role
from kvtrace.trace.rows import code, detail, flags

from . import fakes
from .conftest import recording
from .fakes import on_scheduler, on_worker

pytestmark = pytest.mark.usefixtures("each_recorder")

BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


def test_whether_the_configured_module_gave_the_live_class() -> None:
    assert resolves(fakes.Storing, fakes.__name__, "Storing") is True
    assert resolves(fakes.Storing, fakes.__name__, "Copying") is False
    assert resolves(fakes.Storing, "never.imported", "Storing") is False
    assert resolves(fakes.Storing, None, "Storing") is None


def test_each_call_is_recorded_with_layer_step_and_bound_work(trace):
    connector = on_worker(fakes.Storing())
    number = index_of(connector)
    AGENT.worker.step = 7
    AGENT.worker.store_slots, AGENT.worker.store_entries = 96, 2
    connector.save_kv_layer("layer.0", "kv", "meta", more=1)
    connector.save_kv_layer("layer.1", "kv", attn_metadata="meta")
    assert connector.saved == [("layer.0", "kv", "meta", {"more": 1}), ("layer.1", "kv", "meta", {})]
    rows = trace.calls(hooks.SAVE_LAYER)
    assert [trace.names()[row[4]] for row in rows.tolist()] == ["layer.0", "layer.1"]
    assert rows[:, 3].tolist() == [7, 7]
    assert rows[:, 5].tolist() == [96, 96]
    assert (rows[:, 2] >= rows[:, 1]).all()
    assert detail(rows[:, 0]).tolist() == [number, number]


def test_an_exception_passes_and_is_noted_without_secrets(trace):
    connector = on_worker(fakes.Storing())
    with pytest.raises(ValueError, match="hunter2") as caught:
        connector.save_kv_layer("layer.0", "bad", None)
    assert caught.value.args == ("token=hunter2 no room",)
    (row,) = trace.calls(hooks.SAVE_LAYER).tolist()
    assert flags(row[0]) & Flag.RAISED
    assert trace.names()[row[7]] == "ValueError"
    (fact,) = trace.facts(Fact.EXCEPTION)
    assert (fact["type"], fact["hook"], fact["layer"]) == ("ValueError", "save_kv_layer", "layer.0")
    assert "hunter2" not in fact["message"]
    assert fact["where"].endswith("in save_kv_layer") and "fakes.py" in fact["where"]


@pytest.mark.parametrize("own", [lambda self, layer_name: None, lambda self, name, kv, meta: None])
def test_a_hook_with_the_wrong_parameters_is_seen_to_raise(trace, own):
    """Written for another version of vLLM: the call itself raises, by position or by name."""
    cls = type(
        "Outdated", (fakes.Storing,), {"save_kv_layer": own, "get_finished": lambda self: (None, None)}
    )
    connector = on_worker(cls())
    with pytest.raises(TypeError):
        connector.save_kv_layer("layer.0", kv_layer="kv", attn_metadata=None)
    with pytest.raises(TypeError, match=r"get_finished|positional"):
        connector.get_finished(set())
    facts = trace.facts(Fact.EXCEPTION)
    assert [(fact["hook"], fact["type"]) for fact in facts] == [
        ("save_kv_layer", "TypeError"),
        ("get_finished", "TypeError"),
    ]
    # What to change is the method; the only frame that such a call came through is the tracer's.
    assert ["test_connector.py" in fact["where"] for fact in facts] == [True, True]


def test_what_a_hooks_record_says_is_the_same_by_each_way(trace):
    """A method with vLLM's signature, one with ``*args``."""

    class Spread(fakes.Storing):
        def wait_for_layer_load(self, *args, **kwargs):
            return super().wait_for_layer_load(*args, **kwargs)

        def wait_for_save(self, *args):
            return super().wait_for_save()

        def get_finished(self, *args):
            return {"r"}, None

    class Plain(fakes.Storing):
        def get_finished(self, finished_req_ids):
            return {"r"}, None

    said = []
    for cls in (Plain, Spread):
        connector = on_worker(cls())
        AGENT.worker.step, AGENT.worker.recorded_done = 3, (None, set())
        AGENT.worker.declared = (True, 48, 1, 16, 2, 0)
        connector.bind_connector_metadata(fakes.KVConnectorMetadata())
        for layer in ("layer.0", "layer.1", "layer.0"):
            connector.wait_for_layer_load(layer)
            assert AGENT.worker.hooked_layer == layer
            connector.save_kv_layer(layer, "kv", None)
        connector.wait_for_save()
        connector.get_finished(set())
        connector.clear_connector_metadata()
        connector.wait_for_save()
        rows = trace.table(Kind.HOOK)
        rows = rows[detail(rows[:, 0]) == index_of(connector)]
        said.append([(code(w[:1])[0], flags(w[:1])[0], *w[3:].tolist()) for w in rows])
    assert said[0] == said[1]
    assert len(said[0]) == 11


def test_a_hook_whose_record_says_no_more_may_have_arguments(trace):
    hook = replace(hooks.WAIT_SAVE, name="other", code=99, needs=((0, "layer_name"),))
    record = hook_records.recorder(Hooked(hook, Role.WORKER, 1))
    record(1, 2, object(), None, "layer")
    assert len(trace.calls(hook)) == 1


def test_tracing_twice_changes_nothing_more(trace):
    connector = on_worker(fakes.Storing())
    assert traced(connector, Role.WORKER, "Storing") is connector
    connector.save_kv_layer("layer.0", "kv", None)
    assert len(trace.calls(hooks.SAVE_LAYER)) == 1


def test_what_a_connector_calls_on_itself_is_its_own_business(trace):
    class Flushing(fakes.Storing):
        def wait_for_save(self):
            self.save_kv_layer("layer.9", "kv", None)

    connector = on_worker(Flushing())
    connector.wait_for_save()
    assert len(connector.saved) == 1 and len(trace.calls(hooks.WAIT_SAVE)) == 1
    assert not len(trace.calls(hooks.SAVE_LAYER))


def test_calls_of_vllms_base_class_are_vllms_calls(trace, monkeypatch):
    """``get_transfer_results`` asks ``get_finished``; one of the connector's own does so unseen."""

    class Own(fakes.KVConnectorBase_V1):
        def get_transfer_results(self, finished_req_ids):
            return self.get_finished(finished_req_ids)

    vllms = types.FunctionType(Own.get_transfer_results.__code__, {"__name__": BASE})
    monkeypatch.setattr(fakes.KVConnectorBase_V1, "get_transfer_results", vllms, raising=False)
    connector = on_worker(fakes.Storing())
    own = on_worker(Own())
    assert connector.get_transfer_results(set()) == own.get_transfer_results(set()) == (None, None)
    asked, answered = (
        detail(trace.calls(hooks.BY_NAME[name])[:, 0]).tolist()
        for name in ("get_transfer_results", "get_finished")
    )
    assert (asked, answered) == ([index_of(connector), index_of(own)], [index_of(connector)])


def test_a_method_patched_on_the_class_later_runs(trace, monkeypatch):
    connector = on_worker(fakes.Storing())
    seen = []
    monkeypatch.setattr(fakes.Storing, "save_kv_layer", lambda self, *a, **k: seen.append(a))
    connector.save_kv_layer("layer.0", "kv", None)
    assert seen == [("layer.0", "kv", None)]
    assert len(trace.calls(hooks.SAVE_LAYER)) == 1


def test_children_built_past_the_factory_are_traced(trace):
    child = fakes.Storing()
    parent = on_worker(fakes.Parent(child), "MultiConnector")
    (held,) = parent._connectors
    assert held == child and held is not child
    held.save_kv_layer("layer.0", "kv", None)
    facts = {fact["class"]: fact for fact in trace.facts(Fact.CONNECTOR)}
    assert facts["Storing"]["parent"] == index_of(parent)
    assert facts["Parent"]["parent"] is None
    assert len(trace.calls(hooks.SAVE_LAYER)) == 1


def test_what_another_connector_than_vllms_holds_is_its_own(trace):
    class Own(fakes.KVConnectorBase_V1):
        def __init__(self, *children):
            super().__init__()
            self._connectors = list(children)

    child = fakes.Storing()
    parent = on_worker(Own(child))
    assert parent._connectors[0] is child


def test_what_the_class_does_not_do_is_known_from_its_bytecode(trace):
    on_worker(fakes.Storing())
    (fact,) = trace.facts(Fact.CONNECTOR)
    assert "wait_for_save" in fact["noop"] and "save_kv_layer" not in fact["noop"]
    assert fact["overrides"] == ["save_kv_layer"]
    assert fact["ints"] == {"_unit": 256}
    assert fact["file"].endswith("fakes.py")


class Finds:
    def nothing(self, request, computed):
        return 0, False

    def some(self, request, computed):
        return len(request), False


class HandsOn(fakes.KVConnectorBase_V1):
    def __init__(self):
        self.inner = Finds()

    def own(self, request, computed):
        return self.inner.nothing(request, computed)

    def twice(self, request, computed):
        return self.own(request, computed)

    def to_the_request(self, request, computed):
        return request.nothing(self, computed)

    def of_what_is_missing(self, request, computed):
        return self.gone.nothing(request, computed)

    def looks(self, request, computed):
        return self.inner.some(request, computed)

    def chooses(self, request, computed):
        return (0, False) if computed else (1, False)

    def for_ever(self, request, computed):
        return self.for_ever(request, computed)


@pytest.mark.parametrize(
    ("name", "alike"),
    [
        ("own", True), ("twice", True), ("to_the_request", False), ("of_what_is_missing", False),
        ("looks", False), ("chooses", False), ("for_ever", False), ("not_there", False),
    ],
)  # fmt: skip
def test_a_constant_lookup_is_known_from_its_bytecode(name, alike):
    assert answers_alike(HandsOn(), name) is alike


def test_a_unit_may_be_a_constant_of_the_connectors_module(trace, monkeypatch):
    for name, value in {
        "CHUNK_SIZE": 128,
        "PORT": 8080,
        "chunk": 64,
        "CHUNK_NAME": "x",
        "UNIT_ON": True,
    }.items():
        monkeypatch.setattr(fakes, name, value, raising=False)
    on_worker(fakes.Storing())
    assert trace.facts(Fact.CONNECTOR)[0]["ints"] == {"_unit": 256, "CHUNK_SIZE": 128}


def test_a_unit_may_be_a_constant_of_the_connectors_class(trace, monkeypatch):
    for name, value in {"STEP": 4, "UNIT_TOKENS": 64, "unit": 96}.items():
        monkeypatch.setattr(fakes.Storing, name, value, raising=False)
    on_worker(fakes.Storing())
    assert trace.facts(Fact.CONNECTOR)[0]["ints"] == {"_unit": 256, "UNIT_TOKENS": 64}


def test_units_are_looked_for_deeper_but_not_in_vllms_config(trace):
    def part(module, **numbers):
        made = type("Part", (), {"__module__": module})()
        vars(made).update(numbers)
        return made

    connector = fakes.Storing()
    connector._lmcache_engine = part("lmcache.integration.vllm.vllm_v1_adapter", _lmcache_chunk_size=256)
    connector.connector_worker = part("vllm.distributed.kv_transfer.kv_connector.v1.x", block_size=64)
    connector._vllm_config = part("vllm.config.vllm", instance=77)
    connector._device = part("torch", index=5)
    connector = traced(connector, Role.WORKER, "Storing")
    assert trace.facts(Fact.CONNECTOR)[0]["ints"] == {
        "_unit": 256,
        "_lmcache_engine._lmcache_chunk_size": 256,
        "connector_worker.block_size": 64,
    }


def test_nothing_is_bound_between_clear_and_bind(trace):
    connector = on_worker(fakes.Storing())
    connector.wait_for_save()
    connector.bind_connector_metadata(fakes.KVConnectorMetadata())
    connector.wait_for_save()
    connector.clear_connector_metadata()
    connector.wait_for_save()
    marks = [bool(mark & Flag.NO_METADATA) for mark in flags(trace.calls(hooks.WAIT_SAVE)[:, 0])]
    assert marks == [True, False, True]


def test_what_the_scheduler_read_in_metadata_holds_on_workers(trace):
    """It knows the requests; here, without them, the same metadata says nothing."""
    connector = on_worker(fakes.Storing())
    AGENT.worker.declared = (True, 48, 1, 0, 0, 0)
    connector.bind_connector_metadata(fakes.KVConnectorMetadata())
    assert (AGENT.worker.store_slots, AGENT.worker.store_entries) == (48, 1)
    connector.clear_connector_metadata()
    AGENT.worker.declared = None
    connector.bind_connector_metadata(fakes.KVConnectorMetadata())
    assert (AGENT.worker.store_slots, AGENT.worker.store_entries) == (0, 0)


@pytest.mark.parametrize(("answer", "resets"), [(True, 1), (None, 1), (False, 0)])
def test_a_reset_of_what_is_stored_is_a_fact(trace, answer, resets):
    class Forgets(fakes.KVConnectorBase_V1):
        def reset_cache(self):
            return answer

    AGENT.scheduler.step = 1 << 32 | 7
    assert on_scheduler(Forgets()).reset_cache() is answer
    assert [fact["step"] & 0xFFFF for fact in trace.facts(Fact.CACHE_RESET)] == [7] * resets
    assert len(trace.calls(hooks.RESET_CACHE)) == 1


def test_an_agent_that_fails_says_so_and_the_connector_works(trace, monkeypatch):
    connector = on_worker(fakes.Storing())
    monkeypatch.setattr(AGENT, "add", lambda words: 1 / 0)
    for _ in range(20):
        connector.save_kv_layer("layer.0", "kv", None)
        connector.wait_for_save()
    assert len(connector.saved) == 20
    errors = trace.facts(Fact.AGENT_ERROR)
    assert errors and "ZeroDivisionError" in errors[0]["error"]
    assert errors[-1]["error"] == "turned off"


def test_a_layer_has_its_id_of_each_spool(tmp_path):
    """Ids are given anew in each: what a wrapper knew of the last one is wrong there."""
    connector = None
    for order in (["layer.0", "layer.1"], ["layer.1", "layer.0"], ["other", "layer.0", "layer.1"]):
        with recording(tmp_path / "-".join(order)) as trace:
            connector = connector or on_worker(fakes.Storing())
            for layer in order * 2:
                connector.save_kv_layer(layer, "kv", None)
            names = trace.names()
            rows = trace.calls(hooks.SAVE_LAYER)
            assert [names[row[4]] for row in rows.tolist()] == order * 2
