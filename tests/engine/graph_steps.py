"""vLLM's own graph classes with a stand-in for the graph alone: `graph_steps.py`, under an agent.

Real: `WorkerWrapperBase`, `CudagraphDispatcher`, `CUDAGraphWrapper`, `set_forward_context`, the registered
attention op with its connector decorator, the V2 runner's `CudaGraphManager`. Stand-ins: a capture runs the
callable once while the stream says that it is capturing; a replay runs nothing of Python.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CompilationMode, CUDAGraphMode, VllmConfig
from vllm.platforms import current_platform

from kvtrace.agent.facts import describe
from kvtrace.agent.plugin import activate

LAYERS = ("layers.0.attn", "layers.1.attn")
ASKED = json.loads(
    os.environ["GRAPH_STEPS"]
)  # {"modes": [...], "sizes": [...], "steps": [[tokens, requests]]}

# --- the graph ---------------------------------------------------------------------------------------

stream = SimpleNamespace(capturing=False)
replays: Counter[str] = Counter()


class Graph:
    name = "?"

    def replay(self) -> None:
        replays[self.name] += 1


@contextlib.contextmanager
def capture(graph: Graph, **_: Any) -> Any:
    stream.capturing = True
    try:
        yield
    finally:
        stream.capturing = False


torch.cuda.CUDAGraph = Graph
torch.cuda.graph = capture
torch.cuda.is_current_stream_capturing = lambda: stream.capturing
describe.platform = lambda: "cuda"  # what the agent asks; vLLM's own platform stays what it is
type(current_platform).get_global_graph_pool = lambda self: None

activate()

from vllm.compilation import cuda_graph  # noqa: E402
from vllm.compilation.monitor import set_cudagraph_capturing_enabled  # noqa: E402
from vllm.distributed.kv_transfer import kv_transfer_state  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.layers.attention import attention  # noqa: E402, F401
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher  # noqa: E402
from vllm.v1.worker.worker_base import WorkerWrapperBase  # noqa: E402

from kvtrace.agent.engine.scheduler import STEP_ATTRIBUTE  # noqa: E402
from kvtrace.agent.hooks.connector import traced  # noqa: E402
from kvtrace.trace.format import STEP_SHIFT, Role  # noqa: E402

cuda_graph.capture_pool = lambda pool, config: contextlib.nullcontext(pool)
cuda_graph.weak_ref_tensors = lambda value: value
cuda_graph.current_stream = lambda: None

# --- a connector and a model of two layers ------------------------------------------------------------


class LayerStore(KVConnectorBase_V1):
    def __init__(self) -> None: ...

    def has_connector_metadata(self) -> bool:
        return stream.bound

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None: ...

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any: ...

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None: ...

    def build_connector_meta(self, scheduler_output: Any) -> Any: ...


class Model:
    """Pieces of a graph around attention, as vLLM splits a model for PIECEWISE."""

    def __init__(self, config: VllmConfig) -> None:
        self.pieces = [
            cuda_graph.CUDAGraphWrapper(lambda: None, config, CUDAGraphMode.PIECEWISE) for _ in range(3)
        ]

    def __call__(self) -> None:
        x = torch.zeros(stream.tokens, 4)
        for piece, layer in zip(self.pieces, LAYERS, strict=False):
            piece()
            torch.ops.vllm.unified_attention_with_output(x, x, x, x.clone(), layer)
        self.pieces[-1]()


def configured(mode: CUDAGraphMode) -> VllmConfig:
    config = VllmConfig()
    compilation = config.compilation_config
    compilation.cudagraph_mode = mode
    compilation.mode = CompilationMode.VLLM_COMPILE
    compilation.splitting_ops = list(type(compilation)._attention_ops)
    compilation.cudagraph_capture_sizes = ASKED["sizes"]
    compilation.max_cudagraph_capture_size = max(ASKED["sizes"])
    impl = SimpleNamespace(forward=lambda *args, **kwargs: None)
    for layer in LAYERS:
        compilation.static_forward_context[layer] = SimpleNamespace(impl=impl, kv_cache=torch.zeros(1))
    return config


def step(engine: int, number: int, tokens: int, requests: int, execute: Any) -> None:
    wrapper = object.__new__(WorkerWrapperBase)
    wrapper.vllm_config, wrapper.mm_receiver_cache = None, None
    wrapper.worker = SimpleNamespace(execute_model=execute, model_runner=None)
    output = SimpleNamespace(
        total_num_scheduled_tokens=tokens, num_scheduled_tokens=dict.fromkeys(range(requests), 1),
        scheduled_new_reqs=[],
    )  # fmt: skip
    setattr(output, STEP_ATTRIBUTE, engine << STEP_SHIFT | number)
    stream.bound = True
    wrapper.execute_model(output)
    stream.bound = False


def run(engine: int, mode: CUDAGraphMode) -> None:
    """Warm up, capture, and run the steps, as the V1 runner does in this mode."""
    config = configured(mode)
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(mode, 1)
    model: Any = Model(config)
    if mode.has_full_cudagraphs():
        model = cuda_graph.CUDAGraphWrapper(model, config, CUDAGraphMode.FULL)

    def forward(used: CUDAGraphMode, descriptor: Any) -> None:
        Graph.name = used.name
        stream.tokens = descriptor.num_tokens
        metadata = dict.fromkeys(LAYERS, object())
        with set_forward_context(
            metadata, config, num_tokens=stream.tokens, cudagraph_runtime_mode=used,
            batch_descriptor=descriptor, slot_mapping={},
        ):  # fmt: skip
            model()

    def execute_model(output: Any) -> str:
        tokens, requests = output.total_num_scheduled_tokens, len(output.num_scheduled_tokens)
        forward(*dispatcher.dispatch(tokens, uniform_decode=tokens == requests))
        return "done"

    set_cudagraph_capturing_enabled(True)
    for used, descriptors in dispatcher.get_capture_descs():
        for descriptor in descriptors:
            forward(CUDAGraphMode.NONE, descriptor)
            forward(used, descriptor)
    set_cudagraph_capturing_enabled(False)
    for number, (tokens, requests) in enumerate(ASKED["steps"], 1):
        step(engine, number, tokens, requests, execute_model)


def main() -> None:
    stream.bound, stream.tokens = False, 1
    connector = LayerStore()
    connector = traced(connector, Role.WORKER, "LayerStore")
    kv_transfer_state._KV_CONNECTOR_AGENT = connector
    said = []
    for engine, name in enumerate(ASKED["modes"], 1):
        replays.clear()
        if name == "V2":
            replay_v2(engine)
        else:
            run(engine, CUDAGraphMode[name])
        said.append(dict(replays))
    print(json.dumps(said))


def replay_v2(engine: int) -> None:
    """The V2 runner replays a FULL graph without a forward context."""
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

    manager = object.__new__(CudaGraphManager)
    descriptor = BatchExecutionDescriptor(CUDAGraphMode.FULL, 16, 16)
    Graph.name = "FULL"
    manager.graphs = {descriptor: Graph()}
    step(engine, 1, 9, 9, lambda output: manager.run_fullgraph(descriptor) or "done")


if __name__ == "__main__":
    main()
