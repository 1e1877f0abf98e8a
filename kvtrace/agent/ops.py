"""Attention ops and KV-cache update ops: which body ran, for which layer, hooked or not.

Where we stand (vLLM 0.11.1 .. 0.33.0, ``kv_transfer_utils.maybe_transfer_kv_layer``): inside
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

from kvtrace.agent import graphs
from kvtrace.agent.codegen import generate
from kvtrace.agent.device import DEVICE, wanted
from kvtrace.agent.state import AGENT, clock
from kvtrace.trace.format import OP_CODE, Flag, Kind, Road, Role, Skip, pack_head

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
    except BaseException:
        _kvt_done(_kvt_t0, layer_name, {tokens}, _kvt_raised)
        raise
    _kvt_done(_kvt_t0, layer_name, {tokens}, 0)
    return _kvt_result
"""


def _recorder(name: str, hook_site: bool) -> Callable[[int, Any, Any, int], None]:
    """The function that a body's wrapper calls at its end."""
    dispatched = pack_head(Kind.OP, Role.WORKER, OP_CODE[name], Road.DISPATCHER)
    direct = pack_head(Kind.OP, Role.WORKER, OP_CODE[name], Road.DIRECT)
    worker = AGENT.worker
    capturing = graphs.capturing_probe()

    def done(t0: int, layer_name: Any, rows: Any, flags: int) -> None:
        t1 = clock()
        try:
            layer = layer_name if layer_name.__class__ is str else layer_name.value
            if worker.step and worker.mode < 0:
                worker.mode = graphs.mode_of(_forward_context())
            if not hook_site:
                skip = 5  # Skip.NOT_A_HOOK_SITE
            elif worker.hooked_layer == layer:
                worker.hooked_layer = None
                skip = 0  # Skip.HOOKED
            else:
                skip = _why_not_hooked()
            if (not worker.step or worker.mode == graphs.FULL) and capturing():
                # A replay of a FULL graph runs no body: what runs one is a capture, or no replay.
                flags |= Flag.CAPTURE
            ident = AGENT.ids.get(layer) or AGENT.id(layer)
            head = direct if worker.direct_depth else dispatched
            thread = AGENT.thread()
            AGENT.add(
                (
                    head | flags << 32 | thread << 48,
                    t0,
                    t1,
                    worker.step,
                    ident,
                    -1 if rows is None else rows.size(0),
                    worker.mode,
                    skip,
                )
            )
        except Exception:
            AGENT.failed(f"op {name}")

    return done


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


def traced_body(body: Callable[..., Any], *, hook_site: bool) -> Callable[..., Any]:
    """``body`` with a record at its end; the body itself where its shape is not understood."""
    name = body.__name__
    if name not in OP_CODE:
        return body
    done = _recorder(name, hook_site)
    rows = next((n for n in ("query", "q", "key", "kv_c_normed") if n in _parameters(body)), "None")
    names = {
        "_kvt_clock": clock,
        "_kvt_body": body,
        "_kvt_done": done,
        "_kvt_raised": int(Flag.RAISED),
        "_kvt_compiling": _compiling_probe(),
    }
    guard = "" if _opaque_platform() else _COMPILE_GUARD
    template = _TEMPLATE.replace("{tokens}", rows).replace("{guard}", guard)
    wrapper = generate(body, template, names, needs=("layer_name",))
    if wrapper is None:
        return body
    return DEVICE.around_op(wrapper, OP_CODE[name]) if wanted() else wrapper


def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    code = getattr(function, "__code__", None)
    return () if code is None else code.co_varnames[: code.co_argcount]


def wrap_decorator(module: ModuleType) -> None:
    """``kv_transfer_utils``: make ``maybe_transfer_kv_layer`` wrap a recording body."""
    original = module.maybe_transfer_kv_layer

    @functools.wraps(original)
    def maybe_transfer_kv_layer(func: Callable[..., Any]) -> Callable[..., Any]:
        try:
            body = traced_body(func, hook_site=True)
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
            args, kwargs = _replace_update_op(args, kwargs)
        except Exception:
            AGENT.failed("direct_register_custom_op")
        return original(*args, **kwargs)

    vars(module)["direct_register_custom_op"] = direct_register_custom_op


def _replace_update_op(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    name = kwargs.get("op_name", args[0] if args else None)
    if name not in ("unified_kv_cache_update", "unified_mla_kv_cache_update"):
        return args, kwargs
    if "op_func" in kwargs:
        return args, {**kwargs, "op_func": traced_body(kwargs["op_func"], hook_site=False)}
    if len(args) > 1:
        func = traced_body(args[1], hook_site=False)
        return (args[0], func, *args[2:]), kwargs
    return args, kwargs


def wrap_direct_calls(*op_names: str) -> Callable[[ModuleType], None]:
    """Attention modules: record calls that go past the dispatcher (``use_direct_call``).

    Those resolve the op's Python function through the module's global at call time
    (0.15.0+), so the global is replaced by a copy that says "direct"; the registered op keeps
    the one it was given.
    """

    def apply(module: ModuleType) -> None:
        for name in op_names:
            registered = getattr(module, name, None)
            if registered is not None:
                setattr(module, name, _direct(registered))

    return apply


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
    opaque = getattr(platform, "opaque_attention_op", None)
    return opaque is None or bool(opaque())
