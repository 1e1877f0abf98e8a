"""Every hook call of the user's connector, in both roles: where the proxy is put.

vLLM gets a proxy (``wrap/proxy.py``) where it takes a connector from its factory, and where its
MultiConnector keeps those inside it. What vLLM calls is seen; what a connector calls on itself is its own
business.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from types import ModuleType
from typing import Any
from weakref import WeakValueDictionary

from kvtrace.agent.code import owners
from kvtrace.agent.code.traces import type_name
from kvtrace.agent.errors import logs, startup, swallowed
from kvtrace.agent.facts import config_keys
from kvtrace.agent.facts.connector_facts import fact_of, resolves
from kvtrace.agent.hooks import wrappers
from kvtrace.agent.hooks.device import wanted
from kvtrace.agent.hooks.hook_records import argument
from kvtrace.agent.state import AGENT, where_raised
from kvtrace.agent.watch import background
from kvtrace.agent.wrap import frames, proxy
from kvtrace.agent.wrap.hooked import Hooked
from kvtrace.trace import hooks
from kvtrace.trace.facts import ConnectorFact
from kvtrace.trace.format import Role

_next_index = 1
_outermost: WeakValueDictionary[tuple[Role, int], Any] = WeakValueDictionary()
"""(role, id of a connector) -> its proxy, as long as somebody holds that, which holds the connector."""


def traced(
    connector: Any,
    role: Role,
    configured: str | None,
    parent: int | None = None,
    module_path: str | None = None,
) -> Any:
    """What vLLM is to hold in the place of a connector: its proxy, or itself where that could not be made.

    Idempotent; those inside a MultiConnector follow. Never raises.
    """
    global _next_index
    if proxy.index_of(connector) is not None:
        return connector
    known = _outermost.get((role, id(connector)))
    if known is not None:
        return known
    try:
        index = _next_index
        # A record has eight bits for it, and 0 stands for none.
        _next_index += 2 if index & 0xFF == 0xFF else 1
        cls = type(connector)
        fact = fact_of(connector, role, configured, parent, index)
        found = resolves(cls, module_path, configured)
        made = proxy.make(connector, index, _hooks(connector, role, index, parent), wrappers.ASKS)
        AGENT.fact(replace(fact, resolves=found, proxy="object"), role)
        owners.register(connector, index)
        _trace_inside(connector, role, index)
        if parent is None:
            _outermost[role, id(connector)] = made
        return made
    except Exception:
        AGENT.failed("connector proxy")
        return connector


def creation_failed(role: Role, configured: str | None, error: BaseException) -> None:
    """Note that the factory, or the connector's constructor, raised."""
    fact = ConnectorFact(
        ordinal=0,
        role=role.name.lower(),
        configured=configured,
        ok=False,
        error_type=type_name(error),
        error=startup.said(error),
        where=where_raised(error),
        proxy="none",
    )
    AGENT.fact(fact, role)


def others(connector: Any, role: Role) -> list[int]:
    """Indexes of connectors that have a proxy for vLLM to call in this process, where this one has none."""
    if (role, id(connector)) in _outermost:
        return []
    return [proxy.index_of(one) or 0 for (side, _), one in list(_outermost.items()) if side == role]


def inside(connector: Any) -> Any:
    """Those that vLLM's MultiConnector makes past the factory, where it keeps them; None of any other
    connector: what that holds is its own."""
    own = proxy.its(connector)
    for cls in type(own).__mro__:
        if cls.__name__ == "MultiConnector" and cls.__module__.startswith("vllm."):
            held = getattr(own, "_connectors", None) or ()
            return held.values() if isinstance(held, dict) else held
    return None


def _trace_inside(connector: Any, role: Role, index: int) -> None:
    held = inside(connector)
    if isinstance(held, list):
        held[:] = [traced(child, role, type(child).__name__, parent=index) for child in held]


def _hooks(connector: Any, role: Role, index: int, parent: int | None) -> dict[str, proxy.Make]:
    child = parent is not None
    timed = role == Role.WORKER and not child and wanted()
    return {
        hook.name: functools.partial(wrappers.wrapper_of, Hooked(hook, role, index, child, timed))
        for hook in hooks.TABLE
        if callable(getattr(type(connector), hook.name, None))
    }


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
        made = traced(connector, role, configured, module_path=module_path)
        config_keys.made(keys, proxy.index_of(made) or 0, connector)
        return made

    code = getattr(create_connector, "__code__", None)
    if code is not None:
        frames.know(code, ("create_connector", 0))
    factory.create_connector = classmethod(create_connector)


def _before_creation(args: tuple[Any, ...], kwargs: dict[str, Any], role: Role) -> Any:
    try:
        logs.install()
        swallowed.install_thread_hook()
        background.begins()
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
