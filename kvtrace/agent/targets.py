"""The table of what is hooked: one row a place in vLLM, resolved on its own.

A module that a version lacks, or an attribute that was renamed, costs one row and shows in
the report as missing; it never costs the run. ``versions`` is where the row was seen in
vLLM's sources (0.8.5 .. 0.33.0).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

from kvtrace.agent import connector, front, graphs, ops, scheduler, worker
from kvtrace.agent.imports import when_imported
from kvtrace.agent.state import AGENT
from kvtrace.trace.format import Fact, Role


@dataclass(frozen=True)
class Target:
    id: str
    module: str
    attr: str
    versions: str
    install: Callable[[ModuleType], None]


_LAYERS = "vllm.model_executor.layers.attention"

TARGETS: tuple[Target, ...] = (
    Target(
        "connector-factory",
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory.create_connector",
        "0.10.2 .. 0.33.0",
        connector.wrap_factory,
    ),
    Target(
        "scheduler",
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        "0.8.5 .. 0.33.0",
        scheduler.wrap_scheduler,
    ),
    Target(
        "worker",
        "vllm.v1.worker.worker_base",
        "WorkerWrapperBase",
        "0.11.1 .. 0.33.0",
        worker.wrap_worker,
    ),
    Target(
        "engine-args",
        "vllm.engine.arg_utils",
        "EngineArgs.create_engine_config",
        "0.8.5 .. 0.33.0",
        front.wrap_engine_args,
    ),
    Target(
        "client-request-id",
        "vllm.v1.engine.input_processor",
        "InputProcessor.assign_request_id",
        "0.14.0 .. 0.33.0",
        front.wrap_input_processor,
    ),
    Target(
        "op-registration",
        "vllm.utils.torch_utils",
        "direct_register_custom_op",
        "0.11.2 .. 0.33.0",
        ops.wrap_registration,
    ),
    Target(
        "attention-decorator",
        f"{_LAYERS}.kv_transfer_utils",
        "maybe_transfer_kv_layer",
        "0.16.0 .. 0.33.0",
        ops.wrap_decorator,
    ),
    Target(
        "attention-decorator-old",
        "vllm.attention.utils.kv_transfer_utils",
        "maybe_transfer_kv_layer",
        "0.11.1 .. 0.15.1",
        ops.wrap_decorator,
    ),
    Target(
        "forward-context",
        "vllm.forward_context",
        "create_forward_context",
        "0.20.2 .. 0.33.0",
        graphs.wrap_forward_context,
    ),
    Target(
        "full-replay-v2",
        "vllm.v1.worker.gpu.cudagraph_utils",
        "CudaGraphManager.run_fullgraph",
        "0.20.2 .. 0.33.0",
        graphs.wrap_full_replay,
    ),
    Target(
        "attention-direct-call",
        f"{_LAYERS}.attention",
        "unified_attention_with_output",
        "0.16.0 .. 0.33.0",
        ops.wrap_direct_calls("unified_attention", "unified_attention_with_output"),
    ),
    Target(
        "attention-direct-call-old",
        "vllm.attention.layer",
        "unified_attention_with_output",
        "0.15.0 .. 0.15.1",
        ops.wrap_direct_calls("unified_attention", "unified_attention_with_output"),
    ),
)


def install(target: Target) -> None:
    """Hook one target now or when its module is imported; its fate goes to the trace."""
    _report(target, "pending", "its module was not imported in this process")

    def apply(module: ModuleType) -> None:
        try:
            holder: object = module
            for name in target.attr.split("."):
                holder = getattr(holder, name, None)
                if holder is None:
                    _report(target, "missing", f"{target.module} has no {target.attr}")
                    return
            target.install(module)
            _report(target, "found", "")
        except Exception as error:
            _report(target, "failed", f"{type(error).__name__}: {error}")

    when_imported(target.module, apply)


def install_all() -> None:
    for target in TARGETS:
        install(target)


def _report(target: Target, status: str, detail: str) -> None:
    AGENT.fact(
        Fact.TARGET,
        {
            "id": target.id,
            "module": target.module,
            "attr": target.attr,
            "status": status,
            "detail": detail,
            "versions": target.versions,
        },
        Role.FRONT,
        standing=target.id,
    )
