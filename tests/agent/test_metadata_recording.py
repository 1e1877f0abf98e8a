"""From ``build_connector_meta`` to the spool: rows for entries, a document for what is not understood."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from kvtrace.agent.hooks import hook_records
from kvtrace.agent.metadata.adapters import Adapter
from kvtrace.agent.metadata.recording import Reader
from kvtrace.agent.state import AGENT
from kvtrace.agent.wrap.proxy import index_of
from kvtrace.trace import rows
from kvtrace.trace.format import Fact, Flag, Kind

from . import fakes
from .fakes import on_scheduler
from .holding import Meta

A, B = "req-a", "req-b"


class Connector(fakes.MultiConnector):
    """Offers ``external`` tokens, and hands out whatever metadata it is given."""

    def __init__(self, *children: Any) -> None:
        super().__init__(*children)
        self.meta: Any = None
        self.external = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self.external, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        if self._connectors:
            return Multi(*(child.build_connector_meta(scheduler_output) for child in self._connectors))
        return self.meta


class Multi(fakes.KVConnectorMetadata):
    def __init__(self, *metadata: Any) -> None:
        self.metadata = metadata


class World:
    """A scheduler with two requests, whose ``schedule()`` is played by hand."""

    def __init__(self, connector: Any) -> None:
        self.connector = connector
        self.requests = {
            name: SimpleNamespace(request_id=name, num_computed_tokens=0, num_prompt_tokens=64)
            for name in (A, B)
        }
        self.block_size = 16
        tables = {A: ([11, 12, 13, 14],), B: ([21, 22, 23, 24],)}
        self.kv_cache_manager = SimpleNamespace(get_block_ids=tables.get)
        AGENT.scheduler.current = weakref.ref(self)

    def step(self, number: int, meta: Any, **scheduled: int) -> None:
        AGENT.scheduler.step = 1 << 32 | number
        self.connector.meta = meta
        output = SimpleNamespace(scheduled_new_reqs=[], num_scheduled_tokens=scheduled)
        self.connector.build_connector_meta(output)
        for name, count in scheduled.items():
            self.requests[name].num_computed_tokens += count


@pytest.fixture
def reader(trace: Any, monkeypatch: pytest.MonkeyPatch) -> Reader:
    made = Reader()
    monkeypatch.setattr(hook_records, "READER", made)
    return made


def entries(trace: Any) -> list[tuple[int, int, int, int]]:
    """(step, direction, slots, start) of each row."""
    return [
        (row.step & 0xFFFF, rows.flags(row.head) & (Flag.STORE | Flag.LOAD), row.slots, row.start)
        for row in trace.rows(Kind.META)
    ]


def test_entries_are_rows_and_waiting_ends_with_the_step(trace, reader):
    connector = on_scheduler(Connector())
    world = World(connector)
    connector.external = 32
    connector.get_num_new_matched_tokens(world.requests[A], 0)
    AGENT.scheduler.step = 1 << 32 | 1
    connector.update_state_after_alloc(world.requests[A], None, 32)
    world.requests[A].num_computed_tokens = 32
    plan = {A: [11, 12]}
    world.step(1, Meta(plan=plan), **{A: 32})
    world.step(2, Meta(plan=plan), **{B: 64})  # a is not scheduled, and its load is over
    assert entries(trace) == [(1, Flag.LOAD, 32, 0), (2, Flag.STORE, 32, 0)]
    assert trace.facts(Fact.UNREADABLE_METADATA) == []


def test_an_adapter_is_asked_of_what_looks_empty(trace, reader):
    found: dict[tuple[type, bool], Adapter] = {}
    reader._adapters._known = found
    connector = on_scheduler(Connector())
    world = World(connector)
    meta = Meta(req=A, blocks=2, loads=[])
    world.step(1, meta, **{A: 32})
    assert entries(trace) == [] and trace.facts(Fact.UNREADABLE_METADATA)[0]["field"] == "blocks"
    found[Connector, False] = Adapter("x", lambda meta, context: [(A, "store", 0, meta.blocks, "blocks")])
    world.step(2, meta, **{A: 32})
    assert entries(trace) == [(2, Flag.STORE, 32, 0)]


def test_what_is_not_understood_is_written_when_it_has_doubled(trace, reader):
    connector = on_scheduler(Connector())
    index = index_of(connector)
    world = World(connector)
    for number in range(1, 8):
        world.step(
            number, Meta(jobs=[SimpleNamespace(rid=A, put=True, spans=[(0, 1, 2), (3, 4, 5)])]), **{A: 1}
        )
    found = trace.facts(Fact.UNREADABLE_METADATA)
    assert [fact["steps"] for fact in found] == [1, 2, 4]
    assert (found[0]["connector"], found[0]["class"], found[0]["field"]) == (index, "Meta", "jobs[].spans")
    assert found[0]["shape"].startswith("list of tuple of int") and not found[0]["load"]
    assert all(rows.flags(row.head) & Flag.UNREADABLE for row in trace.rows(Kind.HOOK))


def test_only_so_many_kinds_are_written(trace, reader):
    connector = on_scheduler(Connector())
    world = World(connector)
    for number in range(1, 30):
        name = "x" * number
        world.step(number, Meta(jobs=[SimpleNamespace(**{"rid": A, "put": True, name: [5, 6]})]), **{A: 1})
    assert len(trace.facts(Fact.UNREADABLE_METADATA)) == 8


def test_children_explain_theirs_once(trace, reader):
    first, second = Connector(), Connector()
    first.meta = Meta(saves={A: [11, 12]})
    second.meta = Meta(saves={A: object()})
    parent = on_scheduler(Connector(first, second), "Multi")
    world = World(parent)
    world.step(1, None, **{A: 32})
    assert (1, Flag.STORE, 32, 0) in entries(trace)
    (fact,) = trace.facts(Fact.UNREADABLE_METADATA)
    assert fact["class"] == "Meta" and fact["connector"] == index_of(parent._connectors[1])


def test_what_each_child_says_of_a_request_carries_its_index(trace, reader):
    first, second = Connector(), Connector()
    first.meta, second.meta = Meta(saves={A: [11]}), Meta(saves={A: [11, 12]})
    parent = on_scheduler(Connector(first, second), "Multi")
    World(parent).step(1, None, **{A: 32})
    said = {rows.detail(row.head): row.slots for row in trace.rows(Kind.META)}
    of = [said[index_of(one) & 0xFF] for one in parent._connectors]  # as the record holds it
    assert of == [16, 32]
    assert 0 in said


def test_a_finished_request_is_remembered_with_its_blocks(reader):
    for number in range(600):
        reader.admissions.freed(f"req-{number}", [[number]])
    assert len(reader.admissions.gone) == 512 and "req-599" in reader.admissions.gone


def test_no_child_s_number_reads_as_none_in_a_record(trace, reader, monkeypatch):
    """A record holds eight bits of it."""
    monkeypatch.setattr("kvtrace.agent.hooks.connector._next_index", 255)
    parent = on_scheduler(Connector(Connector(), Connector()), "Multi")
    assert [index_of(one) for one in parent._connectors] == [257, 258]
