"""Typed dictionaries to JSON Schema: what a document is, written once as types.

A field's type may be ``Annotated`` with its description (a string), :class:`Bounds` of a number and
:class:`Most` items of a list. A class's docstring is its title. Every object is closed; a field is
required unless its class says ``total=False``.
"""

from __future__ import annotations

import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


@dataclass(frozen=True)
class Bounds:
    """Of a number, both included."""

    low: float
    high: float


@dataclass(frozen=True)
class Most:
    """Items that a list has at most."""

    items: int


def json_schema(root: Any, ident: str, title: str, description: str) -> dict[str, Any]:
    """The schema of the typed dictionary `root`; every other one that it holds stands in ``$defs``."""
    defs: dict[str, Any] = {}
    shape = _object(root, defs)
    shape.pop("title", None)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": ident}
    return {**head, "title": title, "description": description, **shape, "$defs": defs}


def _object(shape: Any, defs: dict[str, Any]) -> dict[str, Any]:
    hints = typing.get_type_hints(shape, include_extras=True)
    names = sorted(hints, key=lambda name: name not in shape.__required_keys__)  # optional ones last
    found: dict[str, Any] = {"type": "object"}
    if shape.__doc__ and shape.__doc__ != dict.__doc__:
        found["title"] = shape.__doc__.strip()
    found["properties"] = {name: _rule(hints[name], defs) for name in names}
    found["required"] = [name for name in names if name in shape.__required_keys__]
    found["additionalProperties"] = False
    return found


def _rule(hint: Any, defs: dict[str, Any]) -> dict[str, Any]:
    """The schema of one type."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        rule = _rule(arguments[0], defs)
        for note in arguments[1:]:
            if isinstance(note, Bounds):
                rule.update(minimum=note.low, maximum=note.high)
            elif isinstance(note, Most):
                rule["maxItems"] = note.items
            else:
                rule["description"] = note
        return rule
    if origin is Literal:
        return {"const": arguments[0]} if len(arguments) == 1 else {"enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _rule(arguments[0], defs)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _rule(arguments[1], defs)}
    if origin in (Union, types.UnionType):
        (one,) = (argument for argument in arguments if argument is not type(None))
        rule = _object(one, defs) if typing.is_typeddict(one) else _rule(one, defs)
        return {**rule, "type": [rule["type"], "null"]}
    if typing.is_typeddict(hint):
        name = hint.__name__.strip("_")
        if name not in defs:
            defs[name] = {}  # its place in the order, before those that it holds
            defs[name] = _object(hint, defs)
        return {"$ref": f"#/$defs/{name}"}
    return {"type": _KINDS[hint]}
