"""The ids that a request hands from one engine to another are recorded, nothing else of its parameters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvtrace.agent import boot
from kvtrace.agent.state import AGENT
from kvtrace.agent.steps import handover
from kvtrace.trace.facts import HandOverFact, Header
from kvtrace.trace.reader import of_type

from . import fakes
from .fakes import on_scheduler

OF_A_PREFILL = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_block_ids": [[1, 2, 3]],
    "remote_engine_id": "engine-a",
    "remote_request_id": "req-1",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}


class HandsOver(fakes.KVConnectorBase_V1):
    def request_finished(self, request, block_ids):
        return True, OF_A_PREFILL


def recorded(trace) -> list[HandOverFact]:
    spool, _ = trace.read()
    return [fact for _, fact in of_type(HandOverFact, spool.documents())]


def test_the_ids_that_a_request_brings(trace):
    handover.record("req-2", OF_A_PREFILL)
    ids = {"remote_engine_id": "engine-a", "remote_request_id": "req-1"}
    assert recorded(trace) == [HandOverFact("req-2", False, ids, ("do_remote_prefill",))]


def test_the_ids_that_the_connector_returns(trace):
    connector = on_scheduler(HandsOver())
    answer = connector.request_finished(SimpleNamespace(request_id="req-1"), [1])
    assert answer == (True, OF_A_PREFILL) and answer[1] is OF_A_PREFILL
    (fact,) = recorded(trace)
    assert fact.returned and fact.request == "req-1" and fact.ids["remote_request_id"] == "req-1"


@pytest.mark.parametrize(
    "params",
    [None, {}, [], "x", {1: 2}, {"remote_block_ids": [1]}, {"secret": "s", "host": "h"}, {"user_id": "bob"},
     {"transfer_id": ""}, {1: True}, {"transfer_id": "x" * 300}, {"transfer_id": None}],
)  # fmt: skip
def test_what_holds_no_such_id_leaves_no_record(trace, params):
    handover.record("r", params)
    handover.record("r", None)
    assert recorded(trace) == []


def test_ids_in_a_part_of_the_parameters_and_numbers(trace):
    params = {"remote_prefiller": {"kv_request_id": 7, "host": "h", "a": {"b": {"request_id": "deep"}}}}
    params |= {
        "disagg_spec": {"req_id": "q"},
        "handle": "cmpl-8210cf913cdd01ae-0-9d9fe5a5",
        "key": "sk-12345678",
    }
    handover.record("r", params)
    (fact,) = recorded(trace)
    handle = {"handle": "cmpl-8210cf913cdd01ae-0-9d9fe5a5"}
    assert fact.ids == {"remote_prefiller.kv_request_id": "7", "disagg_spec.req_id": "q", **handle}


def test_flags_tell_a_connector_of_this_request(trace):
    params = {"lmcache.skip_save": True, "store": False, "ttl": 5, "do_remote_prefill": False}
    handover.record("r", params)
    handover.record("s", {f"f{i}": True for i in range(99)})
    one, many = recorded(trace)
    assert one.flags == {"lmcache.skip_save": True, "store": False} and not one.asks
    assert len(many.flags) == 8


def test_a_parameter_of_many_ids_is_cut(trace):
    many = {f"n{i}_transfer_id": "x" for i in range(1000)}
    handover.record("r", many)
    (fact,) = recorded(trace)
    assert len(fact.ids) == 16


def test_the_spool_says_which_clock_it_has(trace, monkeypatch, tmp_path):
    AGENT.request_id("x")
    AGENT.flush()
    header = Header.from_json(trace.read()[0].header)
    assert header.boot == boot.boot()
    kernel = tmp_path / "boot_id"
    monkeypatch.setattr(boot, "_BOOT_ID", str(kernel))
    assert boot.boot() == ""
    kernel.write_text("abc\n")
    monkeypatch.setattr(boot, "_TIME_NAMESPACE", str(kernel))
    assert boot.boot() == f"abc/{kernel.stat().st_ino}"
    monkeypatch.setattr(boot, "_INITIAL", kernel.stat().st_ino)
    assert boot.boot() == "abc"
