"""SWALLOWED facts: what a connector raises and handles itself, and nothing that is ordinary."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading

import pytest

from kvtrace.agent import state
from kvtrace.agent.errors import logs, swallowed
from kvtrace.agent.origin import HERE
from kvtrace.agent.state import AGENT
from kvtrace.trace.format import Fact

from . import fakes
from .fakes import on_scheduler, on_worker

LOG = logging.getLogger("nobody.configured.this")


class Careful(fakes.Copying):
    """Runs ``how`` inside its hook, as the connector's own code."""

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        return self.how(self)

    def start_load_kv(self, forward_context, **kwargs):
        return


def write(error):
    raise error


def quietly(connector):
    try:
        write(OSError(28, "No space left, token=hunter2"))
    except OSError:
        pass


def with_a_warning(connector):
    try:
        write(ValueError("bad shape"))
    except ValueError:
        LOG.warning("could not store")


def as_another(connector):
    try:
        try:
            write(OSError("disk"))
        except OSError as error:
            raise RuntimeError("store failed") from error
    except RuntimeError:
        return


def in_a_library(connector):
    try:
        os.stat("/nowhere/at/all")
    except FileNotFoundError:
        pass


def key_error(connector):
    try:
        return {}["x"]
    except KeyError:
        return None


def environment(connector):
    try:
        return os.environ["KVTRACE_NO_SUCH_VARIABLE"]
    except KeyError:
        return None


def attribute(connector):
    return getattr(connector, "nothing", None), hasattr(connector, "more")


def optional_import(connector):
    try:
        import kvtrace_no_such_module  # noqa: F401
    except ImportError:
        pass


def generator(connector):
    return max(number for number in range(3)), next(iter([]), None)


def deep_key_error(connector):
    try:
        write(KeyError("lost"))
    except KeyError:
        pass


def own_mistake(connector):
    try:
        connector.scale = connector.caches.scale
    except Exception:
        pass


def own_mistake_and_on(connector):
    """It comes before KV is read."""
    try:
        connector.scale = connector.caches.scale
    except Exception:
        pass
    HERE.did = state.clock()


def call(connector, number=1, times=1):
    AGENT.worker.step = number
    for _ in range(times):
        connector.bind_connector_metadata(fakes.WorkMetadata(fakes.Work(range(4))))
        connector.save_kv_layer("layer.0", None, None)
        connector.clear_connector_metadata()


def make(how):
    return on_worker(Careful(how))


@pytest.mark.parametrize(
    ("how", "kind", "function", "logged"),
    [
        (quietly, "OSError", "write", False),
        (with_a_warning, "ValueError", "write", True),
        (as_another, "RuntimeError", "as_another", False),
        (in_a_library, "FileNotFoundError", "in_a_library", False),
        (deep_key_error, "KeyError", "write", False),
    ],
)
def test_what_the_connector_swallows_is_named_with_its_place(trace, how, kind, function, logged):
    logs.install()
    call(make(how))
    (fact,) = trace.facts(Fact.SWALLOWED)
    assert (fact["type"], fact["hook"], fact["layer"], fact["step"]) == (kind, "save_kv_layer", "layer.0", 1)
    assert "test_swallowed.py:" in fact["where"] and fact["where"].endswith(f"in {function}")
    assert (fact["count"], fact["observed_calls"], fact["logged"]) == (1, 1, logged)
    assert "hunter2" not in fact["message"]


@pytest.mark.parametrize(
    "how", [key_error, environment, attribute, optional_import, generator, own_mistake_and_on]
)
def test_ordinary_control_flow_is_no_finding(trace, how):
    call(make(how))
    assert trace.facts(Fact.SWALLOWED) == []


def test_an_ordinary_exception_in_a_broad_handler_says_so(trace):
    call(make(own_mistake))
    found = [(fact["type"], fact["broad"], fact["went_on"]) for fact in trace.facts(Fact.SWALLOWED)]
    told = sys.version_info >= (3, 11)  # handlers are read from a table that came with it
    assert found == ([("AttributeError", True, None)] if told else [])
    assert all(fact["where"].endswith("in own_mistake") for fact in trace.facts(Fact.SWALLOWED))


def around_it_all(connector):
    try:
        write(FileExistsError("here"))
    except Exception:
        pass


def by_its_name(connector):
    try:
        write(FileExistsError("here"))
    except FileExistsError:
        pass


def at_once(connector):
    try:
        raise FileExistsError("here")
    except Exception:
        pass


@pytest.mark.parametrize(("how", "far"), [(around_it_all, True), (by_its_name, None), (at_once, None)])
def test_an_exception_that_ends_a_function_unawares_says_so(trace, how, far):
    """A handler for anything took it, in another function than raised it: nobody found out by it."""
    call(make(how))
    (fact,) = trace.facts(Fact.SWALLOWED)
    assert fact["far"] is (far if sys.version_info >= (3, 11) else None)


def test_what_escapes_the_hook_is_not_swallowed(trace):
    def fail(connector):
        try:
            write(OSError("disk"))
        except OSError as error:
            raise RuntimeError("store failed") from error

    with pytest.raises(RuntimeError):
        call(make(fail))
    assert trace.facts(Fact.SWALLOWED) == []
    assert trace.facts(Fact.EXCEPTION)[0]["type"] == "RuntimeError"


def test_repeats_are_counted_over_the_observed_calls(trace):
    turns = []

    def sometimes(connector):
        turns.append(1)
        if len(turns) % 2:
            quietly(connector)

    call(make(sometimes), times=6)
    last = trace.facts(Fact.SWALLOWED)[-1]
    assert (last["count"], last["observed_calls"]) == (3, 5)


def test_each_exception_of_a_loop_is_counted(trace):
    """One that is gone leaves its address, and that of its traceback, to the next one."""

    def full(connector):
        room = queue.Queue(1)
        for number in range(12):
            try:
                room.put_nowait([str(number)] * number)
            except queue.Full:
                connector.dropped = number

    call(make(full))
    assert trace.facts(Fact.SWALLOWED)[-1]["count"] == 11


def test_exceptions_of_a_line_in_two_hooks_are_written_for_both(trace):
    """The second mostly gets the address of the first, which is gone by then."""

    class Both(Careful):
        def wait_for_save(self):
            return self.how(self)

    connector = on_worker(Both(quietly))
    for number in range(1, 5):
        AGENT.worker.step = number
        connector.bind_connector_metadata(fakes.WorkMetadata(fakes.Work(range(4))))
        connector.save_kv_layer("layer.0", None, None)
        connector.wait_for_save()
        connector.clear_connector_metadata()
    last = {fact["hook"]: fact["count"] for fact in trace.facts(Fact.SWALLOWED)}
    assert last == {"save_kv_layer": 4, "wait_for_save": 4}


def test_scheduler_hooks_are_observed_too(trace):
    class Lookup(fakes.KVConnectorBase_V1):
        def get_num_new_matched_tokens(self, request, num_computed_tokens):
            quietly(self)
            return 0, False

    connector = on_scheduler(Lookup())

    class Request:
        request_id = "r"

    for _ in range(40):
        assert connector.get_num_new_matched_tokens(Request(), 0) == (0, False)
    last = trace.facts(Fact.SWALLOWED)[-1]
    assert last["hook"] == "get_num_new_matched_tokens" and last["observed_calls"] == 16


@pytest.mark.skipif(hasattr(sys, "monitoring"), reason="a trace function is not used from 3.12 on")
def test_a_debugger_keeps_its_trace_function(trace):
    def mine(*_):
        return None

    connector = make(quietly)
    sys.settrace(mine)
    try:
        call(connector)
        assert sys.gettrace() is mine
    finally:
        sys.settrace(None)
    assert trace.facts(Fact.SWALLOWED) == []


def test_a_dying_thread_is_noted_and_the_users_hook_still_runs(trace, monkeypatch):
    seen = []
    monkeypatch.setattr(threading, "excepthook", lambda args: seen.append(args.exc_type))
    swallowed.install_thread_hook()
    make(quietly)
    AGENT.worker.latest = 7
    thread = threading.Thread(target=write, args=(ValueError("password=hunter2"),))
    thread.start()
    thread.join()
    assert seen == [ValueError]
    (fact,) = trace.facts(Fact.EXCEPTION)
    assert (fact["hook"], fact["type"]) == ("thread", "ValueError") and "hunter2" not in fact["message"]
    assert fact["step"] == 7, "no step asked for it: the last one that had begun"
