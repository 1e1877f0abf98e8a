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
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from kvtrace.agent import config_keys, frames, logs, owners, swallowed, wrappers
from kvtrace.agent.connector_facts import fact_of, resolves
from kvtrace.agent.device import wanted
from kvtrace.agent.hook_records import PARENT_ATTRIBUTE, argument
from kvtrace.agent.site import INDEX_ATTRIBUTE, Site
from kvtrace.agent.state import AGENT, where_raised
from kvtrace.agent.watch import follow
from kvtrace.trace import hooks
from kvtrace.trace.facts import Connector
from kvtrace.trace.format import Role

_next_index = 1
_BASE_ATTRIBUTE = "_kvtrace_base"


def traced(
    connector: Any,
    role: Role,
    configured: str | None,
    parent: int | None = None,
    module_path: str | None = None,
) -> int:
    """Put the proxy around a live connector. Returns its index in this process, from 1.

    Idempotent; children of a MultiConnector-like connector follow. Never raises.
    """
    global _next_index
    try:
        already = getattr(connector, INDEX_ATTRIBUTE, None)
        if isinstance(already, int):
            return already
        index = _next_index
        # A record has eight bits for it, and 0 stands for none.
        _next_index += 2 if index & 0xFF == 0xFF else 1
        base = type(connector)
        fact = fact_of(connector, role, configured, parent, index)
        found = resolves(base, module_path, configured)
        proxy = _install(connector, base, role, index, parent)
        AGENT.fact(replace(fact, resolves=found, proxy=proxy), role)
        owners.register(connector, index)
        for child in _children(connector):
            traced(child, role, type(child).__name__, parent=index)
        return index
    except Exception:
        AGENT.failed("connector proxy")
        return 0


def creation_failed(role: Role, configured: str | None, error: BaseException) -> None:
    """Note that the factory, or the connector's constructor, raised."""
    fact = Connector(
        ordinal=0,
        role=role.name.lower(),
        configured=configured,
        ok=False,
        error_type=type(error).__name__,
        error=AGENT.said(error, 1000),
        where=where_raised(error),
        proxy="none",
    )
    AGENT.fact(fact, role)


def _children(connector: Any) -> list[Any]:
    children = getattr(connector, "_connectors", None)
    if not isinstance(children, (list, tuple)):
        return []
    return [child for child in children if callable(getattr(child, hooks.SAVE_LAYER.name, None))]


# --- the proxy ---------------------------------------------------------------------------


def _install(connector: Any, base: type, role: Role, index: int, parent: int | None) -> str:
    """Put the hooks' wrappers in place; returns how: "subclass" or "instance"."""
    child = parent is not None
    timed = role == Role.WORKER and not child and wanted()
    sites = {
        hook.name: Site(hook, role, index, child, timed)
        for hook in hooks.TABLE
        if callable(getattr(base, hook.name, None))
    }
    methods = {name: wrappers.of_class(base, site) for name, site in sites.items()}
    attributes = vars(connector) if hasattr(connector, "__dict__") else {}
    for name, site in sites.items():
        # An instance attribute shadows the class: wrap it where it stands.
        if name in attributes and callable(attributes[name]):
            attributes[name] = wrappers.of_instance(connector, attributes[name], site)
    try:
        marks = {INDEX_ATTRIBUTE: index, PARENT_ATTRIBUTE: parent}
        namespace = {**methods, **marks, "__reduce_ex__": _reduce_ex(base)}
        connector.__class__ = _subclass(base, namespace)
        return "subclass"
    except TypeError:
        pass
    for name, site in sites.items():
        if name not in attributes:
            setattr(connector, name, wrappers.of_instance(connector, getattr(connector, name), site))
    setattr(connector, INDEX_ATTRIBUTE, index)
    setattr(connector, PARENT_ATTRIBUTE, parent)
    return "instance"


class _Quiet:
    """Stands before a class while its subclass is made: the user's ``__init_subclass__`` is not for us."""

    def __init_subclass__(cls, **given: Any) -> None:
        return


def _subclass(base: type, namespace: dict[str, Any]) -> type:
    """A subclass that passes for ``base``: under its name, equal to it, and with ``base`` as the instances'
    ``__class__``. What is set on it is set on ``base``, where the user's code expects it."""
    kind: Any = type(base)
    before: list[type] = [_Quiet]

    class Meta(kind):  # type: ignore[misc]
        def mro(cls) -> list[type]:
            own, *others = type.mro(cls)
            return [own, *before, *others]

        def __new__(meta, *args: Any) -> Any:
            return type.__new__(meta, *args)

        def __init__(cls, *args: Any) -> None:
            type.__init__(cls, *args)

        def __setattr__(cls, name: str, value: Any) -> None:
            setattr(base, name, value)

        def __delattr__(cls, name: str) -> None:
            delattr(base, name)

        def __eq__(cls, other: Any) -> bool:
            return other is cls or other is base or getattr(other, _BASE_ATTRIBUTE, None) is base

        def __hash__(cls) -> int:
            return hash(base)

    def become(self: Any, cls: type) -> None:
        object.__dict__["__class__"].__set__(self, cls)

    named = {name: getattr(base, name, None) for name in ("__module__", "__qualname__", "__doc__")}
    passes = {"__class__": property(lambda self: base, become), _BASE_ATTRIBUTE: base}
    made: type = Meta(base.__name__, (base,), {**namespace, **named, **passes})
    before.clear()
    type.__setattr__(made, "__bases__", (base,))  # which asks for its mro again
    return made


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


# --- the factory --------------------------------------------------------------------------


def wrap_factory(module: ModuleType) -> None:
    """``KVConnectorFactory.create_connector``: see every connector that vLLM makes."""
    factory = module.KVConnectorFactory
    original = factory.__dict__["create_connector"].__func__

    @functools.wraps(original)
    def create_connector(cls: Any, *args: Any, **kwargs: Any) -> Any:
        role, configured, module_path = _creation(args, kwargs)
        keys = _before_creation(args, kwargs, role)
        try:
            connector = original(cls, *args, **kwargs)
        except BaseException as error:
            try:
                creation_failed(role, configured, error)
            except Exception:
                AGENT.failed("create_connector")
            frames.step_out(error)
            raise
        index = traced(connector, role, configured, module_path=module_path)
        config_keys.made(keys, index, connector)
        return connector

    code = getattr(create_connector, "__code__", None)
    if code is not None:
        frames.WRAPPERS[code] = ("create_connector", 0)
    factory.create_connector = classmethod(create_connector)


def _before_creation(args: tuple[Any, ...], kwargs: dict[str, Any], role: Role) -> Any:
    try:
        logs.install()
        swallowed.install_thread_hook()
        follow.begins()
        return config_keys.given(argument(args, kwargs, 0, "config"), role)
    except Exception:
        AGENT.failed("create_connector")
        return None


def _creation(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Role, str | None, str | None]:
    try:
        config, role = argument(args, kwargs, 0, "config"), argument(args, kwargs, 1, "role")
        transfer = getattr(config, "kv_transfer_config", None)
        configured = getattr(transfer, "kv_connector", None)
        module_path = getattr(transfer, "kv_connector_module_path", None)
        side = Role.SCHEDULER if getattr(role, "name", "") == "SCHEDULER" else Role.WORKER
        return side, configured, module_path
    except Exception:
        AGENT.failed("create_connector")
        return Role.WORKER, None, None
