"""A small JSON Schema checker, enough for the schemas that kvtrace itself publishes.

Full ``jsonschema`` is a development dependency only. This one knows ``type``, ``const``, ``enum``,
``required``, ``properties``, ``additionalProperties``, ``items``, ``maxItems``, ``minimum``, ``maximum`` and
local ``$ref``; a test asks that the schemas hold no other keyword.
"""

from __future__ import annotations

import math
from typing import Any


def problem(value: object, schema: dict[str, Any]) -> str | None:
    """What is wrong with `value` first, as ``where: what``, or None where it is valid by `schema`."""
    return _problem(value, schema, schema, "")


_TYPES = {"null": type(None), "boolean": bool, "string": str, "array": list, "object": dict}


def _is(value: object, kind: str) -> bool:
    if kind in _TYPES:
        return isinstance(value, _TYPES[kind])
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if isinstance(value, float) and not math.isfinite(value):
        return False
    return kind == "number" or isinstance(value, int) or value.is_integer()


def _same(value: object, wanted: object) -> bool:
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


def _short(value: object) -> str:
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "an array"
    text = ascii(value) if not isinstance(value, int) or abs(value) < 10**30 else "a huge number"
    return text if len(text) <= 40 else text[:37] + "..."


def _problem(value: object, schema: dict[str, Any], root: dict[str, Any], at: str) -> str | None:
    if "$ref" in schema:
        return _problem(value, root["$defs"][schema["$ref"].removeprefix("#/$defs/")], root, at)
    here = at or "the top level"
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        return f"{here} should be {' or '.join(kinds)}, found {_short(value)}"
    if "const" in schema and not _same(value, schema["const"]):
        return f"{here} should be {_short(schema['const'])}, found {_short(value)}"
    if "enum" in schema and not any(_same(value, one) for one in schema["enum"]):
        return f"{here} should be one of {', '.join(map(str, schema['enum']))}, found {_short(value)}"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if value < schema.get("minimum", value) or value > schema.get("maximum", value):
            return f"{here} is out of range: {_short(value)}"
    elif isinstance(value, list):
        if len(value) > schema.get("maxItems", len(value)):
            return f"{here} has {len(value)} items, more than {schema['maxItems']}"
        for index, item in enumerate(value if "items" in schema else ()):
            if found := _problem(item, schema["items"], root, f"{at}[{index}]"):
                return found
    elif isinstance(value, dict):
        return _object_problem(value, schema, root, at)
    return None


def _object_problem(
    value: dict[str, object], schema: dict[str, Any], root: dict[str, Any], at: str
) -> str | None:
    here = at or "the top level"
    known = schema.get("properties", {})
    for key in schema.get("required", ()):
        if key not in value:
            return f"{here} lacks {key!r}"
    others = schema.get("additionalProperties", True)
    for key, item in value.items():
        rule = known.get(key, others)
        if rule is False:
            return f"{here} has an unknown field {_short(key)}"
        name = key if key in known else _short(key)
        if isinstance(rule, dict) and (found := _problem(item, rule, root, f"{at}.{name}" if at else name)):
            return found
    return None
