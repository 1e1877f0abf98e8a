"""What a document is, written once as typed dictionaries: their JSON Schema, and rows filled by their fields.

A field's type may be ``Annotated`` with its description (a string), :class:`Bounds` of a number and
:class:`Most` items of a list. A class's docstring is its title. Every object is closed; a field is
required unless its class says ``total=False``.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, cast

T = TypeVar("T")

_KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


class Bounds(NamedTuple):
    """Of a number, both included."""

    low: float
    high: float


class Digits(NamedTuple):
    """After the decimal point."""

    digits: int


class Most(NamedTuple):
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
            elif isinstance(note, str):
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


# ------------------------------------------------------------------------------ rows


def row(shape: type[T], source: object, **given: object) -> T:
    """A row of a report: the fields that are `given`, and the others by their names from `source`.

    `source` is an object or a row of a table. Values become plain Python ones of the field's type, within
    its bounds and to its digits: numpy has its own integers, and NaN where there is nothing.
    """
    get = source.get if isinstance(source, Mapping) else partial(getattr, source)
    found = {
        name: plain(given[name] if name in given else get(name))
        for name, plain in _fields(cast("Any", shape))
    }
    return cast("T", found)


@cache
def _fields(shape: Any) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    hints = typing.get_type_hints(shape, include_extras=True)
    return tuple((name, _plain(hint)) for name, hint in hints.items())


def _plain(hint: Any, notes: tuple[object, ...] = ()) -> Callable[[Any], Any]:
    """What makes a value one of the type `hint`, which is annotated with `notes`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _plain(arguments[0], arguments[1:])
    if origin in (Union, types.UnionType):
        plain = _plain(next(one for one in arguments if one is not type(None)))
        return lambda value: None if value is None or value != value else plain(value)  # NaN is none
    if origin is dict:
        plain = _plain(arguments[1])
        return lambda value: {str(name): plain(one) for name, one in value.items()}
    if origin is list:
        return list
    bounds = next((one for one in notes if isinstance(one, Bounds)), Bounds(0, math.inf))
    digits = next((one.digits for one in notes if isinstance(one, Digits)), 3)
    simple: dict[Any, Callable[[Any], Any]] = {
        int: lambda value: max(int(bounds.low), whole(value)),
        float: lambda value: min(float(bounds.high), _number(value, digits)),
        str: text,
    }
    return simple.get(hint, lambda value: value)


def text(value: object) -> str:
    """A string, "" for anything that is none (absent, NaN)."""
    return str(value) if isinstance(value, str) else ""


def whole(value: Any) -> int:
    """0 for anything that is none (absent, NaN)."""
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return 0


def _number(value: Any, digits: int) -> float:
    number = float(value)
    return max(0.0, round(number, digits)) if math.isfinite(number) else 0.0
