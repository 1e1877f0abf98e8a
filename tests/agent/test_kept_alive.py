"""Nothing that passes through a hook lives longer for being traced."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvtrace.agent.state import AGENT  # noqa: E402
from kvtrace.trace.format import Fact  # noqa: E402

from . import fakes  # noqa: E402
from .fakes import on_scheduler, on_worker  # noqa: E402

ATTEMPTS = 8


class Thing(SimpleNamespace):
    """Something of vLLM's that a weak reference can name."""


class Trying(fakes.Copying):
    """Tries with a buffer of its own, fails, frees it and tries again."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[int] = []

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        refs: list[Any] = []
        for attempt in range(ATTEMPTS):
            buffer = kv_layer[:1].clone()
            refs.append(weakref.ref(buffer))
            try:
                self.put(buffer, attempt)
            except OSError:
                pass
            except ValueError as error:
                self.last = type(error)
            del buffer
            self.alive.append(sum(ref() is not None for ref in refs))

    def put(self, buffer: Any, attempt: int) -> None:
        copy = buffer.clone()
        self.send(copy, attempt)

    def send(self, copy: Any, attempt: int) -> None:
        if attempt % 2:
            raise ValueError("no such", len(copy))
        raise ConnectionError("refused")

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        try:
            raise TimeoutError(f"no answer for {request.request_id}")
        except TimeoutError:
            return 0, False

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        return fakes.WorkMetadata()

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        return

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        return False, None


@pytest.fixture
def no_collector() -> Any:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_what_failed_is_freed_as_soon_as_the_connector_lets_go(trace: Any, no_collector: None) -> None:
    caches = {"layer.0": torch.randn(4, 4, 8)}
    connector = Trying()
    held = on_worker(connector)
    held.register_kv_caches(caches)
    AGENT.worker.step = AGENT.worker.latest = 1
    held.bind_connector_metadata(fakes.WorkMetadata(fakes.Work(torch.arange(4))))
    held.save_kv_layer("layer.0", caches["layer.0"], None)
    assert connector.alive == [0] * ATTEMPTS
    facts = {fact["type"]: fact["count"] for fact in trace.facts(Fact.SWALLOWED)}
    assert facts == {"ConnectionError": ATTEMPTS // 2, "ValueError": ATTEMPTS // 2}, "and all were seen"


def test_what_passes_through_a_workers_hook_is_let_go(trace: Any, no_collector: None) -> None:
    caches = {"layer.0": torch.randn(4, 4, 8)}
    connector = Trying()
    held = on_worker(connector)
    held.register_kv_caches(caches)
    for number in range(1, 4):
        AGENT.worker.step = AGENT.worker.latest = number
        passed = {
            "metadata": fakes.WorkMetadata(fakes.Work(torch.arange(4))),
            "context": Thing(attn_metadata=None),
            "attention": Thing(),
            "view": caches["layer.0"][:],
        }
        held.bind_connector_metadata(passed["metadata"])
        held.start_load_kv(passed["context"])
        held.save_kv_layer("layer.0", passed["view"], passed["attention"])
        held.wait_for_save()
        held.get_finished(set())
        held.clear_connector_metadata()
        AGENT.worker.step = 0
        refs = {name: weakref.ref(value) for name, value in passed.items()}
        passed.clear()
        assert [name for name, ref in refs.items() if ref() is not None] == []
    layer = weakref.ref(caches["layer.0"])
    gone = weakref.ref(connector), weakref.ref(held)
    caches.clear()
    connector.caches = {}
    del connector, held
    assert [ref() for ref in gone] == [None, None]
    assert layer() is None, "the KV cache itself"


def test_what_passes_through_a_schedulers_hook_is_let_go(trace: Any, no_collector: None) -> None:
    scheduler = Thing(requests={})
    AGENT.scheduler.current = weakref.ref(scheduler)
    connector = on_scheduler(Trying())
    for number in range(3):
        request = Thing(request_id=f"r{number}", num_prompt_tokens=8, num_tokens=8, kv_transfer_params=None)
        output = Thing(num_scheduled_tokens={f"r{number}": 8}, scheduled_new_reqs=[], finished_req_ids=set())
        connector.get_num_new_matched_tokens(request, 0)
        connector.update_state_after_alloc(request, None, 0)
        meta = connector.build_connector_meta(output)
        connector.request_finished(request, [1])
        refs = weakref.ref(request), weakref.ref(output), weakref.ref(meta)
        del request, output, meta
        assert [ref() for ref in refs] == [None] * 3
    gone = weakref.ref(scheduler)
    del scheduler
    assert gone() is None and AGENT.scheduler.current() is None, "an engine that is shut down"


GROWTH = """
import os, sys
from pathlib import Path
sys.path[:0] = [{root!r}, {tests!r}]
import torch
from agent import conftest, fakes, test_kept_alive as mine
from kvtrace.agent.state import AGENT

def megabytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

def run(worker, scheduler, caches):
    sizes = []
    for number in range(1, {calls} + 1):
        name = f"r{{number}}"
        request = mine.Thing(request_id=name, num_prompt_tokens=8, num_tokens=8, kv_transfer_params=None)
        output = mine.Thing(num_scheduled_tokens={{name: 8}}, scheduled_new_reqs=[], finished_req_ids=set())
        AGENT.worker.step = AGENT.worker.latest = AGENT.scheduler.step = number
        scheduler.get_num_new_matched_tokens(request, 0)
        meta = scheduler.build_connector_meta(output)
        worker.bind_connector_metadata(meta)
        for layer in caches:
            worker.wait_for_layer_load(layer)
            worker.save_kv_layer(layer, caches[layer], None)
        worker.alive.clear()
        worker.wait_for_save()
        worker.clear_connector_metadata()
        scheduler.request_finished(request, [1])
        recorder = AGENT.recorder
        if recorder is not None:
            recorder.forget_name(request.request_id)
        AGENT.flush()
        if number in ({calls} // 4, {calls}):
            sizes.append(megabytes())
    return sizes[1] - sizes[0]

caches = {{"layer.0": torch.randn(4, 4, 8)}}
with conftest.recording(Path(sys.argv[1])) as trace:
    pair = fakes.on_worker(mine.Trying()), fakes.on_scheduler(mine.Trying())
    pair[0].register_kv_caches(caches)
    print(run(*pair, caches))
"""
CALLS = 10_000


def test_ten_thousand_requests_take_no_more_memory(tmp_path: Path) -> None:
    """On a stand-in for the engine, which without the agent does not grow by a page."""
    tests = Path(__file__).resolve().parents[1]
    script = GROWTH.format(root=str(tests.parent), tests=str(tests), calls=CALLS)
    command = [sys.executable, "-c", script, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout) < 4.0  # megabytes
