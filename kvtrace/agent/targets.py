"""The table of what is hooked: one row a place in vLLM, resolved on its own.

A module that a version lacks, or an attribute that was renamed, costs one row and shows in
the report as missing; it never costs the run. ``versions`` is where the row was seen in
vLLM's sources; a place that moved to another module has two rows (``trace/targets.py``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

from kvtrace.agent.engine import front, ops, scheduler, worker
from kvtrace.agent.errors import startup
from kvtrace.agent.hooks import connector
from kvtrace.agent.outside import sockets
from kvtrace.agent.state import AGENT
from kvtrace.agent.steps import graphs
from kvtrace.agent.watch import native
from kvtrace.agent.wrap.imports import when_imported
from kvtrace.trace import facts
from kvtrace.trace.format import Role
from kvtrace.versions import since


@dataclass(frozen=True)
class Target:
    id: str
    module: str
    attr: str
    versions: str
    install: Callable[[ModuleType], None]
    expects: tuple[str, ...] = ()
    """Functions of the module that the wrappers call or stand in for, with the parameters they rely on, in
    order: ``Class.method(first, second)``. ``scripts/check_targets.py`` holds vLLM's sources to it, and to
    what is read without being hooked (``reads.py``)."""
    too_late_with: tuple[str, ...] = ()
    """Modules of vLLM that use what is wrapped while they are imported: once one of them is there, what it
    made of it stays unhooked."""


_LAYERS = "vllm.model_executor.layers.attention"
_ATTENTION = (f"{_LAYERS}.attention", f"{_LAYERS}.mla_attention", "vllm.attention.layer")
_DIRECT_CALLS = (
    "unified_attention_with_output(query, key, value, output, layer_name)",
    "unified_kv_cache_update(key, value, layer_name)",
)

TARGETS: tuple[Target, ...] = (
    Target(
        "connector-factory",
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory.create_connector",
        since("0.10.2"),
        connector.wrap_factory,
        ("KVConnectorFactory.create_connector(config, role)",),
    ),
    Target(
        "scheduler",
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        since("0.8.5"),
        scheduler.wrap_scheduler,
        (
            "Scheduler.__init__(self, vllm_config)",
            "Scheduler.schedule(self)",
            "Scheduler.update_from_output(self, scheduler_output, model_runner_output)",
            "Scheduler.add_request(self, request)",
        ),
    ),
    Target(
        "worker",
        "vllm.v1.worker.worker_base",
        "WorkerWrapperBase",
        since("0.11.1"),
        worker.wrap_worker,
        (
            "WorkerWrapperBase.execute_model(self, scheduler_output)",
            "WorkerWrapperBase.initialize_from_config(self, kv_cache_configs)",
        ),
    ),
    Target(
        "engine-args",
        "vllm.engine.arg_utils",
        "EngineArgs.create_engine_config",
        since("0.8.5"),
        front.wrap_engine_args,
        ("EngineArgs.create_engine_config(self)",),
    ),
    Target(
        "engine-core",
        "vllm.v1.engine.core",
        "EngineCore.__init__",
        since("0.8.5"),
        partial(startup.wrap_init, "EngineCore", startup.ENGINE_CORE, Role.SCHEDULER),
        ("EngineCore.__init__(self, vllm_config)",),
    ),
    Target(
        "llm",
        "vllm.entrypoints.llm",
        "LLM.__init__",
        since("0.8.5"),
        partial(startup.wrap_init, "LLM", startup.LLM, Role.FRONT),
        ("LLM.__init__(self, model)",),
    ),
    Target(
        "argument-parser",
        "vllm.utils.argparse_utils",
        "FlexibleArgumentParser.error",
        since("0.32.0"),
        startup.wrap_parser,
        ("FlexibleArgumentParser.error(self, message)",),
    ),
    Target(
        "client-request-id",
        "vllm.v1.engine.input_processor",
        "InputProcessor.assign_request_id",
        since("0.14.0"),
        front.wrap_input_processor,
        ("InputProcessor.assign_request_id(request)",),
    ),
    Target(
        "op-registration",
        "vllm.utils.torch_utils",
        "direct_register_custom_op",
        since("0.11.2"),
        ops.wrap_registration,
        ("direct_register_custom_op(op_name, op_func)",),
        too_late_with=_ATTENTION,
    ),
    Target(
        "attention-decorator",
        f"{_LAYERS}.kv_transfer_utils",
        "maybe_transfer_kv_layer",
        since("0.16.0"),
        ops.wrap_decorator,
        ("maybe_transfer_kv_layer(func)",),
        too_late_with=(*_ATTENTION, f"{_LAYERS}.kv_transfer_utils"),
    ),
    Target(
        "attention-decorator-old",
        "vllm.attention.utils.kv_transfer_utils",
        "maybe_transfer_kv_layer",
        since("0.11.1", "0.15.1"),
        ops.wrap_decorator,
        ("maybe_transfer_kv_layer(func)",),
        too_late_with=(*_ATTENTION, "vllm.attention.utils.kv_transfer_utils"),
    ),
    Target(
        "forward-context",
        "vllm.forward_context",
        "create_forward_context",
        since("0.15.1"),
        graphs.wrap_forward_context,
        ("create_forward_context(attn_metadata, vllm_config, cudagraph_runtime_mode, batch_descriptor)",),
    ),
    Target(
        "full-replay-v2",
        "vllm.v1.worker.gpu.cudagraph_utils",
        "CudaGraphManager.run_fullgraph",
        since("0.17.1"),
        graphs.wrap_full_replay,
        ("CudaGraphManager.run_fullgraph(self)",),
    ),
    Target(
        "attention-direct-call",
        f"{_LAYERS}.attention",
        "unified_attention_with_output",
        since("0.16.0"),
        ops.wrap_direct_calls,
        _DIRECT_CALLS,
    ),
    Target(
        "attention-direct-call-old",
        "vllm.attention.layer",
        "unified_attention_with_output",
        since("0.15.0", "0.15.1"),
        ops.wrap_direct_calls,
        _DIRECT_CALLS,
    ),
)


def install(target: Target) -> None:
    """Hook one target now or when its module is imported; what became of it goes to the trace."""
    _report(target, "pending", "its module was not imported in this process")
    late = [name for name in target.too_late_with if name in sys.modules]

    def apply(module: ModuleType) -> None:
        try:
            holder: object = module
            for name in target.attr.split("."):
                holder = getattr(holder, name, None)
                if holder is None:
                    _report(target, "missing", f"{target.module} has no {target.attr}")
                    return
            target.install(module)
            if late:
                _report(target, "late", f"{late[0]} was imported before kvtrace came into this process")
            else:
                _report(target, "found", "")
        except Exception as error:
            _report(target, "failed", f"{type(error).__name__}: {error}")

    when_imported(target.module, apply)


def install_all() -> None:
    for target in TARGETS:
        install(target)
    native.install()
    sockets.know_servers()


def _report(target: Target, status: str, detail: str) -> None:
    fact = facts.TargetFact(target.id, target.module, target.attr, status, detail)
    AGENT.fact(fact, Role.FRONT, standing=target.id)
