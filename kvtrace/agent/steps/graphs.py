"""CUDA graphs: which mode a step really used, how far its batch was padded, what was captured.

The V1 runner puts the mode of a step into the forward context; so does V2, except for FULL
graphs: these it replays without one, through ``CudaGraphManager.run_fullgraph``. Both places are
called once a forward, however many layers there are. The first forward of a step is the target model's,
later ones are a draft model's; a context without attention metadata is no forward (dummy
runs, ``start_load_kv`` outside of one).
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kvtrace.agent.facts import describe
from kvtrace.agent.state import AGENT
from kvtrace.trace.facts import GraphsFact
from kvtrace.trace.format import STEP_SHIFT, Role

FULL = 2
_counter: Any = None
"""vLLM's own counter of captured graphs (breakable graphs are not in it), once it is imported."""
_captured = 0
_written: set[tuple[int, int]] = set()
"""(engine tag, process) whose GRAPHS fact is written."""


def wrap_forward_context(module: ModuleType) -> None:
    """``create_forward_context``: what ``set_forward_context`` makes for each forward."""
    original = module.create_forward_context
    worker = AGENT.worker

    @functools.wraps(original)
    def create_forward_context(*args: Any, **kwargs: Any) -> Any:
        context = original(*args, **kwargs)
        if worker.step and worker.mode < 0:
            try:
                if context.attn_metadata is not None:
                    worker.mode = mode_of(context)
                    worker.padded = _tokens(getattr(context, "batch_descriptor", None))
            except Exception:
                AGENT.failed("create_forward_context")
        return context

    vars(module)["create_forward_context"] = create_forward_context


def wrap_full_replay(module: ModuleType) -> None:
    """``CudaGraphManager.run_fullgraph``: the V2 runner's replay of a FULL graph."""
    cls = module.CudaGraphManager
    original = cls.__dict__["run_fullgraph"]
    worker = AGENT.worker

    @functools.wraps(original)
    def run_fullgraph(self: Any, *args: Any, **kwargs: Any) -> Any:
        if worker.step and worker.mode < 0:
            try:
                worker.mode = FULL
                worker.padded = _tokens(next(iter((*args, *kwargs.values())), None))
            except Exception:
                AGENT.failed("run_fullgraph")
        return original(self, *args, **kwargs)

    cls.run_fullgraph = run_fullgraph


def mode_of(context: Any) -> int:
    """CUDA-graph runtime mode of a forward context (0 NONE, 1 PIECEWISE, 2 FULL), -1 unknown."""
    mode = getattr(context, "cudagraph_runtime_mode", None)
    value = getattr(mode, "_value_", mode)  # an Enum's `value` takes two calls of Python
    return value if isinstance(value, int) else -1


def _tokens(descriptor: Any) -> int:
    """Tokens of a batch descriptor; 0.17 and 0.18 name a FULL graph by the number itself."""
    tokens = getattr(descriptor, "num_tokens", descriptor)
    return tokens if isinstance(tokens, int) else 0


def capturing_probe() -> Callable[[], bool]:
    """``torch.cuda.is_current_stream_capturing`` on CUDA; elsewhere nothing is ever captured."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    probe = getattr(cuda, "is_current_stream_capturing", None)
    return probe if probe is not None and describe.platform() == "cuda" else (lambda: False)


def _captures() -> int:
    """Graphs captured in this process so far."""
    global _counter
    if _counter is None:
        _counter = getattr(sys.modules.get("vllm.compilation.counter"), "compilation_counter", None)
    number = getattr(_counter, "num_cudagraph_captured", 0)
    return number if isinstance(number, int) else 0


def step_begins(wrapper: Any, step: int) -> None:
    """Note how many graphs there are; in an engine's first step also what was decided about them."""
    global _captured
    _captured = _captures()
    key = (step >> STEP_SHIFT, AGENT.pid)
    if not step or key in _written:
        return
    _written.add(key)
    config = getattr(wrapper, "vllm_config", None)
    runner = getattr(getattr(wrapper, "worker", None), "model_runner", None)
    fact = GraphsFact(
        tag=step >> STEP_SHIFT,
        # By now the attention backend's support has been taken into account.
        mode=describe.plain(describe.get(config, "compilation_config.cudagraph_mode")),
        captured=_captured,
        breakable=os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH") == "1",
        v2=type(runner).__module__.startswith("vllm.v1.worker.gpu."),
    )
    AGENT.fact(fact, Role.WORKER)


def captured_in_step() -> bool:
    """Whether a graph was captured since the step began: vLLM means to do so before the first one."""
    return _captures() != _captured
