"""The wrapper of one hook: clock, call, clock, record.

It has the signature of the method that it stands for, and adds its record itself; the general one, with
``*args`` and ``**kwargs``, is for what that can't be spelt for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

from kvtrace.agent import effect, hooks, logs
from kvtrace.agent.codegen import generate, signature_of
from kvtrace.agent.device import DEVICE
from kvtrace.agent.device import HOOKS as TIMED_HOOKS
from kvtrace.agent.state import AGENT, clock, get_ident
from kvtrace.trace.format import HOOK_CODE, Kind, Role, pack_head

# What every hook's wrapper does, with the signature of the method that it stands for.
_TEMPLATE = """
def _kvt_wrapper({parameters}):
    _kvt_t0 = _kvt_clock()
    try:
        if {shut}:
            _kvt_result = _kvt_base.{method}({arguments})
        else:
            _kvt_result = _kvt_watched(_kvt_base.{method}, {layer}, {arguments})
    except BaseException as _kvt_error:
        _kvt_raised({layer}, _kvt_t0, _kvt_error)
        raise
    _kvt_t1 = _kvt_clock()
    {record}
    return _kvt_result
"""
_RECORD = "_kvt_record({told})"
# Of most calls there is little to say, and layer hooks run 2 x layers times a step: no call but the
# one that adds the tuple.
_SHORT_RECORD = """try:
        _kvt_agent.add((
            _kvt_head | _kvt_threads[_kvt_ident()] << 48, _kvt_t0, _kvt_t1, _kvt_side.step, {columns},
        ))
        {after}
    except Exception:
        _kvt_record({told})
"""
_PLAIN = ("0, -1, -1, 0", "pass")
# hook -> (layer, slots, entries, extra; statement after the record)
_LAYER_SIDE = {
    "wait_for_layer_load": (
        "_kvt_ids[{layer}], _kvt_side.load_slots, _kvt_side.load_entries, 0",
        "_kvt_side.hooked_layer = {layer}",
    ),
    "save_kv_layer": ("_kvt_ids[{layer}], _kvt_side.store_slots, _kvt_side.store_entries, 0", "pass"),
}


class Hook(NamedTuple):
    """One hook of one connector."""

    name: str
    role: Role
    lane: int
    child: bool
    """Whether the connector is inside another one."""
    timed: bool
    """Whether its device times may be taken."""


def of_class(base: type, hook: Hook) -> Callable[..., Any]:
    """The method of the proxy that stands for ``base``'s. Looks that up at each call: one that
    somebody patches on the class later still counts."""
    function = inspect.getattr_static(base, hook.name, None)
    made = _generated(base, function, hook) if isinstance(function, FunctionType) else None
    return _timed(made or _general(base, function, hook), hook)


def _general(base: type, function: Any, hook: Hook) -> Callable[..., Any]:
    name, role, lane, child, _ = hook
    record = hooks.recorder(name, role, lane, child)
    gate = effect.gate(name, role, lane)
    plain = isinstance(function, FunctionType)
    wanted_arguments = hooks.arguments(name)

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        t0 = clock()
        try:
            method = getattr(base, name)
            if not plain:
                result = function.__get__(self, base)(*args, **kwargs)
            elif gate.shut():
                result = method(self, *args, **kwargs)
            else:
                result = gate.watched(method, None, self, *args, **kwargs)
        except BaseException as error:
            hooks.raised(name, role, lane, None, t0, error)
            raise
        given = (hooks.argument(args, kwargs, *which) for which in wanted_arguments)
        record(t0, clock(), self, result, *given)
        return result

    logs.FRAMES[wrapper.__code__] = None
    return functools.update_wrapper(wrapper, getattr(base, name))


def of_instance(connector: Any, method: Any, hook: Hook) -> Callable[..., Any]:
    """The attribute of the instance that stands for its bound ``method``."""
    name, role, lane, child, _ = hook
    record = hooks.recorder(name, role, lane, child)
    gate = effect.gate(name, role, lane, connector)
    wanted_arguments = hooks.arguments(name)
    layered = name in _LAYER_SIDE

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        t0 = clock()
        try:
            if gate.shut():
                result = method(*args, **kwargs)
            else:
                layer = hooks.argument(args, kwargs, 0, "layer_name") if layered else None
                result = gate.watched(method, layer, *args, **kwargs)
        except BaseException as error:
            hooks.raised(name, role, lane, None, t0, error)
            raise
        given = (hooks.argument(args, kwargs, *which) for which in wanted_arguments)
        record(t0, clock(), connector, result, *given)
        return result

    logs.FRAMES[wrapper.__code__] = None
    return _timed(functools.update_wrapper(wrapper, method), hook)


def _timed(wrapper: Callable[..., Any], hook: Hook) -> Callable[..., Any]:
    if not hook.timed or hook.name not in TIMED_HOOKS:
        return wrapper
    around = DEVICE.around_layer if hook.name in _LAYER_SIDE else DEVICE.around
    return around(wrapper, HOOK_CODE[hook.name], hook.lane)


def _generated(base: type, function: FunctionType, hook: Hook) -> Callable[..., Any] | None:
    """The wrapper with the method's own signature; None where that has no place for what is needed."""
    name, role, lane, child, _ = hook
    signature = signature_of(function)
    if signature is None or not _takes_what_is_given(base, name, signature):
        return None
    needed = [argument for _, argument in hooks.arguments(name)]
    spelt = [next(iter(signature.parameters)), *needed]
    layer = spelt[1] if name in _LAYER_SIDE else "None"
    columns, after = _LAYER_SIDE.get(name, _PLAIN)
    template = _RECORD if hooks.has_detail(name) and name not in _LAYER_SIDE else _SHORT_RECORD
    template = template.replace("{columns}", columns).replace("{after}", after)
    gate = effect.gate(name, role, lane)
    told = ", ".join(("_kvt_t0", "_kvt_t1", spelt[0], "_kvt_result", *spelt[1:]))
    shut = [f"_kvt_place{at}.{attribute} is None" for at, (_, attribute) in enumerate(gate.places)]
    source = _TEMPLATE.replace("{record}", template)
    source = source.replace("{method}", name).replace("{layer}", layer).replace("{told}", told)
    source = source.replace("{shut}", " and ".join(shut) or "True")
    names = {
        "_kvt_clock": clock,
        "_kvt_base": base,
        "_kvt_agent": AGENT,
        "_kvt_ids": AGENT.ids,
        "_kvt_threads": AGENT.threads,
        "_kvt_ident": get_ident,
        "_kvt_side": AGENT.worker if role == Role.WORKER else AGENT.scheduler,
        "_kvt_head": pack_head(Kind.HOOK, role, HOOK_CODE[name], lane),
        "_kvt_record": hooks.recorder(name, role, lane, child),
        "_kvt_raised": functools.partial(hooks.raised, name, role, lane),
        "_kvt_watched": gate.watched,
        **{f"_kvt_place{at}": holder for at, (holder, _) in enumerate(gate.places)},
    }
    made = generate(function, source, names, needs=tuple(needed))
    if made is not None:
        logs.FRAMES[made.__code__] = (name, lane)
    return made


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
