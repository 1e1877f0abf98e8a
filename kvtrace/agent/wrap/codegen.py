"""Wrappers with the wrapped function's exact signature.

A generated wrapper costs a third of a ``*args, **kwargs`` one, keeps positional calls
positional (vLLM reads ``args[i]``), and shows the same signature to ``inspect`` and to
``torch.library.infer_schema`` through ``__wrapped__``.
"""

from __future__ import annotations

import functools
import inspect
import keyword
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvtrace.agent.wrap.frames import INTERNAL

_GIVEN: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*{0}",
    inspect.Parameter.VAR_KEYWORD: "**{0}",
    inspect.Parameter.KEYWORD_ONLY: "{0}={0}",
}
"""How a parameter is handed on; others by position."""


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (ValueError, TypeError):
        return None


class _Spelt:
    """In the place of a default value: the name of the variable that holds it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


def _lists(signature: inspect.Signature) -> tuple[str, list[str], dict[str, Any]] | None:
    """(parameter list, arguments, default values) or None where it can't be spelt."""
    parameters: list[inspect.Parameter] = []
    arguments: list[str] = []
    defaults: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_kvt_"):
            return None
        default = parameter.default
        if default is not parameter.empty:
            key = f"_kvt_default_{name}"
            defaults[key], default = default, _Spelt(key)
        parameters.append(parameter.replace(default=default, annotation=parameter.empty))
        arguments.append(_GIVEN.get(parameter.kind, "{0}").format(name))
    return str(inspect.Signature(parameters))[1:-1], arguments, defaults


def generate(
    wrapped: Callable[..., Any],
    template: str,
    names: dict[str, Any],
    needs: Sequence[str],
    fills: Mapping[str, str] | None = None,
) -> Callable[..., Any] | None:
    """Compile ``template`` with ``fills`` filled in, one after the other, and then ``{parameters}``,
    ``{arguments}``, ``{others}`` (all but the first) and ``{plain}`` (those, without ``**kwargs``).

    The template defines ``_kvt_wrapper``. ``names`` are its globals. None where the
    signature can't be read or lacks a parameter of ``needs``: the caller falls back to
    a ``*args, **kwargs`` wrapper.
    """
    signature = signature_of(wrapped)
    if signature is None or any(name not in signature.parameters for name in needs):
        return None
    lists = _lists(signature)
    if lists is None:
        return None
    parameters, arguments, defaults = lists
    scope: dict[str, Any] = {**names, **defaults}
    plain = ", ".join(one for one in arguments[1:] if not one.startswith("**"))
    lists_of = {"parameters": parameters, "arguments": ", ".join(arguments)}
    lists_of |= {"others": ", ".join(arguments[1:]), "plain": plain}
    for field, text in {**(fills or {}), **lists_of}.items():
        template = template.replace(f"{{{field}}}", text)
    file = f"<{INTERNAL}: kvtrace wrapper of {getattr(wrapped, '__qualname__', '?')}>"
    exec(compile(template, file, "exec"), scope)
    wrapper: Callable[..., Any] = scope["_kvt_wrapper"]
    functools.update_wrapper(wrapper, wrapped)
    return wrapper
