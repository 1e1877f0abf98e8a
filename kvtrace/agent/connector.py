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
from kvtrace.agent.codegen import generate
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
    methods = {name: _wrapper(base, name, role, lane) for name in names}
    if timed:
        methods.update({name: _timed(methods[name], name, lane) for name in names if name in TIMED_HOOKS})
    own = vars(connector) if hasattr(connector, "__dict__") else {}
    for name in names:
        # An instance attribute shadows the class: wrap it where it stands.
        if name in own and callable(own[name]):
            own[name] = _instance_wrapper(connector, own[name], name, role, lane, timed)
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
            setattr(connector, name, _instance_wrapper(connector, method, name, role, lane, timed))
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


# Layer hooks run 2 x layers times a step: all in one generated function, one tuple.
_LAYER_TEMPLATE = """
def _kvt_wrapper({parameters}):
    _kvt_t0 = _kvt_clock()
    try:
        if _kvt_worker.{sample} is None:
            _kvt_result = _kvt_base.{method}({arguments})
        else:
            _kvt_result = _kvt_sampled(_kvt_base.{method}, layer_name, {arguments})
    except BaseException as _kvt_error:
        _kvt_raised(_kvt_t0, layer_name, _kvt_error)
        raise
    _kvt_t1 = _kvt_clock()
    try:
        _kvt_agent.add((
            _kvt_head | _kvt_threads[_kvt_ident()] << 48, _kvt_t0, _kvt_t1, _kvt_worker.step,
            _kvt_ids[layer_name], _kvt_worker.{slots}, _kvt_worker.{entries}, 0,
        ))
    except Exception:
        _kvt_slow(_kvt_t0, _kvt_t1, layer_name)
    {after}
    return _kvt_result
"""


def _wrapper(base: type, name: str, role: Role, lane: int) -> Callable[..., Any]:
    function = inspect.getattr_static(base, name, None)
    if isinstance(function, FunctionType) and name in _LAYER_SIDE:
        made = _layer_wrapper(base, function, name, lane)
        if made is not None:
            return made
    record = hooks.recorder(name, role, lane)
    # Looked up at each call: a method that somebody patches on the class later still counts.
    plain = isinstance(function, FunctionType)
    gate, attribute, watched = effect.gate(name, role, lane)

    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        t0 = clock()
        try:
            method = getattr(base, name)
            if not plain:
                result = function.__get__(self, base)(*args, **kwargs)
            elif getattr(gate, attribute) is None:
                result = method(self, *args, **kwargs)
            else:
                result = watched(method, None, self, *args, **kwargs)
        except BaseException as error:
            hooks.raised(name, role, lane, t0, None, error)
            raise
        record(t0, clock(), self, args, kwargs, result)
        return result

    logs.FRAMES[wrapper.__code__] = None
    return functools.update_wrapper(wrapper, getattr(base, name))


def _instance_wrapper(
    connector: Any, method: Any, name: str, role: Role, lane: int, timed: bool
) -> Callable[..., Any]:
    record = hooks.recorder(name, role, lane)
    gate, attribute, watched = effect.gate(name, role, lane, connector)
    layered = name in _LAYER_SIDE

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        t0 = clock()
        try:
            if getattr(gate, attribute) is None:
                result = method(*args, **kwargs)
            else:
                layer = hooks.argument(args, kwargs, 0, "layer_name") if layered else None
                result = watched(method, layer, *args, **kwargs)
        except BaseException as error:
            hooks.raised(name, role, lane, t0, None, error)
            raise
        record(t0, clock(), connector, args, kwargs, result)
        return result

    logs.FRAMES[wrapper.__code__] = None
    made = functools.update_wrapper(wrapper, method)
    return _timed(made, name, lane) if timed and name in TIMED_HOOKS else made


# hook -> (slots, entries, what samples it, statement after the record)
_LAYER_SIDE = {
    "wait_for_layer_load": (
        "load_slots",
        "load_entries",
        "sample_load",
        "_kvt_worker.hooked_layer = layer_name",
    ),
    "save_kv_layer": ("store_slots", "store_entries", "sample_store", "pass"),
}


def _layer_wrapper(
    base: type, function: Callable[..., Any], name: str, lane: int
) -> Callable[..., Any] | None:
    slots, entries, sample, after = _LAYER_SIDE[name]
    head = pack_head(Kind.HOOK, Role.WORKER, HOOK_CODE[name], lane)
    worker = AGENT.worker

    def slow(t0: int, t1: int, layer_name: Any) -> None:
        try:
            layer = str(layer_name)
            AGENT.add(
                (
                    head | AGENT.thread() << 48,
                    t0,
                    t1,
                    worker.step,
                    AGENT.id(layer),
                    getattr(worker, slots),
                    getattr(worker, entries),
                    0,
                )
            )
        except Exception:
            AGENT.failed(name)

    def raised(t0: int, layer_name: Any, error: BaseException) -> None:
        hooks.raised(name, Role.WORKER, lane, t0, str(layer_name), error)

    template = (
        _LAYER_TEMPLATE.replace("{method}", name)
        .replace("{slots}", slots)
        .replace("{entries}", entries)
        .replace("{after}", after)
        .replace("{sample}", sample)
    )
    names = {
        "_kvt_clock": clock,
        "_kvt_base": base,
        "_kvt_agent": AGENT,
        "_kvt_ids": AGENT.ids,
        "_kvt_threads": AGENT.threads,
        "_kvt_ident": get_ident,
        "_kvt_worker": worker,
        "_kvt_head": head,
        "_kvt_slow": slow,
        "_kvt_raised": raised,
        "_kvt_sampled": effect.gate(name, Role.WORKER, lane)[2],
    }
    made = generate(function, template, names, needs=("layer_name",))
    if made is not None:
        logs.FRAMES[made.__code__] = (name, lane)
    return made


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
