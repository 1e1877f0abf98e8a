"""The wrapper of one hook: clock, call, clock, record. Of a watched call what the watch took is left out: it
begins later by that.

It has the signature of the method that it stands for, and adds its record itself; the general one, with
``*args`` and ``**kwargs``, is for what that can't be spelt for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from kvtrace.agent.hooks import hook_records
from kvtrace.agent.hooks.device import DEVICE
from kvtrace.agent.origin import HERE
from kvtrace.agent.state import AGENT, clock, get_ident
from kvtrace.agent.watch import call
from kvtrace.agent.wrap import frames
from kvtrace.agent.wrap.codegen import generate, signature_of
from kvtrace.agent.wrap.hooked import Hooked
from kvtrace.agent.wrap.proxy import Passed, its
from kvtrace.trace import hooks
from kvtrace.trace.format import Flag, Kind, Role, pack_head

# What every hook's wrapper does, with the signature of the method that it stands for. It looks the method up
# at each call: what was put in its place since, on the connector or on its class, is what runs.
_TEMPLATE = """
def _kvt_wrapper({parameters}):
    if _kvt_passed.to is not None:
        return _kvt_passed.to({others})
    _kvt_t0 = _kvt_clock()
    try:
        if {off}:
            _kvt_result = {call}
        else:
            _kvt_own = _kvt_here.own
            _kvt_result = _kvt_watched({self}, {self}.{method}, {layer}, {others})
            _kvt_t0 = min(_kvt_t0 + _kvt_here.own - _kvt_own, _kvt_clock())
    except BaseException as _kvt_error:
        _kvt_raised({layer}, _kvt_t0, _kvt_error)
        _kvt_step_out(_kvt_error)
        raise
    _kvt_t1 = _kvt_clock()
    {record}
    return _kvt_result
"""
# The same where the recorder in C is there, of hooks of which there is little to say: all but the plain way
# is left to the wrapper above.
_COMPILED = """
def _kvt_wrapper({parameters}):
    _kvt_at = _kvt_begin()
    try:
        if _kvt_at is None:
            return _kvt_otherwise({arguments})
        _kvt_result = {call}
    except BaseException as _kvt_error:
        if _kvt_at is not None:
            _kvt_raised({layer}, _kvt_begun(_kvt_at), _kvt_error)
        _kvt_step_out(_kvt_error)
        raise
    {quiet}
        return _kvt_result
    _kvt_t0, _kvt_t1 = _kvt_begun(_kvt_at), _kvt_clock()
    _kvt_record({seen})
    return _kvt_result
"""
_ENDS = "if _kvt_end({told}):"
# What a connector answers may be anything: where it can't be asked, it is left to the record's detail.
_ENDS_QUIETLY = """try:
        _kvt_quiet = {when}
    except Exception:
        _kvt_quiet = False
    if _kvt_quiet and _kvt_end({told}):"""
_RECORD = "_kvt_record({seen})"
# Of most calls there is little to say, and layer hooks run 2 x layers times a step: no call but the
# one that adds the tuple.
_SHORT_RECORD = """try:
        _kvt_agent.add((
            _kvt_heads[_kvt_ident()], _kvt_t0, _kvt_t1, _kvt_side.step, {columns},
        ))
        {after}
    except Exception:
        _kvt_record({seen})
"""
ASKS = frozenset({hooks.TRANSFER_RESULTS.name})
"""Hooks that vLLM's base class answers by asking another one: that is vLLM's call, and the proxy is asked."""
_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


def wrapper_of(hooked: Hooked, connector: Any) -> tuple[Callable[..., Any], Passed]:
    """What stands in the proxy for one of its hooks, to be bound to the connector (or, of those in ``ASKS``,
    to the proxy)."""
    name, passed = hooked.hook.name, Passed()
    function = inspect.getattr_static(type(connector), name, None)
    shadow = _shadow(connector, name, function)
    made = None
    if shadow is None and isinstance(function, FunctionType):
        made = _generated(type(connector), function, hooked, passed)
    wrapper = made or _general(connector, shadow, hooked, passed)
    if hooked.timed and hooked.hook.timed:
        wrapper = DEVICE.around_hook(wrapper, hooked)
    return wrapper, passed


def _shadow(connector: Any, name: str, function: Any) -> Any:
    """What stands in a hook's place on the connector itself; None for nothing. Its ``__dict__`` is asked for
    only where that must be: Python reads the attributes of an object faster as long as nobody has."""
    if isinstance(function, FunctionType):
        found = object.__getattribute__(connector, name)
        if isinstance(found, MethodType) and found.__func__ is function:
            return None
    return vars(connector).get(name) if hasattr(connector, "__dict__") else None


def _general(connector: Any, shadow: Any, hooked: Hooked, passed: Passed) -> Callable[..., Any]:
    name = hooked.hook.name
    record, needs = hook_records.recorder(hooked), hooked.hook.needs
    point = call.watch_point(hooked)
    found = _asking if name in ASKS else getattr

    @frames.internal
    def wrapper(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if passed.to is not None:
            return passed.to(*args, **kwargs)
        t0, method = clock(), None
        try:
            method = found(self, name)
            if point.off():
                result = method(*args, **kwargs)
            else:
                layer = hook_records.argument(args, kwargs, *needs[0]) if hooked.hook.layered else None
                own = HERE.own
                result = point.watched(its(self), method, layer, *args, **kwargs)
                t0 = min(t0 + HERE.own - own, clock())
        except BaseException as error:
            hook_records.raised(hooked, None, t0, error, method)
            frames.step_out(error)
            raise
        given = (hook_records.argument(args, kwargs, *which) for which in needs)
        record(t0, clock(), its(self), result, *given)
        return result

    frames.know(wrapper.__code__)
    functools.update_wrapper(wrapper, getattr(type(connector), name) if shadow is None else shadow)
    if shadow is not None:
        _show_bound(wrapper, shadow)
    return wrapper


def _show_bound(wrapper: Any, shadow: Any) -> None:
    """The signature of a function that takes no ``self``, for a wrapper that is bound."""
    signature = signature_of(shadow)
    if signature is not None:
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        rest = [p.replace(name="self_") if p.name == "self" else p for p in signature.parameters.values()]
        wrapper.__signature__ = signature.replace(parameters=[first, *rest])


def _asking(proxy: Any, name: str) -> Any:
    """The method of a connector that takes it from vLLM's base class: with the proxy as its ``self``."""
    connector = its(proxy)
    method = getattr(connector, name)
    function = getattr(method, "__func__", None)
    if getattr(function, "__module__", "") == _BASE and isinstance(function, FunctionType):
        return MethodType(function, proxy)
    return method


def _generated(
    base: type, function: FunctionType, hooked: Hooked, passed: Passed
) -> Callable[..., Any] | None:
    """The wrapper with the method's own signature; None where that has no place for what is needed."""
    hook = hooked.hook
    signature = signature_of(function)
    if signature is None or not _takes_what_is_given(base, hook.name, signature):
        return None
    needed = [argument for _, argument in hook.needs]
    point = call.watch_point(hooked)
    fills = _fills(hooked, signature, needed, point)
    names = {
        "_kvt_clock": clock,
        "_kvt_here": HERE,
        "_kvt_passed": passed,
        "_kvt_agent": AGENT,
        "_kvt_ids": AGENT.ids,
        "_kvt_ident": get_ident,
        "_kvt_side": AGENT.worker if hooked.role == Role.WORKER else AGENT.scheduler,
        "_kvt_heads": AGENT.threads.heads(pack_head(Kind.HOOK, hooked.role, hook.code, hooked.index)),
        "_kvt_record": hook_records.recorder(hooked),
        "_kvt_raised": functools.partial(hook_records.raised, hooked),
        "_kvt_step_out": frames.step_out,
        "_kvt_watched": point.watched,
        "_kvt_asking": _asking,
        **{f"_kvt_switch{at}": holder for at, (holder, _) in enumerate(point.switches)},
    }
    made = generate(function, _TEMPLATE, names, needed, fills)
    if made is None:
        return None
    frames.know(made.__code__, (hook.name, hooked.index))
    compiled = _compiled_call(hooked, passed, point)
    if compiled is None:
        return made
    names |= {"_kvt_begin": compiled.begin, "_kvt_end": compiled.end}
    names |= {"_kvt_begun": AGENT.compiled.begun, "_kvt_otherwise": made}
    faster = generate(function, _COMPILED, names, needed, fills)
    if faster is not None:
        frames.know(faster.__code__, (hook.name, hooked.index))
    return faster or made


def _compiled_call(hooked: Hooked, passed: Passed, point: call.WatchPoint) -> Any:
    """What reads the clock and adds the record of a hook's calls; None where that is for Python: no recorder
    in C, more to say, another place to look at."""
    hook = hooked.hook
    quiet = hook_records.QUIET.get(hook)
    of_outermost = hook.layered or (quiet is not None and quiet.outermost)
    more = quiet is None and not hook.layered and hook_records.has_detail(hook)
    if AGENT.compiled is None or more or (of_outermost and hooked.child):
        return None
    said: dict[str, Any] = {}
    if quiet is not None:
        said = {name: value for name, value in quiet._asdict().items() if value and name != "when"}
    if hook.layered:
        way = "load" if hook.direction == Flag.LOAD else "store"
        said = {"ids": AGENT.ids, "slots": f"{way}_slots", "entries": f"{way}_entries"}
        if hook is hooks.WAIT_LAYER:
            said["hooked"] = "hooked_layer"
    head = pack_head(Kind.HOOK, hooked.role, hook.code, hooked.index)
    side = AGENT.worker if hooked.role == Role.WORKER else AGENT.scheduler
    try:
        switches = ((passed, "to"), *point.switches)
        return AGENT.compiled.Call(AGENT, side, head, AGENT.threads, switches, **said)
    except (AttributeError, TypeError):
        return None  # a connector of the scheduler's has hooks of layers, and they no place


def _fills(
    hooked: Hooked, signature: inspect.Signature, needed: list[str], point: call.WatchPoint
) -> dict[str, str]:
    """What stands in the templates, but for the lists of parameters and arguments."""
    hook, self_name = hooked.hook, next(iter(signature.parameters))
    kinds = {parameter.kind: name for name, parameter in signature.parameters.items()}
    more = kinds.get(inspect.Parameter.VAR_KEYWORD)
    invoke = f"{self_name}.{hook.name}({{others}})"
    if hook.name in ASKS:
        invoke = f"_kvt_asking({self_name}, {hook.name!r})({{others}})"
    elif more and inspect.Parameter.VAR_POSITIONAL not in kinds:
        # Python calls a method faster where there is no dictionary to hand on.
        invoke = f"{self_name}.{hook.name}({{plain}}) if not {more} else {invoke}"
    layer = needed[0] if hook.layered else "None"
    template = _RECORD if hook_records.has_detail(hook) and not hook.layered else _SHORT_RECORD
    quiet = hook_records.QUIET.get(hook)
    return {
        "record": template,
        "quiet": _ENDS if quiet is None else _ENDS_QUIETLY,
        "when": quiet.when if quiet is not None else "",
        "first": needed[0] if needed else "",
        "columns": _columns(hooked),
        "after": "_kvt_side.hooked_layer = {layer}" if hook is hooks.WAIT_LAYER else "pass",
        "call": invoke,
        "self": self_name,
        "method": hook.name,
        "layer": layer,
        "told": ", ".join(("_kvt_at", *(needed if hook.layered else ()))),
        "seen": ", ".join(("_kvt_t0", "_kvt_t1", self_name, "_kvt_result", *needed)),
        "off": " and ".join(
            f"_kvt_switch{at}.{attribute} is None" for at, (_, attribute) in enumerate(point.switches)
        ) or "True",
    }  # fmt: skip


def _columns(hooked: Hooked) -> str:
    """The record's words from the layer on: ``layer, slots, entries, extra``."""
    if not hooked.hook.layered:
        return "0, -1, -1, 0"
    way = "load" if hooked.hook.direction == Flag.LOAD else "store"
    side = f"_kvt_side.of_children.get({hooked.index}, _kvt_side)" if hooked.child else "_kvt_side"
    return f"_kvt_ids[{{layer}}], {side}.{way}_slots, {side}.{way}_entries, 0"


def _takes_what_is_given(base: type, name: str, signature: inspect.Signature) -> bool:
    """Whether vLLM's calls fit the method: its parameters against those of the base class's method.

    A call that does not fit raises before the body of a wrapper with the same signature runs, and would
    go unseen.
    """
    first = next(cls for cls in reversed(base.__mro__) if name in cls.__dict__)
    expected = signature_of(first.__dict__[name])
    if expected is None:
        return False
    fixed = [p for p in expected.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    required = [p for p in fixed if p.default is p.empty]
    try:
        for given in (fixed, required):
            by_position = [p for p in given if p.kind is not p.KEYWORD_ONLY]
            by_name = {p.name: None for p in given if p.kind is p.KEYWORD_ONLY}
            signature.bind(*by_position, **by_name)
            signature.bind(None, **{p.name: None for p in given[1:]})
    except TypeError:
        return False
    return True
