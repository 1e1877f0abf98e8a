"""OPEN and DONE: asynchronous transfers from request_finished to the report of their end."""

from __future__ import annotations

from types import SimpleNamespace

from kvtrace.agent.state import AGENT
from kvtrace.trace.format import Flag, Kind, Role
from kvtrace.trace.rows import flags, role

from . import fakes
from .fakes import on_scheduler, on_worker


class Async(fakes.KVConnectorBase_V1):
    def request_finished(self, request, block_ids):
        return request.request_id == "kept", None

    def get_finished(self, finished_req_ids):
        return {"kept"}, {"loaded"}

    def get_transfer_results(self, finished_req_ids):
        sending, receiving = self.get_finished(finished_req_ids)
        return SimpleNamespace(
            finished_sending=sending, finished_recving={*receiving, "broken"}, failed_recving={"broken"}
        )

    def update_connector_output(self, connector_output):
        return


def rows_of(trace, wanted):
    return [
        (role(row[0]), flags(row[0]), trace.names()[row[2]], row[3], row[4])
        for row in trace.table(wanted).tolist()
    ]


def test_a_request_whose_blocks_are_kept_opens_a_transfer(trace):
    connector = on_scheduler(Async())
    AGENT.scheduler.step = 3
    for req_id in ("kept", "freed"):
        connector.request_finished(SimpleNamespace(request_id=req_id), [1, 2])
    assert rows_of(trace, Kind.OPEN) == [(Role.SCHEDULER, Flag.STORE, "kept", 3, 0)]


def test_workers_report_ends_once_and_forget_the_names(trace):
    connector = on_worker(Async())
    AGENT.worker.step = 4
    connector.get_transfer_results(set())
    assert sorted(rows_of(trace, Kind.DONE)) == [
        (Role.WORKER, Flag.STORE, "kept", 4, 0),
        (Role.WORKER, Flag.LOAD, "broken", 4, 1),
        (Role.WORKER, Flag.LOAD, "loaded", 4, 0),
    ]
    assert not {"kept", "loaded", "broken"} & set(AGENT.recorder._names)


def test_the_scheduler_keeps_the_names_of_live_requests(trace):
    connector = on_scheduler(Async())
    AGENT.scheduler.step = 5
    live = AGENT.request_id("loaded")
    connector.update_connector_output(SimpleNamespace(finished_sending={"kept"}, finished_recving={"loaded"}))
    assert sorted(rows_of(trace, Kind.DONE)) == [
        (Role.SCHEDULER, Flag.STORE, "kept", 5, 0),
        (Role.SCHEDULER, Flag.LOAD, "loaded", 5, 0),
    ]
    assert AGENT.request_id("loaded") == live
