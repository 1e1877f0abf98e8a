"""What can be known of a connector without calling it: class, file, hooks that do nothing."""

from __future__ import annotations

import copy
import dis
import functools
import sys
from types import CodeType, FunctionType, ModuleType
from typing import Any

from kvtrace.agent.code.attributes import attributes
from kvtrace.agent.facts.describe import get
from kvtrace.trace import hooks
from kvtrace.trace.facts import UNIT_NAME, ConnectorFact
from kvtrace.trace.format import Role

_MAX_INTS = 32


def fact_of(
    connector: Any, role: Role, configured: str | None, parent: int | None, index: int
) -> ConnectorFact:
    """The fact of a connector that has no proxy yet.

    Args:
        configured: the name under which it was asked for.
        parent: index of the connector that it is inside of.
        index: its index in this process.
    """
    base = type(connector)
    return ConnectorFact(
        ordinal=index,
        role=role.name.lower(),
        parent=parent,
        configured=configured,
        cls=base.__name__,
        module=base.__module__,
        file=getattr(sys.modules.get(base.__module__), "__file__", None) or "",
        ok=True,
        noop=tuple(name for name in hooks.NAMES if _idles(connector, name)),
        overrides=own_hooks(base),
        ints=_integers(connector),
        requires_piecewise=says_piecewise(
            base, get(connector, "_kv_transfer_config.kv_connector_extra_config")
        ),
    )


def resolves(live: type, module_path: str | None, name: str | None) -> bool | None:
    """Whether the class of this name in the configured module is the live one. None without a module.

    vLLM's factory (``distributed/kv_transfer/kv_connector/factory.py``) asks the module first in
    0.32.0; where the registry comes first, a bundled class of the same name is live instead.
    """
    if not module_path or not name:
        return None
    return getattr(sys.modules.get(module_path), name, None) is live


def says_piecewise(base: type, extra: Any) -> bool | None:
    """``requires_piecewise_for_cudagraph`` (0.17.1+), a pure class method, asked with a copy; None: not
    known."""
    ask = getattr(base, "requires_piecewise_for_cudagraph", None)
    if ask is None:
        return None
    try:
        return bool(ask(copy.deepcopy(extra) if isinstance(extra, dict) else {}))
    except Exception:
        return None


def own_hooks(base: type) -> tuple[str, ...]:
    """Hooks that a connector's class, and not vLLM's base class, defines."""
    definers = {name: cls.__name__ for cls in reversed(base.__mro__) for name in vars(cls)}
    theirs = ("KVConnectorBase_V1", "KVConnectorBase", "SupportsHMA")
    return tuple(name for name in hooks.NAMES if name in definers and definers[name] not in theirs)


_IDLE_OPS = {
    "RESUME", "NOP", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST", "POP_TOP", "COPY_FREE_VARS", "DELETE_FAST",
}  # fmt: skip
"""Of a body that does nothing; ``del arguments`` is nothing too."""


def does_nothing(function: Any) -> bool:
    """Whether a function's (or bound method's) body is only ``pass`` or ``return``: by its
    bytecode, no guess."""
    function = getattr(function, "__func__", function)
    return isinstance(function, FunctionType) and _idle(function.__code__)


@functools.lru_cache(maxsize=256)
def _idle(code: CodeType) -> bool:
    return all(
        step.opname in _IDLE_OPS
        and (step.opname not in ("LOAD_CONST", "RETURN_CONST") or step.argval is None)
        for step in dis.get_instructions(code)
    )


def _idles(connector: Any, name: str) -> bool:
    """Whether a hook does nothing; of a lookup, whether it has one answer for every request."""
    if does_nothing(getattr(type(connector), name, None)):
        return True
    return name == hooks.LOOKUP.name and answers_alike(connector, name)


_MOST_HANDED_ON = 4
_NAMES = ("LOAD_ATTR", "LOAD_METHOD")
_HANDS_ON = _IDLE_OPS | {"PUSH_NULL", "PRECALL", "CACHE"}


def answers_alike(instance: Any, name: str) -> bool:
    """Whether a method returns a constant, by itself or by a method of what the instance holds that it hands
    its arguments on to. Looks at byte code and attributes, and calls nothing."""
    for _ in range(_MOST_HANDED_ON):
        function = getattr(type(instance), name, None)
        if not isinstance(function, FunctionType):
            return False
        steps = list(dis.get_instructions(function.__code__))
        if all(step.opname in _IDLE_OPS for step in steps):
            return True
        way = _handed_on_to(steps)
        if not way or _first_local(steps) != function.__code__.co_varnames[0]:
            return False
        for part in way[:-1]:
            instance = attributes(instance).get(part)
        name = way[-1]
    return False


def _handed_on_to(steps: list[dis.Instruction]) -> list[str]:
    """``[a, b]`` of a body that is ``return self.a.b(its arguments)`` and nothing else; [] of any other."""
    way: list[str] = []
    calls = 0
    for step in steps:
        if step.opname in _NAMES and not calls:
            way.append(str(step.argval))
        elif step.opname in ("CALL", "CALL_METHOD", "CALL_FUNCTION"):
            calls += 1
        elif not step.opname.startswith("LOAD_FAST") and step.opname not in _HANDS_ON:
            return []
    return way if calls == 1 else []


def _first_local(steps: list[dis.Instruction]) -> str:
    """The first local name that is loaded; from 3.13 on two may be loaded at once."""
    loaded = next((step.argval for step in steps if step.opname.startswith("LOAD_FAST")), "")
    return str(loaded[0] if isinstance(loaded, tuple) else loaded)


def _integers(connector: Any) -> dict[str, int]:
    """Integers that can be a storage unit, on the connector and, one object deeper, on what it
    holds: ``{"_block_size": 128, "_lmcache_engine._lmcache_chunk_size": 256}``;
    then constants of its class and module."""
    found = dict(_own_integers(connector))
    for name, value in attributes(connector).items():
        if _may_hold_a_unit(value):
            found.update((f"{name}.{inner}", number) for inner, number in _own_integers(value))
        if len(found) >= _MAX_INTS:
            break
    found.update(_constants(type(connector)))
    return dict(list(found.items())[:_MAX_INTS])


def _constants(cls: type) -> list[tuple[str, int]]:
    """Constants of the connector's class, and of the module that defines it, by names that a unit has:
    ``("CHUNK_SIZE", 256)``. A module is full of other numbers, so that a name has to speak for each."""
    places = [sys.modules.get(cls.__module__), *reversed(cls.__mro__)]
    numbers = (one for place in places for one in _own_integers(place))
    return [(name, number) for name, number in numbers if name.isupper() and UNIT_NAME.search(name)]


def _own_integers(value: Any) -> list[tuple[str, int]]:
    found = attributes(value).items()
    return [(name, number) for name, number in found if type(number) is int and 1 < number < 1 << 31]


def _may_hold_a_unit(value: Any) -> bool:
    """A part of the connector: never vLLM's configuration, torch's objects or the library's."""
    if isinstance(value, (type, ModuleType, FunctionType)):
        return False
    module = type(value).__module__
    package = module.partition(".")[0]
    if package == "vllm":
        return module.startswith(("vllm.distributed.kv_transfer", "vllm.v1.kv_offload", "vllm.v1.simple_kv"))
    return package not in ("builtins", "torch", "numpy") and package not in sys.stdlib_module_names
