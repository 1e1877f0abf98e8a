"""Wrappers with the wrapped function's exact signature.

A generated wrapper costs a third of a ``*args, **kwargs`` one, keeps positional calls
positional (vLLM reads ``args[i]``), and shows the same signature to ``inspect`` and to
``torch.library.infer_schema`` through ``__wrapped__``.
"""

from __future__ import annotations

import functools
import inspect
import keyword
from collections.abc import Callable
from typing import Any

from kvtrace.agent.wrap.frames import INTERNAL

_EMPTY = inspect.Parameter.empty
_Kind = inspect.Parameter


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (ValueError, TypeError):
        return None


def _lists(signature: inspect.Signature) -> tuple[str, list[str], dict[str, Any]] | None:
    """(parameter list, arguments, default values) or None where it can't be spelt."""
    parameters: list[str] = []
    arguments: list[str] = []
    defaults: dict[str, Any] = {}
    positional_only = star = False
    for parameter in signature.parameters.values():
        name = parameter.name
        if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_kvt_"):
            return None
        if positional_only and parameter.kind is not _Kind.POSITIONAL_ONLY:
            parameters.append("/")
            positional_only = False
        if parameter.kind is _Kind.POSITIONAL_ONLY:
            positional_only = True
        if parameter.kind is _Kind.VAR_POSITIONAL:
            parameters.append(f"*{name}")
            arguments.append(f"*{name}")
            star = True
            continue
        if parameter.kind is _Kind.VAR_KEYWORD:
            parameters.append(f"**{name}")
            arguments.append(f"**{name}")
            continue
        if parameter.kind is _Kind.KEYWORD_ONLY and not star:
            parameters.append("*")
            star = True
        spelt = name
        if parameter.default is not _EMPTY:
            key = f"_kvt_default_{name}"
            defaults[key] = parameter.default
            spelt = f"{name}={key}"
        parameters.append(spelt)
        arguments.append(f"{name}={name}" if parameter.kind is _Kind.KEYWORD_ONLY else name)
    if positional_only:
        parameters.append("/")
    return ", ".join(parameters), arguments, defaults


def generate(
    wrapped: Callable[..., Any],
    template: str,
    names: dict[str, Any],
    *,
    needs: tuple[str, ...] = (),
) -> Callable[..., Any] | None:
    """Compile ``template`` with ``{parameters}``, ``{arguments}``, ``{others}`` (all but the first) and
    ``{plain}`` (those, without ``**kwargs``) filled in.

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
    source = template.replace("{parameters}", parameters).replace("{arguments}", ", ".join(arguments))
    source = source.replace("{others}", ", ".join(arguments[1:]))
    source = source.replace("{plain}", ", ".join(one for one in arguments[1:] if not one.startswith("**")))
    file = f"<{INTERNAL}: kvtrace wrapper of {getattr(wrapped, '__qualname__', '?')}>"
    exec(compile(source, file, "exec"), scope)
    wrapper: Callable[..., Any] = scope["_kvt_wrapper"]
    functools.update_wrapper(wrapper, wrapped)
    return wrapper
