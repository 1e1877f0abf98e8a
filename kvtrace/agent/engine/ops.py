"""Attention ops and KV-cache update ops: which body ran, for which layer, hooked or not.

Where we stand (vLLM from 0.11.1 on, ``kv_transfer_utils.maybe_transfer_kv_layer``): inside
the op, below the connector decorator, because that place sees the dispatcher's calls,
direct calls and the replays of breakable graphs alike. A custom op keeps the function it
was registered with, so the wrapper goes in as the decorator is applied, and for the ops
without the decorator as they are registered.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from kvtrace.agent.hooks.device import DEVICE, wanted
from kvtrace.agent.state import AGENT, clock, get_ident
from kvtrace.agent.steps import graphs
from kvtrace.agent.wrap import frames
from kvtrace.agent.wrap.codegen import generate
from kvtrace.trace import ops as table
from kvtrace.trace.format import Dispatch, Flag, Kind, Role, Skip, pack_head

# Platforms without opaque attention ops let torch.compile trace through the body: there our
# recording must vanish from the graph. Elsewhere that check would cost every call.
_COMPILE_GUARD = """    if _kvt_compiling():
        return _kvt_body({arguments})
"""
_TEMPLATE = """
def _kvt_wrapper({parameters}):
{guard}    _kvt_t0 = _kvt_clock()
    try:
        _kvt_result = _kvt_body({arguments})
    except BaseException as _kvt_error:
        _kvt_done(_kvt_t0, _kvt_clock(), layer_name, _kvt_raised)
        _kvt_step_out(_kvt_error)
        raise
    _kvt_t1 = _kvt_clock()
    try:
        _kvt_layer = layer_name if layer_name.__class__ is _kvt_str else layer_name.value
        if {ordinary}:
            _kvt_agent.add((
                (_kvt_direct if _kvt_worker.direct_depth else _kvt_dispatched)
                | _kvt_threads[_kvt_ident()] << 48,
                _kvt_t0, _kvt_t1, _kvt_worker.step, _kvt_ids[_kvt_layer], 0, _kvt_worker.mode, {skip},
            ))
            {after}
            return _kvt_result
    except Exception:
        pass  # a layer not met before: recorded below
    _kvt_done(_kvt_t0, _kvt_t1, layer_name, 0)
    return _kvt_result
"""
# The same where the recorder in C is there.
_COMPILED = """
def _kvt_wrapper({parameters}):
{guard}    _kvt_at = _kvt_begin()
    try:
        _kvt_result = _kvt_body({arguments})
    except BaseException as _kvt_error:
        _kvt_done(_kvt_begun(_kvt_at), _kvt_clock(), layer_name, _kvt_raised)
        _kvt_step_out(_kvt_error)
        raise
    if not _kvt_end(_kvt_at, layer_name):
        _kvt_done(_kvt_begun(_kvt_at), _kvt_clock(), layer_name, 0)
    return _kvt_result
"""
# In a step whose graph mode is known and not FULL, nothing has to be asked.
_KNOWN_MODE = "_kvt_worker.step and -1 < _kvt_worker.mode < _kvt_full"


class _Body:
    """One op's body: the words of its records, and the function that records the less ordinary runs."""

    def __init__(self, op: table.Op, calls_hook: bool) -> None:
        self.name = op.name
        self.calls_hook = calls_hook
        self.dispatched = pack_head(Kind.OP, Role.WORKER, op.code, Dispatch.DISPATCHER)
        self.direct = pack_head(Kind.OP, Role.WORKER, op.code, Dispatch.DIRECT)
        self._capturing = graphs.capturing_probe()

    def done(self, t0: int, t1: int, layer_name: Any, flags: int) -> None:
        worker = AGENT.worker
        try:
            layer = layer_name if layer_name.__class__ is str else layer_name.value
            if worker.step and worker.mode < 0:
                worker.mode = graphs.mode_of(_forward_context())
            if not self.calls_hook:
                skip = int(Skip.NOT_A_HOOK_SITE)
            elif worker.hooked_layer == layer:
                worker.hooked_layer = None
                skip = 0  # Skip.HOOKED
            else:
                skip = _why_not_hooked()
            if (not worker.step or worker.mode == graphs.FULL) and self._capturing():
                # A replay of a FULL graph runs no body: what runs one is a capture, or no replay.
                flags |= Flag.CAPTURE
            head = self.direct if worker.direct_depth else self.dispatched
            AGENT.add(
                (
                    head | flags << 32 | AGENT.thread() << 48,
                    t0, t1, worker.step, AGENT.id(layer), 0, worker.mode, skip,
                )
            )  # fmt: skip
        except Exception:
            AGENT.failed(f"op {self.name}")


def _why_not_hooked() -> int:
    """Which guard of ``maybe_transfer_kv_layer`` said no (0.32.0 kv_transfer_utils.py:39-48)."""
    state = sys.modules.get("vllm.distributed.kv_transfer.kv_transfer_state")
    connector = getattr(state, "_KV_CONNECTOR_AGENT", None)
    if connector is None:
        return Skip.NO_CONNECTOR
    context = _forward_context()
    if context is None or getattr(context, "attn_metadata", None) is None:
        return Skip.NO_ATTN_METADATA
    has_metadata = getattr(connector, "has_connector_metadata", None)
    if has_metadata is not None and not has_metadata():
        return Skip.NO_CONNECTOR_METADATA
    return Skip.UNKNOWN


def _forward_context() -> Any:
    module = sys.modules.get("vllm.forward_context")
    return getattr(module, "_forward_context", None)


def traced_body(body: Callable[..., Any], *, calls_hook: bool) -> Callable[..., Any]:
    """``body`` with a record at its end; the body itself where its shape is not understood."""
    op = table.BY_NAME.get(body.__name__)
    if op is None:
        return body
    made = _Body(op, calls_hook)
    names = {
        "_kvt_clock": clock,
        "_kvt_str": str,
        "_kvt_body": body,
        "_kvt_done": made.done,
        "_kvt_raised": int(Flag.RAISED),
        "_kvt_step_out": frames.step_out,
        "_kvt_compiling": _compiling_probe(),
        "_kvt_agent": AGENT,
        "_kvt_ids": AGENT.ids,
        "_kvt_threads": AGENT.threads,
        "_kvt_ident": get_ident,
        "_kvt_worker": AGENT.worker,
        "_kvt_full": graphs.FULL,
        "_kvt_dispatched": made.dispatched,
        "_kvt_direct": made.direct,
    }
    hooked = "_kvt_worker.hooked_layer == _kvt_layer"
    template = _TEMPLATE
    skip = int(Skip.HOOKED if calls_hook else Skip.NOT_A_HOOK_SITE)
    if AGENT.compiled is not None:
        names["_kvt_begun"] = AGENT.compiled.begun
        compiled = AGENT.compiled.Call(
            AGENT, AGENT.worker, made.dispatched, AGENT.threads, (), AGENT.ids, direct=made.direct, skip=skip,
            hooked="hooked_layer" if calls_hook else None, modes=graphs.FULL,
        )  # fmt: skip
        names |= {"_kvt_begin": compiled.begin, "_kvt_end": compiled.end}
        template = _COMPILED
    fills = {
        "guard": "" if _opaque_platform() else _COMPILE_GUARD,
        "ordinary": f"{hooked} and {_KNOWN_MODE}" if calls_hook else _KNOWN_MODE,
        "skip": str(skip),
        "after": "_kvt_worker.hooked_layer = None" if calls_hook else "pass",
    }
    wrapper = generate(body, template, names, ("layer_name",), fills)
    if wrapper is None:
        return body
    return DEVICE.around_op(wrapper, op) if wanted() else wrapper


def wrap_decorator(module: ModuleType) -> None:
    """``kv_transfer_utils``: make ``maybe_transfer_kv_layer`` wrap a recording body."""
    original = module.maybe_transfer_kv_layer

    @functools.wraps(original)
    def maybe_transfer_kv_layer(func: Callable[..., Any]) -> Callable[..., Any]:
        try:
            body = traced_body(func, calls_hook=True)
        except Exception:
            AGENT.failed("maybe_transfer_kv_layer")
            body = func
        decorated: Callable[..., Any] = original(body)
        return decorated

    vars(module)["maybe_transfer_kv_layer"] = maybe_transfer_kv_layer


def wrap_registration(module: ModuleType) -> None:
    """``direct_register_custom_op``: record the ops that carry no connector decorator."""
    original = module.direct_register_custom_op

    @functools.wraps(original)
    def direct_register_custom_op(*args: Any, **kwargs: Any) -> Any:
        try:
            op = table.BY_NAME.get(str(kwargs.get("op_name")))
            if op is not None and op.updates_cache:  # vLLM names its arguments
                kwargs["op_func"] = traced_body(kwargs["op_func"], calls_hook=False)
        except Exception:
            AGENT.failed("direct_register_custom_op")
        return original(*args, **kwargs)

    vars(module)["direct_register_custom_op"] = direct_register_custom_op


def wrap_direct_calls(module: ModuleType) -> None:
    """Attention modules: record calls that go past the dispatcher (``use_direct_call``).

    Those resolve the op's Python function through the module's global at call time
    (0.15.0+), so the global is replaced by a copy that says "direct"; the registered op keeps
    the one it was given.
    """
    for name in ("unified_attention", "unified_attention_with_output"):
        registered = getattr(module, name, None)
        if registered is not None:
            setattr(module, name, _direct(registered))


def _direct(registered: Callable[..., Any]) -> Callable[..., Any]:
    compiling = _compiling_probe()
    worker = AGENT.worker

    @functools.wraps(registered)
    def direct(*args: Any, **kwargs: Any) -> Any:
        if compiling():
            return registered(*args, **kwargs)
        worker.direct_depth += 1
        try:
            return registered(*args, **kwargs)
        finally:
            worker.direct_depth -= 1

    return direct


def _compiling_probe() -> Callable[[], bool]:
    probe = getattr(getattr(sys.modules.get("torch"), "compiler", None), "is_compiling", None)
    return probe if probe is not None else (lambda: False)


def _opaque_platform() -> bool:
    """Whether attention is one opaque op on this platform (``Platform.opaque_attention_op``)."""
    platform = getattr(sys.modules.get("vllm.platforms"), "current_platform", None)
    return platform is None or bool(platform.opaque_attention_op())
