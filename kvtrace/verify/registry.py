"""All properties, in the order in which they are shown."""

from __future__ import annotations

from importlib import import_module

from kvtrace.verify.property import FULL, Property

ORDER = (
    "transfer",
    "shapes",
    "askers",
    "conduct",
    "lasting",
)
"""Files of ``kvtrace/verify/properties/``."""
PROPERTIES: tuple[Property, ...] = tuple(
    one for name in ORDER for one in import_module(f"kvtrace.verify.properties.{name}").PROPERTIES
)


def of_suite(suite: str) -> list[Property]:
    """Those that the suite asks."""
    return [one for one in PROPERTIES if suite == FULL or one.suite != FULL]
