"""What an object holds, without making it slower.

Python 3.11 and 3.12 make an object's ``__dict__`` when somebody asks for it, and read all its attributes
slower from then on: a connector's at each of its calls.
"""

from __future__ import annotations

import gc
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any

_NONE = object()


def attributes(value: Any) -> dict[str, Any]:
    """What stands in an object's ``__dict__``, {} where it has none.

    What the methods of its class name is read one by one; the dictionary is asked for where that is not all
    that the object holds."""
    if isinstance(value, (type, ModuleType)):
        return dict(vars(value))
    members = [member for base in type(value).__mro__ for member in vars(base).items()]
    of_class = {name for name, _ in members}
    named = (member.__code__.co_names for _, member in members if isinstance(member, FunctionType))
    found = {name: _own(value, name) for name in chain.from_iterable(named) if name not in of_class}
    found = {name: one for name, one in found.items() if one is not _NONE}
    held = [one for one in gc.get_referents(value) if one is not type(value)]
    if sorted(map(id, held)) != sorted(map(id, found.values())):
        found = dict(vars(value)) if hasattr(value, "__dict__") else {}
    return found


def _own(value: Any, name: str) -> Any:
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return _NONE
