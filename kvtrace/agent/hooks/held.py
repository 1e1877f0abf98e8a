"""Where vLLM holds connectors: the proxy is put there, also where one came past the factory.

Looked at when an engine is up, and before each step. What stands in the place of a connector that has a
proxy is left as it is: it may hand its calls on to that one, and they would be recorded twice. The report
says which hooks are not seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from weakref import ref

from kvtrace.agent.facts.connector_facts import own_hooks
from kvtrace.agent.facts.describe import get
from kvtrace.agent.hooks import connector
from kvtrace.agent.state import AGENT
from kvtrace.agent.wrap import proxy
from kvtrace.trace import hooks
from kvtrace.trace.facts import HOOKS, AgentErrorFact, ConnectorFact
from kvtrace.trace.format import Role

LATE = "vLLM got it past its factory; calls are seen from where kvtrace found it on, none before"
OTHER = "vLLM holds it in the place of the one that has a proxy; only calls that it hands on to that are seen"
INSIDE = "it came into vLLM's MultiConnector in a way that kvtrace does not follow; no call is seen"
NO_PROXY = "vLLM got it past its factory, and no proxy could be put in its place; no call is seen"

_settled: dict[Role, Callable[[], Any]] = dict.fromkeys((Role.SCHEDULER, Role.WORKER), lambda: None)
"""The connector found last that has a proxy and none inside it: of that a step asks no more."""


def of_scheduler(scheduler: Any) -> None:
    """What ``Scheduler`` calls."""
    _look(scheduler, "connector", Role.SCHEDULER, scheduler)


def of_worker(wrapper: Any) -> None:
    """What a worker calls: the process's connector, and the V2 runner's own reference to it."""
    state = sys.modules.get("vllm.distributed.kv_transfer.kv_transfer_state")
    seen = _look(state, "_KV_CONNECTOR_AGENT", Role.WORKER, wrapper)
    runner = getattr(getattr(wrapper, "worker", None), "model_runner", None)
    _look(getattr(runner, "kv_connector", None), "kv_connector", Role.WORKER, wrapper, seen)


def _look(holder: Any, name: str, role: Role, engine: Any, seen: Any = None) -> Any:
    """What stands there. ``seen``: looked at in this step already."""
    found = getattr(holder, name, None)
    if found is None or found is seen or found is _settled[role]():
        return found
    index = proxy.index_of(found)
    if index is None:
        _put(holder, name, found, role, get(engine, "vllm_config.kv_transfer_config"))
    children = connector.inside(found)
    if children is None and index is not None:
        _settled[role] = ref(found)
    for child in children or ():
        if proxy.index_of(child) is None:
            _say(child, role, INSIDE)
    return getattr(holder, name)


def _put(holder: Any, name: str, found: Any, role: Role, configured: Any) -> None:
    """The proxy in the place of a connector that has none there."""
    others = connector.others(found, role)
    if others:
        if _say(found, role, OTHER):
            for index in others:
                AGENT.fact(ConnectorFact(ordinal=index, proxy="none"), role)
    elif _key(found, role, NO_PROXY) not in AGENT.standing_facts:
        named, module = (getattr(configured, of, None) for of in ("kv_connector", "kv_connector_module_path"))
        made = connector.traced(found, role, named, module_path=module)
        setattr(holder, name, made)
        _say(found, role, NO_PROXY if proxy.index_of(getattr(holder, name)) is None else LATE)


def _key(found: Any, role: Role, why: str) -> tuple[int, object]:
    return int(AgentErrorFact.CODE), (type(found).__name__, role, why)


def _say(found: Any, role: Role, why: str) -> bool:
    """Once for a class, role and reason; whether it was the first time."""
    key = _key(found, role, why)
    if key in AGENT.standing_facts:
        return False
    own = [hook for hook in own_hooks(type(found)) if hooks.BY_NAME[hook].role == role]
    what = f"of {type(found).__name__} on the {role.name.lower()} ({', '.join(own) or 'none of its own'})"
    AGENT.fact(AgentErrorFact(HOOKS, f"{what}: {why}"), role, standing=key[1])
    return True
