"""The connector proxy: every hook call of the user's connector, in both roles.

The instance stays the user's. Its class is exchanged for a subclass made at run time
(same name, module and qualified name), so ``isinstance`` with ``KVConnectorBase_V1``,
``SupportsHMA``, class methods and pickling stay true, the factory's checks by name and by
constructor signature never see us, and children that MultiConnector builds past the
factory are covered the same way. Where the class can't be exchanged (``__slots__``), the
hooks are wrapped on the instance.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from kvtrace.agent import config_keys, effect, hooks, logs, owners, swallowed
from kvtrace.agent.codegen import generate, signature_of
from kvtrace.agent.connector_facts import describe, resolves
from kvtrace.agent.device import DEVICE, wanted
from kvtrace.agent.device import HOOKS as TIMED_HOOKS
from kvtrace.agent.state import AGENT, clock, get_ident, where_raised
from kvtrace.trace.format import (
    HOOK_CODE,
    HOOKS,
    Fact,
    Kind,
    Role,
    pack_head,
)
from kvtrace.trace.mask import mask_text

_MARK = hooks.LANE_ATTRIBUTE
_PARENT = hooks.PARENT_ATTRIBUTE

_next_lane = 1


def traced(
    connector: Any,
    role: Role,
    configured: str | None,
    parent: int | None = None,
    module_path: str | None = None,
) -> int:
    """Put the proxy around a live connector. Returns its ordinal in this process.

    Idempotent; children of a MultiConnector-like connector follow. Never raises.
    """
    global _next_lane
    try:
        already = getattr(connector, _MARK, None)
        if isinstance(already, int):
            return already
        lane, _next_lane = _next_lane, _next_lane + 1
        base = type(connector)
        names = [name for name in HOOKS if name and callable(getattr(base, name, None))]
        fact = describe(connector, base, role, configured, parent, lane)
        fact["resolves"] = resolves(base, module_path, configured)
        fact["proxy"] = _install(connector, base, names, role, lane, parent)
        AGENT.fact(Fact.CONNECTOR, fact, role)
        owners.register(connector, lane)
        for child in _children(connector):
            traced(child, role, type(child).__name__, parent=lane)
        return lane
    except Exception:
        AGENT.failed("connector proxy")
        return 0


def creation_failed(role: Role, configured: str | None, error: BaseException) -> None:
    """Note that the factory, or the connector's constructor, raised."""
    AGENT.fact(
        Fact.CONNECTOR,
        {
            "ordinal": 0,
            "role": role.name.lower(),
            "parent": None,
            "configured": configured,
            "class": "",
            "module": "",
            "file": "",
            "ok": False,
            "error_type": type(error).__name__,
            "error": mask_text(str(error))[:1000],
            "where": where_raised(error),
            "proxy": "none",
            "noop": [],
            "overrides": [],
            "ints": {},
            "engine_tag": None,
        },
        role,
    )


def _children(connector: Any) -> list[Any]:
    children = getattr(connector, "_connectors", None)
    if not isinstance(children, (list, tuple)):
        return []
    return [child for child in children if callable(getattr(child, "save_kv_layer", None))]


# --- the proxy ---------------------------------------------------------------------------


def _install(connector: Any, base: type, names: list[str], role: Role, lane: int, parent: int | None) -> str:
    timed = role == Role.WORKER and parent is None and wanted()
    methods = {name: _wrapper(base, name, role, lane, parent is not None) for name in names}
    if timed:
        methods.update({name: _timed(methods[name], name, lane) for name in names if name in TIMED_HOOKS})
    own = vars(connector) if hasattr(connector, "__dict__") else {}
    for name in names:
        # An instance attribute shadows the class: wrap it where it stands.
        if name in own and callable(own[name]):
            own[name] = _instance_wrapper(connector, own[name], name, role, lane, parent, timed)
    try:
        namespace = {**methods, _MARK: lane, _PARENT: parent, "__reduce_ex__": _reduce_ex(base)}
        subclass = type(base)(base.__name__, (base,), namespace)
        for attribute in ("__module__", "__qualname__", "__doc__"):
            setattr(subclass, attribute, getattr(base, attribute, None))
        connector.__class__ = subclass
        return "subclass"
    except TypeError:
        pass
    for name in names:
        if name not in own:
            method = getattr(connector, name)
            setattr(connector, name, _instance_wrapper(connector, method, name, role, lane, parent, timed))
    setattr(connector, _MARK, lane)
    setattr(connector, _PARENT, parent)
    return "instance"


def _timed(wrapper: Callable[..., Any], name: str, lane: int) -> Callable[..., Any]:
    around = DEVICE.around_layer if name in _LAYER_SIDE else DEVICE.around
    return around(wrapper, HOOK_CODE[name], lane)


def _reduce_ex(base: type) -> Callable[[Any, Any], Any]:
    """Pickle the instance as one of the user's class: ours can't be found by name."""

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        ours = type(self)
        reduced = super(ours, self).__reduce_ex__(protocol)
        if not isinstance(reduced, tuple) or len(reduced) < 2:
            return reduced
        args = tuple(base if item is ours else item for item in reduced[1])
        made = base if reduced[0] is ours else reduced[0]
        if made is copyreg.__newobj__:  # type: ignore[attr-defined]
            # It insists on the instance's own class; __new__ called by name does not.
            made = base.__new__
        return (made, args, *reduced[2:])

    return __reduce_ex__


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


def _wrapper(base: type, name: str, role: Role, lane: int, child: bool) -> Callable[..., Any]:
    """The method of the proxy that stands for ``base``'s. Looks that up at each call: one that
    somebody patches on the class later still counts."""
    function = inspect.getattr_static(base, name, None)
    record = hooks.recorder(name, role, lane, child)
    gate = effect.gate(name, role, lane)
    if isinstance(function, FunctionType):
        made = _generated(base, function, name, role, lane, gate, record)
        if made is not None:
            return made
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


def _instance_wrapper(
    connector: Any, method: Any, name: str, role: Role, lane: int, parent: int | None, timed: bool
) -> Callable[..., Any]:
    record = hooks.recorder(name, role, lane, parent is not None)
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
    made = functools.update_wrapper(wrapper, method)
    return _timed(made, name, lane) if timed and name in TIMED_HOOKS else made


def _generated(
    base: type,
    function: FunctionType,
    name: str,
    role: Role,
    lane: int,
    gate: effect.Gate,
    record: hooks.Record,
) -> Callable[..., Any] | None:
    """The wrapper with the method's own signature; None where that has no place for what is needed."""
    signature = signature_of(function)
    if signature is None or not _takes_what_is_given(base, name, signature):
        return None
    needed = [argument for _, argument in hooks.arguments(name)]
    if any(argument not in signature.parameters for argument in needed):
        return None
    spelt = [next(iter(signature.parameters)), *needed]
    layer = spelt[1] if name in _LAYER_SIDE else "None"
    columns, after = _LAYER_SIDE.get(name, _PLAIN)
    template = _RECORD if hooks.has_detail(name) and name not in _LAYER_SIDE else _SHORT_RECORD
    template = template.replace("{columns}", columns).replace("{after}", after)
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
        "_kvt_record": record,
        "_kvt_raised": functools.partial(hooks.raised, name, role, lane),
        "_kvt_watched": gate.watched,
        **{f"_kvt_place{at}": holder for at, (holder, _) in enumerate(gate.places)},
    }
    made = generate(function, source, names)
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


# --- the factory --------------------------------------------------------------------------


def wrap_factory(module: ModuleType) -> None:
    """``KVConnectorFactory.create_connector``: see every connector that vLLM makes."""
    factory = module.KVConnectorFactory
    original = factory.__dict__["create_connector"].__func__

    @functools.wraps(original)
    def create_connector(cls: Any, *args: Any, **kwargs: Any) -> Any:
        role, configured, module_path = _creation(args, kwargs)
        noted = _before_creation(args, kwargs, role)
        try:
            connector = original(cls, *args, **kwargs)
        except BaseException as error:
            try:
                creation_failed(role, configured, error)
            except Exception:
                AGENT.failed("create_connector")
            raise
        lane = traced(connector, role, configured, module_path=module_path)
        config_keys.made(noted, lane)
        return connector

    code = getattr(create_connector, "__code__", None)
    if code is not None:
        logs.FRAMES[code] = ("create_connector", 0)
    factory.create_connector = classmethod(create_connector)


def _before_creation(args: tuple[Any, ...], kwargs: dict[str, Any], role: Role) -> Any:
    try:
        logs.install()
        swallowed.install_thread_hook()
        return config_keys.note_reads(hooks.argument(args, kwargs, 0, "config"), role)
    except Exception:
        AGENT.failed("create_connector")
        return None


def _creation(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Role, str | None, str | None]:
    try:
        config, role = hooks.argument(args, kwargs, 0, "config"), hooks.argument(args, kwargs, 1, "role")
        transfer = getattr(config, "kv_transfer_config", None)
        configured = getattr(transfer, "kv_connector", None)
        module_path = getattr(transfer, "kv_connector_module_path", None)
        side = Role.SCHEDULER if getattr(role, "name", "") == "SCHEDULER" else Role.WORKER
        return side, configured, module_path
    except Exception:
        AGENT.failed("create_connector")
        return Role.WORKER, None, None
