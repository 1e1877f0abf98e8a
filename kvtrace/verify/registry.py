"""All properties, in the order in which they are shown."""

from __future__ import annotations

from kvtrace.verify.properties import askers, conduct, lasting, shapes, transfer
from kvtrace.verify.property import FULL, Property

PROPERTIES: tuple[Property, ...] = (
    *transfer.PROPERTIES,
    *shapes.PROPERTIES,
    *askers.PROPERTIES,
    *conduct.PROPERTIES,
    *lasting.PROPERTIES,
)


def of_suite(suite: str) -> list[Property]:
    """Those that the suite asks."""
    return [one for one in PROPERTIES if suite == FULL or one.suite != FULL]
