"""What a connector does in threads, executors, queues and event loops is watched like its hooks: which slots,
for which step, and which exceptions."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import functools
import logging
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvtrace.agent.errors import raises  # noqa: E402
from kvtrace.agent.errors.logs import install as install_logs  # noqa: E402
from kvtrace.agent.errors.swallowed import THREAD, install_thread_hook  # noqa: E402
from kvtrace.agent.hooks.connector import wrap_factory  # noqa: E402
from kvtrace.agent.kv.caches import CACHES  # noqa: E402
from kvtrace.agent.origin import HERE, WorkOrigin  # noqa: E402
from kvtrace.agent.state import AGENT, clock  # noqa: E402
from kvtrace.agent.watch import background  # noqa: E402
from kvtrace.agent.watch.policy import POLICY  # noqa: E402
from kvtrace.agent.watch.work import begin  # noqa: E402
from kvtrace.trace import rows  # noqa: E402
from kvtrace.trace.format import Fact, Flag, Kind  # noqa: E402
from kvtrace.trace.reader import Spool, spool_paths  # noqa: E402

from . import fakes  # noqa: E402
from .fakes import BLOCK, BLOCKS, on_worker  # noqa: E402


class Background(fakes.Copying):
    """Saves block ``step`` of each layer in step ``step``; ``how`` says where the copy is made."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self.how(self, functools.partial(self.copy, kv_layer, AGENT.worker.step))

    def copy(self, kv_layer: Any, block: int) -> None:
        self.kept.append(kv_layer[block].clone())

    def fail(self) -> None:
        raise ConnectionRefusedError("no store at token=hunter2")

    def shutdown(self) -> None:
        return


@pytest.fixture
def caches() -> dict[str, Any]:
    CACHES.__init__()  # type: ignore[misc]
    background.begins()
    return {"layer.0": torch.randn(BLOCKS, BLOCK, 8)}


def made(caches: Any, how: Callable[..., Any]) -> Any:
    return registered(Background(how), caches)


def registered(connector: Any, caches: Any) -> Any:
    connector = on_worker(connector)
    connector.register_kv_caches(caches)
    CACHES.configure(fakes.kv_cache_config(BLOCKS, BLOCK, list(caches)), {})
    return connector


def step(connector: Any, caches: Any, number: int) -> None:
    AGENT.worker.step = AGENT.worker.latest = number
    connector.bind_connector_metadata(fakes.WorkMetadata(fakes.Work(torch.arange(4))))
    for name, kv in caches.items():
        connector.save_kv_layer(name, kv, None)
    connector.clear_connector_metadata()
    AGENT.worker.step = 0


def in_one_step(caches: Any, how: Callable[..., Any], ends: Callable[[], object]) -> None:
    """The second; ``ends`` comes back when the work is done."""
    step(made(caches, how), caches, 2)
    ends()


def three_steps(connector: Any, caches: Any) -> None:
    for number in (1, 2, 3):
        step(connector, caches, number)


def slots(trace: Any) -> list[tuple[int, int, str]]:
    """(step, hook's code, set) of what was read, in the order of the steps."""
    names, found = trace.names(), []
    for row in trace.rows(Kind.SLOTS):
        assert rows.flags(row.head) == Flag.STORE and rows.detail(row.head) > 0
        found.append((row.step, rows.code(row.head), names[row.slot_set] if row.slot_set else ""))
    return sorted(found)


def wait_until(done: Callable[[], object]) -> None:
    """Condition by condition, for what happens in another thread."""
    pause = threading.Event()
    for _ in range(3000):
        if done():
            return
        pause.wait(0.01)
    raise AssertionError("nothing came of it")


class Consumer:
    """A thread that works through a queue of its own, as vendors write it."""

    def __init__(self, kind: type = queue.Queue) -> None:
        self.jobs: Any = kind()
        self.thread = threading.Thread(target=self.loop, daemon=True)

    def loop(self) -> None:
        while True:
            job = self.jobs.get()
            if job is None:
                return
            job()

    def put(self, job: Any) -> None:
        if not self.thread.is_alive():
            self.thread.start()
        self.jobs.put(job)

    def end(self) -> None:
        self.jobs.put(None)
        self.thread.join(30)


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(30)
        self.loop.close()


@pytest.fixture
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(2) as made:
        yield made


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    made.end()


THREE_STEPS = [(number, 0, f"{number * BLOCK}+{BLOCK}") for number in (1, 2, 3)]


def test_an_executor(trace: Any, caches: Any, pool: Any) -> None:
    gate = threading.Event()

    def late(job: Any) -> None:
        gate.wait(30)
        job()

    connector = made(caches, lambda c, job: pool.submit(late, job))
    three_steps(connector, caches)
    gate.set()  # all of it runs when step 3 is over
    pool.shutdown()
    assert slots(trace) == THREE_STEPS and len(connector.kept) == 3


def test_a_job_costs_a_bounded_number_of_calls(trace: Any, caches: Any) -> None:
    """Of Python functions, which tell the same on a busy machine: 30 us or so in one thread (docs/run.md)."""
    jobs: list[Any] = []
    module = concurrent.futures.thread

    def keep(connector: Any, job: Any) -> None:
        jobs.extend(module._WorkItem(concurrent.futures.Future(), len, ("",), {}) for _ in range(JOBS))

    JOBS = 200
    calls = 0

    def counts(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def work() -> None:
        sys.setprofile(counts)
        for job in jobs:
            job.run()
        sys.setprofile(None)

    connector = made(caches, keep)
    step(connector, caches, 1)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(jobs) == len(caches) * JOBS and all(job.future.done() for job in jobs)
    assert 20 * len(jobs) < calls < 200 * len(jobs)


def test_a_thread_for_each_save(trace: Any, caches: Any) -> None:
    threads = []

    def how(connector: Any, job: Any) -> None:
        threads.append(threading.Thread(target=job))
        threads[-1].start()
        threads[-1].join(30)

    connector = made(caches, how)
    three_steps(connector, caches)
    assert slots(trace) == THREE_STEPS


@pytest.mark.parametrize("kind", [queue.Queue, queue.LifoQueue])
def test_a_thread_with_a_queue(trace: Any, caches: Any, kind: type) -> None:
    consumer = Consumer(kind)
    connector = made(caches, lambda c, job: consumer.put(job))
    three_steps(connector, caches)
    wait_until(lambda: len(connector.kept) == 3)
    consumer.end()
    assert slots(trace) == THREE_STEPS


def test_a_thread_older_than_the_agent_is_met_at_its_next_item(
    trace: Any, caches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = Consumer()
    monkeypatch.setattr(background, "_on", False)
    consumer.put(lambda: None)
    monkeypatch.setattr(background, "_on", True)
    connector = made(caches, lambda c, job: consumer.put(job))
    three_steps(connector, caches)
    consumer.end()
    # it waited for its first item in Python's own get: that item's step may be unknown, nothing else
    found = slots(trace)
    assert found[-2:] == THREE_STEPS[1:] and len(connector.kept) == 3
    assert len(found) == 2 or found[0] in [(0, 0, "4+4"), (1, 0, "4+4")]


def test_a_queue_whose_puts_nobody_saw_leaves_the_step_unknown(
    trace: Any, caches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = Consumer(queue.SimpleQueue)
    connector = made(caches, lambda c, job: consumer.put(job))
    step(connector, caches, 1)
    wait_until(lambda: len(connector.kept) == 1)
    monkeypatch.setattr("kvtrace.agent.watch.work._LONGEST", 0)
    for number in (5, 6):
        step(connector, caches, number)
    consumer.end()
    assert {one[0] for one in slots(trace)} <= {0, 1}
    assert (0, 0, "24+4") in slots(trace), "the thread was started for step 1, and this is step 6's work"


class Telling(Background):
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return {"r"}, None


@pytest.mark.parametrize(
    "tells", [lambda c: c.shutdown(), lambda c: c.get_finished({"r"})], ids=["shutdown", "told as done"]
)
def test_a_threads_last_work_is_written_before_all_ends(
    trace: Any, caches: Any, tells: Callable[[Any], object]
) -> None:
    """It waits in C for its next item, and none comes, or the process is killed before."""
    consumer = Consumer(queue.SimpleQueue)
    connector = registered(Telling(lambda c, job: consumer.put(job)), caches)
    step(connector, caches, 1)
    wait_until(lambda: len(connector.kept) == 1)
    assert slots(trace) == []
    tells(connector)
    assert slots(trace) == THREE_STEPS[:1]
    consumer.end()
    assert slots(trace) == THREE_STEPS[:1]


def test_work_that_ends_between_steps_is_written_at_once(trace: Any, caches: Any) -> None:
    consumer = Consumer()
    connector = made(caches, lambda c, job: consumer.put(job))
    step(connector, caches, 1)
    consumer.end()
    (path,) = spool_paths(trace.run_dir)
    kinds = [kind for chunk in Spool(path).chunks() for kind in rows.kind(chunk[:, 0]).tolist()]
    assert Kind.SLOTS in kinds


def test_buffers_that_go_round_say_nothing_of_the_step(trace: Any, caches: Any) -> None:
    free: queue.Queue[Any] = queue.Queue()
    free.put("buffer")

    def with_buffer(job: Any) -> None:
        buffer = free.get()
        job()
        free.put(buffer)

    consumer = Consumer()
    connector = made(caches, lambda c, job: consumer.put(functools.partial(with_buffer, job)))
    three_steps(connector, caches)
    consumer.end()
    assert slots(trace) == THREE_STEPS


def test_an_event_loop(trace: Any, caches: Any, loop: Loop) -> None:
    async def save(job: Any) -> None:
        job()
        await asyncio.sleep(0)

    connector = made(caches, lambda c, job: asyncio.run_coroutine_threadsafe(save(job), loop.loop).result(30))
    three_steps(connector, caches)
    assert slots(trace) == THREE_STEPS


def test_a_callback_and_an_executor_of_the_loop(trace: Any, caches: Any, loop: Loop) -> None:
    done = threading.Semaphore(0)

    def finish(job: Any) -> None:
        job()
        done.release()

    def how(connector: Any, job: Any) -> None:
        if AGENT.worker.step == 2:
            loop.loop.call_soon_threadsafe(loop.loop.run_in_executor, None, finish, job)
        else:
            loop.loop.call_soon_threadsafe(finish, job)
        assert done.acquire(timeout=30)

    connector = made(caches, how)
    three_steps(connector, caches)
    loop.loop.call_soon_threadsafe(loop.loop.create_task, loop.loop.shutdown_default_executor())
    wait_until(lambda: len(slots(trace)) == 3)
    assert slots(trace) == THREE_STEPS


def test_an_asyncio_queue(trace: Any, caches: Any, loop: Loop) -> None:
    jobs: Any = None

    async def consume() -> None:
        nonlocal jobs
        jobs = asyncio.Queue()
        while True:
            (await jobs.get())()

    task = asyncio.run_coroutine_threadsafe(consume(), loop.loop)
    wait_until(lambda: jobs is not None)
    connector = made(caches, lambda c, job: loop.loop.call_soon_threadsafe(jobs.put_nowait, job))
    for number in (1, 2, 3):
        step(connector, caches, number)
        wait_until(lambda: len(connector.kept) == number)  # noqa: B023
    task.cancel()
    wait_until(lambda: len(slots(trace)) == 3)
    assert slots(trace) == THREE_STEPS


def test_work_that_is_nobody_s_is_left_alone(trace: Any, caches: Any, pool: Any) -> None:
    made(caches, lambda *_: None)
    # functions of the standard library and of torch, handed over outside any hook
    assert pool.submit(torch.clone, caches["layer.0"][1]).result(30).shape == (BLOCK, 8)
    assert pool.submit(lambda: HERE.work).result(30) is not None, "this file is the connector's"
    assert pool.submit(eval, "1 + 1").result(30) == 2
    assert slots(trace) == []


# --- exceptions -----------------------------------------------------------------------------------------


def swallowed(trace: Any) -> list[tuple[Any, ...]]:
    return [
        (fact["hook"], fact["step"], fact["type"], fact["where"].rpartition(" ")[2])
        for fact in trace.facts(Fact.SWALLOWED)
    ]


def test_an_exception_in_a_future_that_nobody_asks(trace: Any, caches: Any, pool: Any) -> None:
    in_one_step(caches, lambda c, job: pool.submit(c.fail), pool.shutdown)
    assert swallowed(trace) == [("executor", 2, "ConnectionRefusedError", "fail")]
    (fact,) = trace.facts(Fact.SWALLOWED)
    assert "hunter2" not in fact["message"] and fact["connector"] > 0


def asks(connector: Any, pool: Any) -> None:
    try:
        pool.submit(connector.fail).result()
    except ConnectionRefusedError:
        return


def raises_and_logs(connector: Any, pool: Any) -> None:
    error = pool.submit(connector.fail).exception()
    try:
        raise error
    except ConnectionRefusedError:
        logging.getLogger("nobody.configured.this").warning("lost", exc_info=True)


@pytest.mark.parametrize("how", [asks, raises_and_logs])
def test_a_futures_exception_raised_again_or_logged_is_one(
    trace: Any, caches: Any, pool: Any, how: Callable[[Any, Any], None]
) -> None:
    install_logs()
    connector = made(caches, lambda c, job: how(c, pool))
    for number in (2, 3, 4):
        step(connector, caches, number)
    pool.shutdown()
    assert [number for _, number, *_ in swallowed(trace)] == [2, 3, 4]


def test_exceptions_that_a_thread_handles_itself(trace: Any, caches: Any) -> None:
    consumer = Consumer()

    def careful(connector: Any) -> None:
        try:
            connector.fail()
        except OSError:
            pass
        try:
            {}["ordinary"]
        except KeyError:
            pass

    in_one_step(caches, lambda c, job: consumer.put(functools.partial(careful, c)), consumer.end)
    assert swallowed(trace) == [("thread", 2, "ConnectionRefusedError", "fail")]


class Polling(Background):
    """A thread of its constructor looks again and again whether there is work, and takes what goes wrong."""

    def __init__(self) -> None:
        super().__init__(lambda c, job: self.jobs.append(job))
        self.jobs: list[Any] = []
        self.turns, self.over = threading.Semaphore(0), False
        self.traced: list[Any] = []
        self.thread = threading.Thread(target=self.loop, daemon=True)
        self.thread.start()

    def loop(self) -> None:
        while not self.over:
            self.turns.acquire()
            self.turn()

    def turn(self) -> None:
        self.traced.append(sys.gettrace())
        if self.jobs:
            self.jobs.pop()
            with contextlib.suppress(OSError):
                try:
                    self.fail()
                finally:
                    self.on_its_way()

    def on_its_way(self) -> None:
        return


@pytest.fixture
def polling(caches: Any) -> Iterator[Any]:
    """Made by vLLM's factory: not before its constructor is over does anybody know whose thread it is."""

    class KVConnectorFactory:
        @classmethod
        def create_connector(cls, config: Any, role: Any) -> Any:
            return Polling()

    wrap_factory(SimpleNamespace(KVConnectorFactory=KVConnectorFactory))
    connector = registered(KVConnectorFactory.create_connector(None, None), caches)
    yield connector
    connector.over = True
    connector.turns.release()
    connector.thread.join(30)


def test_a_thread_of_the_constructor_that_never_ends(trace: Any, caches: Any, polling: Any) -> None:
    meanwhile: list[Any] = []
    polling.on_its_way = lambda: meanwhile.append(swallowed(trace))
    step(polling, caches, 1)
    polling.turns.release(2)
    wait_until(lambda: len(polling.traced) == 2)
    assert meanwhile == [[]], "nobody has handled it yet"
    assert swallowed(trace) == [("thread", 0, "ConnectionRefusedError", "fail")]
    assert [fact["asked_by"] for fact in trace.facts(Fact.SWALLOWED)] == [""]


@pytest.mark.skipif(hasattr(sys, "monitoring"), reason="only a trace function costs something at each call")
def test_a_loop_is_not_traced_past_the_budget(
    trace: Any, caches: Any, polling: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(raises, "_MANY_CALLS", 100)
    POLICY._accounts()
    POLICY.spent(10**12)
    polling.turns.release(100)
    wait_until(lambda: len(polling.traced) == 100)
    assert polling.traced[0] is not None and polling.traced[-1] is None


def test_a_task_that_fails_in_an_event_loop(trace: Any, caches: Any, loop: Loop) -> None:
    async def upload(connector: Any) -> None:
        await asyncio.sleep(0)
        connector.fail()

    futures = []
    connector = made(
        caches, lambda c, job: futures.append(asyncio.run_coroutine_threadsafe(upload(c), loop.loop))
    )
    step(connector, caches, 2)
    concurrent.futures.wait(futures, 30)
    wait_until(lambda: swallowed(trace))
    assert swallowed(trace) == [("asyncio", 2, "ConnectionRefusedError", "fail")]


def test_an_exception_that_ends_a_thread_is_said_once(
    trace: Any, caches: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    install_thread_hook()
    consumer = Consumer()
    connector = made(caches, lambda c, job: consumer.put(c.fail))
    step(connector, caches, 2)
    consumer.thread.join(30)
    wait_until(lambda: trace.facts(Fact.EXCEPTION))
    (fact,) = trace.facts(Fact.EXCEPTION)
    assert (fact["hook"], fact["step"], fact["type"]) == ("thread", 2, "ConnectionRefusedError")
    assert fact["connector"] > 0 and fact["where"].endswith("in fail")
    assert swallowed(trace) == []


def test_a_librarys_exception_names_the_connectors_line(trace: Any, caches: Any, pool: Any) -> None:
    def upload() -> None:
        try:
            socket.create_connection(("127.0.0.1", 1), timeout=5)
        except OSError:
            pass

    in_one_step(caches, lambda c, job: pool.submit(upload), pool.shutdown)
    (fact,) = trace.facts(Fact.SWALLOWED)
    assert fact["where"].endswith("in upload")
    assert (fact["hook"], fact["asked_by"], fact["step"]) == ("executor", "save_kv_layer", 2)


@pytest.mark.parametrize("kind", [queue.Queue, asyncio.Queue])
def test_a_full_queue_that_drops_what_comes(trace: Any, caches: Any, kind: type) -> None:
    jobs: Any = kind(1)
    jobs.put_nowait(None)

    def how(connector: Any, job: Any) -> None:
        with contextlib.suppress(queue.Full, asyncio.QueueFull):
            jobs.put_nowait(job)

    connector = made(caches, how)
    step(connector, caches, 2)
    (found,) = swallowed(trace)
    assert found[:2] == ("save_kv_layer", 2) and found[2] in ("Full", "QueueFull")


def test_a_lookup_that_missed_is_told_from_work_that_was_lost(
    trace: Any, caches: Any, tmp_path: Path
) -> None:
    def save(job: Any, look_first: bool) -> None:
        if not look_first:
            job()
        try:
            (tmp_path / "not there" / "key").read_bytes()
        except FileNotFoundError:
            pass
        if look_first:
            job()

    connector = made(caches, lambda c, job: save(job, AGENT.worker.step == 1))
    step(connector, caches, 1)
    step(connector, caches, 2)
    assert [(fact["step"], fact["went_on"]) for fact in trace.facts(Fact.SWALLOWED)] == [
        (1, True),
        (2, False),
    ]


def test_a_loop_that_wakes_itself_is_no_work_that_went_on(trace: Any, caches: Any, loop: Loop) -> None:
    """The last thing that a job of an executor does is to send its event loop a byte."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def upload() -> None:
            with socket.create_connection(server.getsockname(), timeout=0.01) as link:
                link.sendall(b"KV")
                with contextlib.suppress(TimeoutError):
                    link.recv(1)

        async def work() -> None:
            await asyncio.get_running_loop().run_in_executor(None, upload)

        run = asyncio.run_coroutine_threadsafe
        step(made(caches, lambda c, job: run(work(), loop.loop).result(30)), caches, 2)
        wait_until(lambda: bool(trace.facts(Fact.SWALLOWED)))
    (fact,) = trace.facts(Fact.SWALLOWED)
    assert (fact["hook"], fact["type"], fact["went_on"]) == ("executor", "TimeoutError", False)


def test_an_exception_that_a_library_of_the_background_catches(trace: Any, caches: Any, pool: Any) -> None:
    """A retry decorator, an event bus: nothing of the connector's own handles it."""
    namespace: dict[str, Any] = {}
    text = "def calling(function):\n  try: function()\n  except Exception: pass\n"
    exec(compile(text, "/x/site-packages/bus/__init__.py", "exec"), namespace)
    in_one_step(caches, lambda c, job: pool.submit(namespace["calling"], c.fail), pool.shutdown)
    assert swallowed(trace) == [("executor", 2, "ConnectionRefusedError", "fail")]


# --- nothing changes for the connector ------------------------------------------------------------------


def test_results_exceptions_names_and_flags_are_what_they_were(
    trace: Any, caches: Any, pool: Any, loop: Loop
) -> None:
    connector = made(caches, lambda *_: None)
    seen: dict[str, Any] = {}

    class Named(threading.Thread):
        def run(self) -> None:
            seen["thread"] = (self.name, self.daemon, threading.current_thread() is self)

    thread = Named(name="uploader", daemon=True)
    thread.start()
    thread.join(30)
    assert seen["thread"] == ("uploader", True, True) and vars(thread).keys() == vars(Named()).keys()
    error = ValueError("mine")

    def fails() -> None:
        raise error

    future = pool.submit(fails)
    with pytest.raises(ValueError) as caught:
        future.result(30)
    assert caught.value is error and future.exception() is error
    line: queue.Queue[Any] = queue.Queue(1)
    item = object()
    line.put(item)
    with pytest.raises(queue.Full):
        line.put(1, block=False)
    assert line.get(timeout=1) is item
    with pytest.raises(queue.Empty):
        line.get_nowait()

    async def answer() -> str:
        return "answer"

    assert asyncio.run_coroutine_threadsafe(answer(), loop.loop).result(30) == "answer"
    assert threading.Thread.start.__name__ == "start" and queue.Queue.get.__qualname__ == "Queue.get"
    assert AGENT._failures == 0 and connector.kept == [] and not background._starting


def test_a_recorder_that_fails_changes_nothing(
    trace: Any, caches: Any, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connector = made(caches, lambda c, job: c.kept.append(pool.submit(job)))
    monkeypatch.setattr("kvtrace.agent.watch.work.Work.start", lambda self: 1 / 0)
    step(connector, caches, 2)
    futures = [one for one in connector.kept if isinstance(one, concurrent.futures.Future)]
    assert [future.result(30) for future in futures] == [None]
    assert AGENT._failures == 1


def test_work_past_its_budget_keeps_its_step_and_exception(trace: Any, caches: Any, pool: Any) -> None:
    traced_there = []

    def late(connector: Any, job: Any) -> None:
        traced_there.append(sys.gettrace())
        job()
        connector.fail()

    def how(connector: Any, job: Any) -> None:
        if AGENT.worker.step == 9:
            pool.submit(late, connector, job)
        else:
            job()  # a sample that shows nothing is taken again

    connector = made(caches, how)
    POLICY._accounts()
    POLICY.spent(10**12)
    for number in range(1, 10):  # the first 8 are samples
        AGENT.worker.watched = 0
        step(connector, caches, number)
    pool.shutdown()
    assert traced_there == [None] and len(slots(trace)) == 8
    assert swallowed(trace) == [("executor", 9, "ConnectionRefusedError", "fail")]


# --- what can't be followed is said ---------------------------------------------------------------------


def limits(trace: Any) -> list[tuple[str, str, str]]:
    return [(fact["kind"], fact["what"], fact["hook"]) for fact in trace.facts(Fact.WATCH_LIMITS)]


def test_a_whole_tensors_memory_that_is_given_out_is_said_once(trace: Any, caches: Any, pool: Any) -> None:
    kv = caches["layer.0"]
    connector = made(caches, lambda c, job: pool.submit(lambda: c.kept.append(kv.numpy()[1].copy())).result())
    three_steps(connector, caches)
    assert limits(trace) == [("address", "numpy", "save_kv_layer")]
    (fact,) = trace.facts(Fact.WATCH_LIMITS)
    assert fact["connector"] > 0 and fact["step"] == 1 and "test_follow.py" in fact["where"]
    assert slots(trace) == [(number, 0, "") for number in (1, 2, 3)]  # slots were read, which is not known


def test_a_load_by_the_address_of_all_may_have_written_anything(trace: Any, caches: Any) -> None:
    kv = caches["layer.0"]
    size = kv.stride(0) * kv.element_size()
    data = ctypes.create_string_buffer(size)
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    connector = made(caches, lambda c, job: memcpy(kv.data_ptr() + 2 * size, data, size))
    step(connector, caches, 1)
    (unknown,) = trace.rows(Kind.SLOTS)
    assert (rows.flags(unknown.head), unknown.slot_set) == (Flag.STORE, 0)  # its hook is for saving


def test_another_process_is_said(trace: Any, caches: Any) -> None:
    connector = made(caches, lambda c, job: subprocess.run([sys.executable, "-c", ""], check=True))
    step(connector, caches, 1)
    subprocess.run([sys.executable, "-c", ""], check=True)  # nobody's
    (found,) = limits(trace)
    assert found[0] == "process" and found[1].startswith("python") and found[2] == "save_kv_layer"


class Later(fakes.Copying):
    """Copies what was saved in a step in the hook ``at`` of the next one."""

    waiting: Any = None

    def __init__(self, at: str) -> None:
        super().__init__(lambda *_: None)
        self.at = at

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def _copy(self, name: str) -> None:
        if self.at == name:
            if self.waiting is not None:
                self.kept.append(self.waiting())
            self.waiting = None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._copy("start_load_kv")

    def wait_for_save(self) -> None:
        self._copy("wait_for_save")

    def get_finished(self, finished_req_ids: Any) -> Any:
        self._copy("get_finished")
        return None, None

    def handle_preemptions(self, metadata: Any) -> None:
        self._copy("handle_preemptions")


@pytest.mark.parametrize("at", ["start_load_kv", "wait_for_save", "get_finished", "handle_preemptions"])
@pytest.mark.parametrize("finishes", [False, True])
def test_a_connector_that_copies_a_step_later(trace: Any, caches: Any, at: str, finishes: bool) -> None:
    """The step after a watched one, and one in which requests end; whatever its metadata says."""
    connector = registered(Later(at), caches)
    for number in (1, 2, 3):
        AGENT.worker.step = AGENT.worker.latest = number
        AGENT.worker.watched = 0
        AGENT.worker.finishes = finishes and number == 3
        POLICY.step_begins()
        if at == "handle_preemptions":
            connector.handle_preemptions(None)
        work = fakes.Work(torch.arange(4 if number == 1 else 0))
        connector.bind_connector_metadata(fakes.WorkMetadata(work))
        connector.start_load_kv(None)
        connector.wait_for_save()
        connector.get_finished(set())
        connector.clear_connector_metadata()
        if number == (2 if finishes and at != "handle_preemptions" else 1):
            connector.waiting = lambda: caches["layer.0"][5].clone()
    assert len(connector.kept) == 1
    step_of = 3 if finishes and at != "handle_preemptions" else 2
    assert [found[::2] for found in slots(trace)] == [(step_of, "20+4")]


@pytest.mark.parametrize(("behind", "seen"), [(3, True), (20, False)])
def test_a_hook_that_was_seen_to_copy_steps_later_is_watched_on(
    trace: Any, caches: Any, behind: int, seen: bool
) -> None:
    """Not in its first calls alone, and not for as long as nothing is stored."""
    connector = registered(Later("get_finished"), caches)
    stores, copies = (1, 40), (4, 40 + behind)
    for number in range(1, 70):
        AGENT.worker.step = AGENT.worker.latest = number
        AGENT.worker.watched = 0
        POLICY.step_begins()
        work = fakes.Work(torch.arange(4 if number in stores else 0))
        connector.bind_connector_metadata(fakes.WorkMetadata(work))
        if number in copies:
            connector.waiting = lambda: caches["layer.0"][5].clone()
        connector.get_finished(set())
        connector.clear_connector_metadata()
    assert len(connector.kept) == len(copies)
    assert [found[0] for found in slots(trace)] == list(copies)[: 2 if seen else 1]


def test_whose_work_a_thread_does_is_known_by_its_latest_item(trace: Any) -> None:
    found = []

    def loop() -> None:
        work = begin(THREAD, WorkOrigin(1, 0), "/nobody.py")
        assert work is not None and work.outside is not None
        found.append(work.outside.connector)
        work.got(1, WorkOrigin(1, 2, "wait_for_save"), None)
        found.append(work.outside.connector)
        work.stop()

    thread = threading.Thread(target=loop)
    thread.start()
    thread.join(30)
    assert found == [0, 2]


@pytest.mark.parametrize(("seconds", "apart"), [(0.5, False), (2, True)])
def test_a_thread_that_loses_its_turn_within_a_slot(
    trace: Any, caches: Any, monkeypatch: pytest.MonkeyPatch, seconds: float, apart: bool
) -> None:
    """On a busy machine K was in one record and V in the next: neither was a slot that a load had written."""
    made(caches, lambda c, job: None)
    kv, gone = caches["layer.0"], [0]
    monkeypatch.setattr("kvtrace.agent.watch.work.clock", lambda: clock() + gone[0])

    def reads() -> None:
        work = begin(THREAD, WorkOrigin(0, 1), __file__)
        assert work is not None
        kv[3][:, :4].clone()
        gone[0] = int(seconds * 1e9)
        kv[3][:, 4:].clone()
        work.stop()

    thread = threading.Thread(target=reads)
    thread.start()
    thread.join(30)
    assert (slots(trace) == [(0, 0, "12+4")]) is not apart


def test_what_a_piece_reads_in_a_later_step_is_told_apart(trace: Any, caches: Any) -> None:
    """A block may have another holder by then. The halves of a slot stay together."""
    made(caches, lambda c, job: None)
    kv = caches["layer.0"]

    def reads() -> None:
        AGENT.worker.latest = 1
        work = begin(THREAD, WorkOrigin(0, 1), __file__)
        assert work is not None
        kv[1].clone()
        AGENT.worker.latest = 2
        kv[2].clone()
        kv[3][:, :4].clone()
        AGENT.worker.latest = 3
        kv[3][:, 4:].clone()
        work.stop()

    thread = threading.Thread(target=reads)
    thread.start()
    thread.join(30)
    assert slots(trace) == [(0, 0, "4+4"), (0, 0, "8+8")]
