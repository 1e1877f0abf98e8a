"""A call with nothing more to say: the recorders in C and in Python write the same record."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvtrace.agent.hooks import hook_records
from kvtrace.agent.state import AGENT
from kvtrace.trace import hooks
from kvtrace.trace.format import Flag, Kind, Role
from kvtrace.trace.rows import flags

from . import fakes
from .fakes import on_scheduler, on_worker

pytestmark = pytest.mark.usefixtures("each_recorder")
STEP = 7 << 32 | 3


class Answering(fakes.KVConnectorBase_V1):
    """Its answers are what the test says."""

    finished: Any = (None, None)
    results: Any = SimpleNamespace(finished_sending=set(), finished_recving=None)
    failed: Any = frozenset()

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        return self.finished

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        return self.results

    def get_block_ids_with_load_errors(self) -> Any:
        return self.failed

    def update_connector_output(self, connector_output: Any) -> None:
        return


class Odd:
    """Nobody can say whether it is empty."""

    def __bool__(self) -> bool:
        raise ValueError("of more than one element")


def in_a_step(own: Any) -> Any:
    """A worker's connector with metadata bound: 7 slots to store in 2 entries, 3 to load in 1."""
    connector = on_worker(own)
    AGENT.worker.step, AGENT.worker.mode = STEP, 1
    entries = [fakes.Work(range(3)), fakes.Work(range(4)), fakes.Work(range(3), is_store=False)]
    connector.bind_connector_metadata(fakes.WorkMetadata(*entries))
    AGENT.worker.watch_store = AGENT.worker.watch_load = AGENT.worker.watch_after = None
    return connector


def said(trace: Any, hook: hooks.Hook) -> list[tuple[int, ...]]:
    """(flags, step, slots, entries, extra) of each call."""
    rows = trace.calls(hook)
    words = zip(flags(rows[:, 0]).tolist(), *(rows[:, at].tolist() for at in (3, 5, 6, 7)), strict=True)
    return list(words)


@pytest.mark.parametrize("bound", [True, False], ids=["bound", "without metadata"])
def test_saves_and_loads_say_what_the_metadata_names(trace: Any, bound: bool) -> None:
    connector = in_a_step(Answering())
    mark = 0 if bound else int(Flag.NO_METADATA)
    AGENT.worker.bound = bound
    connector.start_load_kv(None)
    connector.wait_for_save()
    assert said(trace, hooks.START_LOAD) == [(mark, STEP, 3, 1, 0)]
    assert said(trace, hooks.WAIT_SAVE) == [(mark, STEP, 7, 2, 0)]


@pytest.mark.parametrize("answer", [(None, None), (set(), None), (set(), set()), None, SimpleNamespace()])
def test_nothing_that_finished_is_a_plain_call(trace: Any, answer: Any) -> None:
    own = Answering()
    own.finished = answer
    assert in_a_step(own).get_finished(set()) is answer
    assert said(trace, hooks.GET_FINISHED) == [(0, STEP, -1, -1, 0)]
    assert not len(trace.table(Kind.DONE))


def test_what_finished_is_told(trace: Any) -> None:
    own = Answering()
    own.finished = ({"a", "b"}, {"c"})
    own.results = SimpleNamespace(finished_sending=None, finished_recving={"d"}, failed_recving=None)
    own.failed = {5, 6}
    connector = in_a_step(own)
    connector.get_finished(set())
    connector.get_transfer_results(set())
    connector.get_block_ids_with_load_errors()
    assert said(trace, hooks.GET_FINISHED) == [(0, STEP, -1, -1, 0)]
    assert said(trace, hooks.TRANSFER_RESULTS) == [(0, STEP, -1, -1, 0)]
    assert said(trace, hooks.LOAD_ERRORS) == [(0, STEP, -1, -1, 2)]
    assert len(trace.table(Kind.DONE)) == 4


def test_outputs_of_the_workers_are_told_to_the_scheduler(trace: Any) -> None:
    connector = on_scheduler(Answering())
    AGENT.scheduler.step = STEP
    nothing = SimpleNamespace(finished_sending=None, finished_recving=set())
    some = SimpleNamespace(finished_sending={"a"}, finished_recving=set(), failed_recving=None)
    for output in (nothing, some):
        connector.update_connector_output(output)
    assert said(trace, hooks.CONNECTOR_OUTPUT) == [(0, STEP, -1, -1, 0)] * 2
    assert len(trace.table(Kind.DONE)) == 1


def test_answers_that_cannot_be_asked_reach_vllm_as_they_are(trace: Any) -> None:
    own, odd = Answering(), Odd()
    own.finished, own.results, own.failed = (odd, None), SimpleNamespace(finished_sending=odd), odd
    connector = in_a_step(own)
    assert connector.get_finished(set()) is own.finished
    assert connector.get_transfer_results(set()) is own.results
    assert connector.get_block_ids_with_load_errors() is odd


def test_all_that_may_be_quiet_has_a_detail_of_its_own() -> None:
    assert all(hook_records.has_detail(hook) for hook in hook_records.QUIET)
    assert all(hook.role is Role.WORKER for hook, quiet in hook_records.QUIET.items() if quiet.outermost)
