"""BLOCKS records: replayed, they are the block tables that the scheduler held at each step."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from kvtrace.agent.engine import scheduler as agent_scheduler
from kvtrace.agent.state import AGENT
from kvtrace.agent.steps.block_tables import runs
from kvtrace.trace import rows
from kvtrace.trace.format import Flag, Kind

from .conftest import recording

GROUPS = 2


class Scheduler:
    """Hands out blocks of two groups with block sizes of 4 and 8, as vLLM's does, and says so in the step's
    output. ``names``: how a version names the resumed requests."""

    def __init__(self, names: str = "resumed_req_ids") -> None:
        self.vllm_config = SimpleNamespace()
        self.block_size = 4
        self.names = names
        self.requests: dict[str, Any] = {}
        self.free = list(range(1, 400))
        self.tables: dict[str, tuple[list[int], ...]] = {}
        self.waiting: list[str] = []  # admitted, preempted or loading: no step of theirs yet
        self.running: list[str] = []
        self.kv_cache_manager = SimpleNamespace(get_block_ids=self.get_block_ids)
        self.plan: list[tuple[str, Any]] = []

    def get_block_ids(self, req_id: str) -> tuple[list[int], ...]:
        return tuple(list(blocks) for blocks in self.tables[req_id])

    def allocate(self, req_id: str, tokens: int) -> tuple[list[int], ...]:
        """The request grows; the new blocks."""
        request = self.requests[req_id]
        request.tokens += tokens
        new = []
        for size, blocks in zip((4, 8), self.tables[req_id], strict=True):
            given = [self.free.pop(0) for _ in range(-(-request.tokens // size) - len(blocks))]
            blocks.extend(given)
            new.append(given)
        return tuple(new)

    def release(self, req_id: str) -> None:
        for blocks in self.tables.pop(req_id):
            self.free.extend(reversed(blocks))

    def schedule(self) -> Any:
        new, cached, tables, resumed, scheduled = [], [], [], set(), {}
        for what, tokens in self.plan:
            if what == "run":
                for req_id in self.running:
                    scheduled[req_id] = tokens
                    cached.append(req_id)
                    blocks = self.allocate(req_id, tokens)
                    tables.append(blocks if any(blocks) or self.names != "resumed_req_ids" else None)
            elif what == "admit" and self.waiting:
                req_id = self.waiting.pop(0)
                request = self.requests[req_id]
                if req_id not in self.tables:
                    self.tables[req_id] = tuple([] for _ in range(GROUPS))
                self.allocate(req_id, tokens)
                self.running.append(req_id)
                scheduled[req_id] = tokens
                if request.num_preemptions and not request.loading:
                    resumed.add(req_id)
                    cached.append(req_id)
                    tables.append(self.get_block_ids(req_id))
                else:
                    new.append(SimpleNamespace(req_id=req_id, block_ids=self.get_block_ids(req_id)))
                request.loading = False
            elif what == "load" and self.waiting and self.waiting[0] not in self.tables:
                req_id = self.waiting[0]
                self.tables[req_id] = tuple([] for _ in range(GROUPS))
                self.allocate(req_id, tokens)
                self.requests[req_id].loading = True
                AGENT.scheduler.allocated.append(req_id)
        flags = {"resumed_req_ids": resumed, "resumed_from_preemption": [one in resumed for one in cached]}
        return SimpleNamespace(
            num_scheduled_tokens=scheduled, total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_new_reqs=new, finished_req_ids=set(),
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=cached, new_block_ids=tables, **{self.names: flags[self.names]}
            ),
        )  # fmt: skip

    def _preempt_request(self, request: Any) -> None:
        self.release(request.request_id)
        request.num_preemptions += 1
        request.tokens = 0
        self.running.remove(request.request_id)
        self.waiting.append(request.request_id)

    def _free_request(self, request: Any) -> None:
        self.release(request.request_id)
        self.running.remove(request.request_id)
        del self.requests[request.request_id]


def made(names: str = "resumed_req_ids") -> Any:
    cls = type("Scheduler", (), dict(vars(Scheduler)))
    agent_scheduler.wrap_scheduler(SimpleNamespace(Scheduler=cls))  # type: ignore[arg-type]
    return cls(names)


def add(engine: Any, req_id: str) -> None:
    engine.requests[req_id] = SimpleNamespace(
        request_id=req_id, tokens=0, num_preemptions=0, loading=False, num_prompt_tokens=40, num_tokens=40,
        num_computed_tokens=0, num_output_tokens=0, status="FINISHED_STOPPED",
    )  # fmt: skip
    engine.waiting.append(req_id)


Tables = dict[str, dict[int, list[int]]]
"""Request -> KV cache group -> block ids; 0 at places of which no record speaks."""


def replayed(trace: Any, steps: Iterable[int]) -> dict[int, Tables]:
    """The tables after each of ``steps`` (ascending), as any reader of a spool makes them."""
    names, given = trace.names(), trace.rows(Kind.BLOCKS)
    found: dict[int, Tables] = {}
    tables: Tables = {}
    at = 0
    began: set[tuple[str, int]] = set()
    for step in steps:
        while at < len(given) and given[at].step <= step:
            row = given[at]
            req_id = names[row.request]
            if rows.flags(row.head) & Flag.FIRST and (req_id, row.step) not in began:
                began.add((req_id, row.step))
                tables[req_id] = {}
            blocks = tables.setdefault(req_id, {}).setdefault(row.group, [])
            by = 1 if row.count > 0 else -1
            ids = [row.block + by * n for n in range(abs(row.count))]
            blocks.extend([0] * (row.first - len(blocks)))
            blocks[row.first : row.first + len(ids)] = ids
            at += 1
        found[step] = {req_id: {g: list(ids) for g, ids in one.items()} for req_id, one in tables.items()}
    return found


ACTS = st.one_of(
    st.just(("add", 0)),
    st.just(("preempt", 0)),
    st.just(("finish", 0)),
    st.lists(
        st.tuples(st.sampled_from(("run", "admit", "admit", "load")), st.integers(1, 21)), max_size=4
    ).map(lambda plan: ("schedule", plan)),
)


@settings(max_examples=150)
@given(
    acts=st.lists(ACTS, max_size=25), names=st.sampled_from(("resumed_req_ids", "resumed_from_preemption"))
)
def test_replayed_records_are_the_tables_of_every_step(
    acts: list[tuple[str, Any]], names: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with recording(tmp_path_factory.mktemp("run")) as trace:
        engine, count, held = made(names), 0, {}
        for what, plan in acts:
            if what == "add":
                count += 1
                add(engine, f"req-{count}")
            elif what == "preempt" and engine.running:
                engine._preempt_request(engine.requests[engine.running[-1]])
            elif what == "finish" and engine.running:
                engine._free_request(engine.requests[engine.running[0]])
            elif what == "schedule" and len(engine.free) > 100:
                engine.plan = sorted(plan, key=lambda act: act[0] != "run")  # the running ones first
                if [act for act, _ in engine.plan].count("run") > 1:
                    continue
                engine.schedule()
                held[engine._kvtrace_state.step] = {one: engine.get_block_ids(one) for one in engine.tables}
        for step, tables in replayed(trace, held).items():
            for req_id, expected in held[step].items():
                assert [tables[req_id][group] for group in range(GROUPS)] == list(expected)
        assert AGENT._failures == 0


def test_a_decode_step_without_new_blocks_writes_nothing(trace: Any) -> None:
    engine = made()
    add(engine, "req")
    engine.plan = [("admit", 5)]
    engine.schedule()
    for _ in range(3):  # the second block of the first group has place for three more
        engine.plan = [("run", 1)]
        engine.schedule()
    given = trace.rows(Kind.BLOCKS)
    assert len(given) == 2 and {row.count for row in given} == {1, 2}


def test_blocks_of_an_async_load_are_recorded_when_given(trace: Any) -> None:
    engine = made()
    add(engine, "req")
    engine.plan = [("load", 9)]
    engine.schedule()
    loading = engine._kvtrace_state.step
    engine.plan = []
    engine.schedule()
    engine.plan = [("admit", 1)]
    engine.schedule()
    table = trace.table(Kind.BLOCKS)
    assert set(rows.flags(table[:, 0]).tolist()) == {int(Flag.FIRST)}
    given = rows.columns(rows.BlocksGiven, table)
    assert sorted(set(given.step.tolist())) == [loading, loading + 2]


@given(st.lists(st.integers(0, 12), max_size=30))
def test_runs_are_the_list_without_null_blocks(blocks: list[int]) -> None:
    found: dict[int, int] = {}
    for place, block, count in runs(blocks):
        assert count != 0
        step = 1 if count > 0 else -1
        for at in range(abs(count)):
            assert place + at not in found
            found[place + at] = block + step * at
    assert found == {place: block for place, block in enumerate(blocks) if block}


def test_a_table_that_was_freed_and_given_out_again_is_one_run() -> None:
    assert list(runs([9, 8, 7, 6])) == [(0, 9, -4)]
    assert list(runs([3, 4, 5])) == [(0, 3, 3)]
