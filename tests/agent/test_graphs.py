"""Graph modes as the agent reads them, on stand-ins for vLLM's forward context and graph manager."""

from __future__ import annotations

import enum
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvtrace.agent.engine import front, ops
from kvtrace.agent.facts.connector_facts import says_piecewise
from kvtrace.agent.state import AGENT
from kvtrace.agent.steps import graphs
from kvtrace.trace import ops as op_table
from kvtrace.trace.format import Dispatch, Fact, Flag, Kind, Skip
from kvtrace.trace.rows import code, detail, flags

from . import fakes
from .fake_cuda import on_cuda

pytestmark = pytest.mark.usefixtures("each_recorder")


class Mode(enum.Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_AND_PIECEWISE = (2, 1)


def forward_context() -> ModuleType:
    """vllm.forward_context, as far as the wrapper stands in it."""
    module = ModuleType("vllm.forward_context")

    def create_forward_context(
        attn_metadata: Any, config: Any, mode: Any = Mode.NONE, batch: Any = None
    ) -> Any:
        return SimpleNamespace(
            attn_metadata=attn_metadata, cudagraph_runtime_mode=mode, batch_descriptor=batch
        )

    module.create_forward_context = create_forward_context  # type: ignore[attr-defined]
    graphs.wrap_forward_context(module)
    return module


def begin(step: int = 1) -> Any:
    AGENT.worker.step, AGENT.worker.mode, AGENT.worker.padded = step, -1, 0
    return AGENT.worker


def test_the_first_forward_of_a_step_tells_mode_and_padding(trace: Any) -> None:
    create = forward_context().create_forward_context
    worker = begin()
    create(None, None, Mode.NONE)  # start_load_kv outside of a forward
    assert worker.mode == -1
    create({}, None, Mode.PIECEWISE, SimpleNamespace(num_tokens=128))
    create({}, None, Mode.FULL, SimpleNamespace(num_tokens=8))  # a draft model's
    assert (worker.mode, worker.padded) == (1, 128)
    worker = begin(0)
    create({}, None, Mode.FULL, SimpleNamespace(num_tokens=8))  # warm-up, capture
    assert worker.mode == -1
    worker = begin()
    create({}, None, Mode.FULL)
    assert (worker.mode, worker.padded) == (2, 0)


@pytest.mark.parametrize("desc", [SimpleNamespace(num_tokens=16), 16])
def test_a_replay_without_a_forward_context_is_full(trace: Any, desc: Any) -> None:
    class CudaGraphManager:
        def run_fullgraph(self, desc: Any) -> Any:
            return ("replayed", desc)

    class ModelCudaGraphManager(CudaGraphManager):
        def run_fullgraph(self, desc: Any) -> Any:
            return super().run_fullgraph(desc)

    graphs.wrap_full_replay(SimpleNamespace(CudaGraphManager=CudaGraphManager))  # type: ignore[arg-type]
    worker = begin()
    assert ModelCudaGraphManager().run_fullgraph(desc) == ("replayed", desc)
    assert (worker.mode, worker.padded) == (2, 16)
    worker.mode = 1
    assert CudaGraphManager().run_fullgraph(desc=desc) == ("replayed", desc)
    assert worker.mode == 1
    worker = begin(0)
    CudaGraphManager().run_fullgraph(desc)
    assert worker.mode == -1


def test_each_run_of_a_body_says_layer_mode_and_hook(trace: Any) -> None:
    def unified_attention_with_output(query: Any, layer_name: Any) -> str:
        if query is bad:
            raise ValueError
        return "out"

    query, bad = "good", "bad"
    opaque = SimpleNamespace(value="b")  # as vLLM wraps the name for torch.compile
    attention = ops.traced_body(unified_attention_with_output, calls_hook=True)
    unified_attention_with_output.__name__ = "unified_kv_cache_update"
    update = ops.traced_body(unified_attention_with_output, calls_hook=False)
    worker = begin(5)
    worker.mode = 1
    for layer in ("a", opaque, "a"):
        worker.hooked_layer = layer if isinstance(layer, str) else layer.value
        assert update(query, layer) == attention(query, layer) == "out"
        assert worker.hooked_layer is None
    attention(None, layer_name="a")
    worker.direct_depth = 1
    update(query, "a")
    worker.direct_depth = 0
    with pytest.raises(ValueError):
        update(bad, "a")
    names = {name: ident for ident, name in trace.names().items()}
    said = trace.table(Kind.OP)
    hooked, no_site, unhooked = int(Skip.HOOKED), int(Skip.NOT_A_HOOK_SITE), int(Skip.NO_CONNECTOR)
    told = [(op, *row) for op, row in zip(code(said[:, 0]).tolist(), said[:, 3:].tolist(), strict=True)]
    assert told == [
        row
        for layer in ("a", "b", "a")
        for row in (
            (op_table.KV_CACHE_UPDATE.code, 5, names[layer], 0, 1, no_site),
            (op_table.ATTENTION_WITH_OUTPUT.code, 5, names[layer], 0, 1, hooked),
        )
    ] + [
        (op_table.ATTENTION_WITH_OUTPUT.code, 5, names["a"], 0, 1, unhooked),
        (op_table.KV_CACHE_UPDATE.code, 5, names["a"], 0, 1, no_site),
        (op_table.KV_CACHE_UPDATE.code, 5, names["a"], 0, 1, no_site),
    ]
    assert detail(said[:, 0]).tolist() == [Dispatch.DISPATCHER] * 7 + [Dispatch.DIRECT, Dispatch.DISPATCHER]
    assert flags(said[:, 0]).tolist() == [0] * 8 + [Flag.RAISED]


def test_bodies_run_while_capturing_are_marked(trace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    state = SimpleNamespace(capturing=True, asked=0)

    def is_current_stream_capturing() -> bool:
        state.asked += 1
        return bool(state.capturing)

    cuda = SimpleNamespace(is_current_stream_capturing=is_current_stream_capturing)
    on_cuda(monkeypatch, cuda)

    def unified_attention_with_output(query: Any, layer_name: str) -> None: ...

    body = ops.traced_body(unified_attention_with_output, calls_hook=True)
    begin(0)
    body(None, "a")  # the capture phase
    begin(5).mode = 2
    body(None, "a")  # captured within a step
    state.capturing = False
    body(None, "a")  # ran in Python in a FULL step: no replay
    asked = state.asked
    begin(6).mode = 1
    body(None, "a")
    assert state.asked == asked == 3  # an ordinary step does not ask the device
    marks = flags(trace.table(Kind.OP)[:, 0]) & int(Flag.CAPTURE)
    assert marks.tolist() == [Flag.CAPTURE, Flag.CAPTURE, 0, 0]


def test_the_first_step_tells_the_mode_and_later_captures_show(
    trace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = SimpleNamespace(num_cudagraph_captured=35)
    monkeypatch.setitem(sys.modules, "vllm.compilation.counter", SimpleNamespace(compilation_counter=counter))
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")
    monkeypatch.setattr(graphs, "_written", set())
    monkeypatch.setattr(graphs, "_counter", None)
    Runner = type("GPUModelRunner", (), {"__module__": "vllm.v1.worker.gpu.model_runner"})
    compilation = SimpleNamespace(cudagraph_mode=Mode.FULL_AND_PIECEWISE)
    wrapper = SimpleNamespace(
        vllm_config=SimpleNamespace(compilation_config=compilation),
        worker=SimpleNamespace(model_runner=Runner()),
    )
    graphs.step_begins(wrapper, 0)
    assert trace.facts(Fact.GRAPHS) == []
    for n in (1, 2):
        graphs.step_begins(wrapper, 9 << 32 | n)
    assert trace.facts(Fact.GRAPHS) == [
        {"tag": 9, "mode": "FULL_AND_PIECEWISE", "captured": 35, "breakable": True, "v2": True}
    ]
    assert not graphs.captured_in_step()
    counter.num_cudagraph_captured += 1
    assert graphs.captured_in_step()
    graphs.step_begins(wrapper, 9 << 32 | 3)
    assert not graphs.captured_in_step()


def test_what_the_command_asks_for() -> None:
    for config in (SimpleNamespace(cudagraph_mode=Mode.FULL), {"cudagraph_mode": "FULL"}):
        assert front.asked(SimpleNamespace(compilation_config=config)) == {
            "compilation_config.cudagraph_mode": "FULL"
        }
    for nothing in (SimpleNamespace(cudagraph_mode=None), {}, None, 3):
        assert front.asked(SimpleNamespace(compilation_config=nothing)) == {}
    assert front.asked(SimpleNamespace(max_num_batched_tokens=64)) == {"max_num_batched_tokens": 64}


def test_the_connector_is_asked_with_a_copy() -> None:
    class Greedy(fakes.KVConnectorBase_V1):
        @classmethod
        def requires_piecewise_for_cudagraph(cls, extra: dict[str, Any]) -> bool:
            return bool(extra.pop("layerwise", False))

    class Broken(fakes.KVConnectorBase_V1):
        @classmethod
        def requires_piecewise_for_cudagraph(cls, extra: dict[str, Any]) -> bool:
            raise RuntimeError

    extra = {"layerwise": True}
    assert says_piecewise(Greedy, extra) is True and extra == {"layerwise": True}
    assert says_piecewise(Greedy, {"layerwise": False}) is False
    assert says_piecewise(Greedy, None) is False
    assert says_piecewise(Broken, {}) is None
    assert says_piecewise(object, {}) is None
