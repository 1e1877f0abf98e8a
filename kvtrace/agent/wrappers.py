"""The wrapper of one hook: clock, call, clock, record.

It has the signature of the method that it stands for, and adds its record itself; the general one, with
``*args`` and ``**kwargs``, is for what that can't be spelt for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from kvtrace.agent import frames, hook_records
from kvtrace.agent.codegen import generate, signature_of
from kvtrace.agent.device import DEVICE
from kvtrace.agent.left import held
from kvtrace.agent.site import Site
from kvtrace.agent.state import AGENT, clock, get_ident
from kvtrace.agent.watch import call
from kvtrace.agent.watch.prints import PRINTS
from kvtrace.trace import hooks
from kvtrace.trace.format import Flag, Kind, Role, pack_head

# What every hook's wrapper does, with the signature of the method that it stands for.
_TEMPLATE = """
def _kvt_wrapper({parameters}):
    _kvt_t0 = _kvt_clock()
    try:
        if {off}:
            _kvt_result = _kvt_base.{method}({arguments})
        else:
            _kvt_result = _kvt_watched(_kvt_base.{method}, {layer}, {arguments})
    except BaseException as _kvt_error:
        _kvt_raised({layer}, _kvt_t0, _kvt_error)
        _kvt_step_out(_kvt_error)
        raise
    _kvt_t1 = _kvt_clock()
    {record}
    return _kvt_result
"""
_RECORD = "_kvt_record({seen})"
# Of most calls there is little to say, and layer hooks run 2 x layers times a step: no call but the
# one that adds the tuple.
_SHORT_RECORD = """try:
        _kvt_agent.add((
            _kvt_head | _kvt_threads[_kvt_ident()] << 48, _kvt_t0, _kvt_t1, _kvt_side.step, {columns},
        ))
        {after}
    except Exception:
        _kvt_record({seen})
"""


def of_class(base: type, site: Site) -> Callable[..., Any]:
    """The method of the proxy that stands for ``base``'s. Looks that up at each call: one that
    somebody patches on the class later still counts."""
    function = inspect.getattr_static(base, site.hook.name, None)
    made = _generated(base, function, site) if isinstance(function, FunctionType) else None
    return _looked(_timed(made or _general(base, function, site), site), site)


def _general(base: type, function: Any, site: Site) -> Callable[..., Any]:
    name = site.hook.name
    record, needs = hook_records.recorder(site), site.hook.needs
    point = call.watch_point(site)
    plain = isinstance(function, FunctionType)

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        t0 = clock()
        try:
            method = getattr(base, name)
            if not plain:
                result = function.__get__(self, base)(*args, **kwargs)
            elif point.off():
                result = method(self, *args, **kwargs)
            else:
                result = point.watched(method, None, self, *args, **kwargs)
        except BaseException as error:
            hook_records.raised(site, None, t0, error)
            frames.step_out(error)
            raise
        given = (hook_records.argument(args, kwargs, *which) for which in needs)
        record(t0, clock(), self, result, *given)
        return result

    frames.WRAPPERS[wrapper.__code__] = None
    return functools.update_wrapper(wrapper, getattr(base, name))


def of_instance(connector: Any, method: Any, site: Site) -> Callable[..., Any]:
    """The attribute of the instance that stands for its bound ``method``."""
    record, needs = hook_records.recorder(site), site.hook.needs
    point = call.watch_point(site, connector)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        t0 = clock()
        try:
            if point.off():
                result = method(*args, **kwargs)
            else:
                layer = hook_records.argument(args, kwargs, *needs[0]) if site.hook.layered else None
                result = point.watched(method, layer, *args, **kwargs)
        except BaseException as error:
            hook_records.raised(site, None, t0, error)
            frames.step_out(error)
            raise
        given = (hook_records.argument(args, kwargs, *which) for which in needs)
        record(t0, clock(), connector, result, *given)
        return result

    frames.WRAPPERS[wrapper.__code__] = None
    return _looked(_timed(functools.update_wrapper(wrapper, method), site), site, connector)


def _looked(wrapper: Callable[..., Any], site: Site, connector: Any = None) -> Callable[..., Any]:
    """What the connector holds is looked at when it is shut down. ``connector``: where it is no argument."""
    if site.hook is not hooks.SHUTDOWN or site.role != Role.WORKER:
        return wrapper

    def shutdown(*args: Any, **kwargs: Any) -> Any:
        its = args[0] if connector is None and args else connector
        held.look(its, site.index)
        try:
            return wrapper(*args, **kwargs)
        except BaseException as error:
            frames.step_out(error)
            raise
        finally:
            PRINTS.ends()
            held.look(its, site.index)

    frames.WRAPPERS[shutdown.__code__] = None
    return functools.update_wrapper(shutdown, wrapper)


def _timed(wrapper: Callable[..., Any], site: Site) -> Callable[..., Any]:
    return DEVICE.around_hook(wrapper, site) if site.timed and site.hook.timed else wrapper


def _generated(base: type, function: FunctionType, site: Site) -> Callable[..., Any] | None:
    """The wrapper with the method's own signature; None where that has no place for what is needed."""
    hook = site.hook
    signature = signature_of(function)
    if signature is None or not _takes_what_is_given(base, hook.name, signature):
        return None
    needed = [argument for _, argument in hook.needs]
    point = call.watch_point(site)
    source = _source(site, next(iter(signature.parameters)), needed, point)
    names = {
        "_kvt_clock": clock,
        "_kvt_base": base,
        "_kvt_agent": AGENT,
        "_kvt_ids": AGENT.ids,
        "_kvt_threads": AGENT.threads,
        "_kvt_ident": get_ident,
        "_kvt_side": AGENT.worker if site.role == Role.WORKER else AGENT.scheduler,
        "_kvt_head": pack_head(Kind.HOOK, site.role, hook.code, site.index),
        "_kvt_record": hook_records.recorder(site),
        "_kvt_raised": functools.partial(hook_records.raised, site),
        "_kvt_step_out": frames.step_out,
        "_kvt_watched": point.watched,
        **{f"_kvt_switch{at}": holder for at, (holder, _) in enumerate(point.switches)},
    }
    made = generate(function, source, names, needs=tuple(needed))
    if made is not None:
        frames.WRAPPERS[made.__code__] = (hook.name, site.index)
    return made


def _source(site: Site, self_name: str, needed: list[str], point: call.WatchPoint) -> str:
    """The template with everything filled in but the lists of parameters and arguments."""
    hook = site.hook
    layer = needed[0] if hook.layered else "None"
    template = _RECORD if hook_records.has_detail(hook) and not hook.layered else _SHORT_RECORD
    fills = {
        "record": template,
        "columns": _columns(site),
        "after": "_kvt_side.hooked_layer = {layer}" if hook is hooks.WAIT_LAYER else "pass",
        "method": hook.name,
        "layer": layer,
        "seen": ", ".join(("_kvt_t0", "_kvt_t1", self_name, "_kvt_result", *needed)),
        "off": " and ".join(
            f"_kvt_switch{at}.{attribute} is None" for at, (_, attribute) in enumerate(point.switches)
        ) or "True",
    }  # fmt: skip
    source = _TEMPLATE
    for field, text in fills.items():
        source = source.replace(f"{{{field}}}", text)
    return source


def _columns(site: Site) -> str:
    """The record's words from the layer on: ``layer, slots, entries, extra``."""
    if not site.hook.layered:
        return "0, -1, -1, 0"
    way = "load" if site.hook.direction == Flag.LOAD else "store"
    side = f"_kvt_side.of_children.get({site.index}, _kvt_side)" if site.child else "_kvt_side"
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
