"""LOG facts: warnings inside a hook are kept, and the user's logging does what it did."""

from __future__ import annotations

import logging
import threading

import pytest

from kvtrace.agent.errors import logs
from kvtrace.agent.state import AGENT
from kvtrace.agent.wrap.proxy import index_of
from kvtrace.trace.format import Fact

from . import fakes
from .fakes import on_worker


class Logging(fakes.KVConnectorBase_V1):
    def __init__(self, log, say) -> None:
        super().__init__()
        self.log, self.say = log, say

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        self.say(self.log)

    def wait_for_save(self):
        self.say(self.log)


@pytest.fixture
def quiet():
    """A logger whose records no handler shows."""
    logs.install()
    log = logging.Logger("lonely")
    log.addHandler(logging.NullHandler())
    log.propagate = False
    return log


def run(log, say, layers=("layer.0",)):
    connector = on_worker(Logging(log, say))
    index = index_of(connector)
    AGENT.worker.step = 5
    for layer in layers:
        connector.save_kv_layer(layer, None, None)
    return connector, index


def test_a_warning_that_nobody_sees_is_kept_with_its_place(trace, quiet, capfd):
    _, index = run(quiet, lambda log: log.warning("put %s failed: %s", "k1", "api_key=hunter2"))
    (fact,) = trace.facts(Fact.LOG)
    assert (fact["logger"], fact["level"], fact["shown"]) == ("lonely", "WARNING", False)
    assert (fact["hook"], fact["layer"], fact["step"], fact["connector"]) == (
        "save_kv_layer",
        "layer.0",
        5,
        index,
    )
    assert fact["message"].startswith("put … failed") and "hunter2" not in fact["message"]
    assert capfd.readouterr() == ("", "")


def test_hooks_other_than_the_layers_are_found_too(trace, quiet):
    connector, index = run(quiet, lambda log: log.error("no"), layers=())
    connector.wait_for_save()
    (fact,) = trace.facts(Fact.LOG)
    assert (fact["hook"], fact["layer"], fact["connector"]) == ("wait_for_save", None, index)


def test_the_users_handlers_get_the_record_as_it_was(trace, quiet):
    records = []
    quiet.handlers[:] = [logging.Handler()]
    quiet.handlers[0].emit = records.append

    def say(log):
        log.warning("here")
        log.info("unimportant")

    run(quiet, say)
    assert [record.getMessage() for record in records] == ["here", "unimportant"]
    assert records[0].funcName == "say" and records[0].filename == "test_logs.py"
    assert [fact["shown"] for fact in trace.facts(Fact.LOG)] == [True]


def test_warnings_of_others_outside_hooks_are_left_alone(trace, quiet):
    namespace = {}
    exec(compile("def say(log): log.warning('mine')", "/somewhere/app.py", "exec"), namespace)
    run(quiet, lambda log: None)
    namespace["say"](quiet)
    assert trace.facts(Fact.LOG) == []


def test_repeats_are_counted_and_the_number_of_facts_is_bounded(trace, quiet):
    run(quiet, lambda log: log.warning("again %d", len(log.name)), layers=["layer.0"] * 40)
    assert [fact["count"] for fact in trace.facts(Fact.LOG)] == [1, 2, 4, 8, 16, 32]
    connector, _ = run(quiet, lambda log: None, layers=())
    for number in range(300):
        connector.say = lambda log, number=number: log.warning(f"kind {number}")
        connector.save_kv_layer("layer.0", None, None)
    assert [fact["count"] for fact in trace.facts(Fact.LOG)].count(1) == logs.MAX_FACTS


def test_a_message_that_cannot_be_formatted_is_not_our_problem(trace, quiet):
    class Nasty:
        def __str__(self):
            raise RuntimeError("no")

    run(quiet, lambda log: log.warning("%s", Nasty()))
    assert trace.facts(Fact.LOG)[0]["message"] == "…"
    assert trace.facts(Fact.AGENT_ERROR) == []


def test_an_exception_that_a_thread_logs_was_caught_there(trace, quiet):
    def fail():
        try:
            raise OSError(28, "no room, token=hunter2")
        except OSError as error:
            quiet.warning("copy failed: %s", error)

    _, index = run(quiet, lambda log: None)
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    (fact,) = trace.facts(Fact.SWALLOWED)
    assert (fact["hook"], fact["type"], fact["connector"], fact["logged"]) == (
        "thread",
        "OSError",
        index,
        True,
    )
    assert "no room" in fact["message"] and "hunter2" not in fact["message"]
    assert "test_logs.py" in fact["where"]


def test_a_threads_warning_without_an_exception_is_a_log_line(trace, quiet):
    run(quiet, lambda log: None)
    thread = threading.Thread(target=lambda: quiet.warning("slow"))
    thread.start()
    thread.join()
    assert trace.facts(Fact.SWALLOWED) == []
    assert [fact["hook"] for fact in trace.facts(Fact.LOG)] == ["thread"]
