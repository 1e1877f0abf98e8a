"""What can be known of a connector without calling it: class, file, hooks that do nothing."""

from __future__ import annotations

import dis
import sys
from types import FunctionType
from typing import Any

from kvtrace.trace.format import HOOKS, Role

_MAX_INTS = 32


def describe(
    connector: Any, base: type, role: Role, configured: str | None, parent: int | None, lane: int
) -> dict[str, Any]:
    own = [name for name in HOOKS if name and _defined_by_user(base, name)]
    return {
        "ordinal": lane,
        "role": role.name.lower(),
        "parent": parent,
        "configured": configured,
        "class": base.__name__,
        "module": base.__module__,
        "file": getattr(sys.modules.get(base.__module__), "__file__", None) or "",
        "ok": True,
        "error_type": None,
        "error": None,
        "noop": [name for name in HOOKS if name and _does_nothing(getattr(base, name, None))],
        "overrides": own,
        "ints": _integers(connector),
        "engine_tag": None,
    }


def _defined_by_user(base: type, name: str) -> bool:
    for cls in base.__mro__:
        if name in cls.__dict__:
            return cls.__name__ not in ("KVConnectorBase_V1", "KVConnectorBase", "SupportsHMA")
    return False


_IDLE_OPS = {"RESUME", "NOP", "LOAD_CONST", "RETURN_VALUE", "RETURN_CONST", "POP_TOP", "COPY_FREE_VARS"}


def _does_nothing(function: Any) -> bool:
    """Whether a method's body is only ``pass`` or ``return`` (bytecode, no guess)."""
    if not isinstance(function, FunctionType):
        return False
    return all(
        step.opname in _IDLE_OPS
        and (step.opname not in ("LOAD_CONST", "RETURN_CONST") or step.argval is None)
        for step in dis.get_instructions(function)
    )


def _integers(connector: Any) -> dict[str, int]:
    """Integer attributes that can be a storage unit: ``{"_block_size": 128}``."""
    found: dict[str, int] = {}
    for name, value in list(vars(connector).items() if hasattr(connector, "__dict__") else ()):
        if type(value) is int and 1 < value < 1 << 31:
            found[name] = value
        elif type(value).__module__ == type(connector).__module__ and hasattr(value, "__dict__"):
            for inner, number in list(vars(value).items()):
                if type(number) is int and 1 < number < 1 << 31:
                    found[f"{name}.{inner}"] = number
        if len(found) >= _MAX_INTS:
            break
    return found
