"""A connector's hooks held against the base class of the vLLM that is installed. Nothing is called."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from kvtrace.agent.preflight.facts import Signature
from kvtrace.trace import hooks

_ALIKE = 0.84
_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def own_methods(cls: type, base: type) -> dict[str, Any]:
    """Name -> what stands in the class, for all that is not vLLM's base class's own and can be called."""
    found: dict[str, Any] = {}
    for one in reversed(cls.__mro__):
        if one in base.__mro__ or one.__module__ == base.__module__:
            continue
        found.update(vars(one))
    return {name: value for name, value in found.items() if _function(value) is not None}


def hooks_of(base: type) -> frozenset[str]:
    """Public methods that vLLM calls: of its base class, and of what stands beside it."""
    return frozenset(
        name for one in (*base.__mro__, *_beside(base)) for name, value in vars(one).items()
        if not name.startswith("_") and _function(value) is not None
    )  # fmt: skip


def _beside(base: type) -> list[type]:
    """What vLLM has beside its base class for connectors to derive from: SupportsHMA and its like."""
    there = vars(sys.modules.get(base.__module__, base)).items()
    return [one for name, one in there if name.startswith("Supports") and isinstance(one, type)]


def signatures(cls: type, base: type) -> Iterator[Signature]:
    """A row for the constructor and each hook of the base class that the class has of its own."""
    for name, value in own_methods(cls, base).items():
        theirs = inspect.getattr_static(base, name, None)
        if theirs is None or (name.startswith("_") and name != "__init__"):
            continue
        row = _compare(name, theirs, value)
        if row is not None:
            yield row


def _compare(name: str, theirs: Any, own: Any) -> Signature | None:
    """None where one of both is no plain function: then nothing is known of how it is called."""
    given, takes = _parameters(theirs, True), _parameters(own, False)
    if given is None or takes is None:
        return None
    named = [one for one in given if one.kind in _NAMED]
    needed = [one.name for one in named if one.default is one.empty]
    every = [one.name for one in named]
    signature = inspect.Signature(takes)
    # vLLM gives its hooks their arguments by place; of other methods that is not known
    ways = ("place",) if name in hooks.BY_NAME else ("place", "name")
    fits = any(_binds(signature, names, by) for names in (needed, every) for by in ways)
    return Signature(name, tuple(map(_shown, given)), tuple(map(_shown, takes)), fits)


def _binds(signature: inspect.Signature, names: list[str], by: str) -> bool:
    try:
        if by == "place":
            signature.bind(*names)
        else:
            signature.bind(**dict.fromkeys(names))
        return True
    except TypeError:
        return False


def _function(value: Any) -> FunctionType | None:
    inner = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    return inner if isinstance(inner, FunctionType) else None


def _parameters(value: Any, follow: bool) -> list[inspect.Parameter] | None:
    """Without self or cls. A wrapper counts as what it takes itself, not as what it wraps."""
    function = _function(value)
    if function is None:
        return None
    try:
        found = list(inspect.signature(function, follow_wrapped=follow).parameters.values())
    except (TypeError, ValueError):
        return None
    if isinstance(value, staticmethod):
        return found
    if found and found[0].kind in _NAMED:
        return found[1:]
    return found if found and found[0].kind is inspect.Parameter.VAR_POSITIONAL else None


def _shown(one: inspect.Parameter) -> str:
    if one.kind is inspect.Parameter.VAR_KEYWORD:
        return f"**{one.name}"
    return f"*{one.name}" if one.kind is inspect.Parameter.VAR_POSITIONAL else one.name


def elsewhere(cls: type, base: type) -> tuple[str, ...]:
    """Hooks of other versions of vLLM: the class has them, the installed base class has not."""
    known = hooks_of(base)
    return tuple(name for name in own_methods(cls, base) if name in hooks.BY_NAME and name not in known)


def named_like(cls: type, base: type, uses: dict[str, int]) -> Iterator[tuple[str, str]]:
    """(method, hook) of methods that nothing uses and that are named almost like a hook, which the class that
    they stand in has not.

    Args:
        uses: how often each name stands in the connector's source, definitions aside.
    """
    known = hooks_of(base)
    for name in own_methods(cls, base):
        if name.startswith("_") or name in known or hasattr(base, name):
            continue
        if name in hooks.BY_NAME or uses.get(name, 1):
            continue
        beside = next(vars(one) for one in cls.__mro__ if name in vars(one))
        near = difflib.get_close_matches(name, sorted(known - beside.keys()), n=1, cutoff=_ALIKE)
        if near:
            yield name, near[0]
