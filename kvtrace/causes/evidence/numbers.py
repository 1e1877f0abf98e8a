"""Numbers that a connector holds: of its configuration, and its own integers."""

from __future__ import annotations

import re
from typing import Any

from kvtrace.grouped import leaves
from kvtrace.ledger.run import Engine
from kvtrace.words import listed

_NO_TOKENS = re.compile(r"bytes?(_|$)|per_?tok", re.IGNORECASE)
"""Names of a number of bytes, or of something a token: no tokens, whatever it equals."""
_MOST_DIGITS = 8


def configured(engine: Engine) -> list[tuple[str, int]]:
    """(dotted name, number) of kv_connector_extra_config; "256" counts as one."""
    return [
        (name, number)
        for name, value in leaves(engine.extra)
        if (number := _integer(value)) is not None and not _NO_TOKENS.search(name)
    ]


def held(engine: Engine) -> list[tuple[str, int]]:
    """... of the connector object's own."""
    numbers = engine.connector.ints if engine.connector else {}
    return [one for one in numbers.items() if not _NO_TOKENS.search(one[0])]


def between(engine: Engine, least: int, most: int) -> str:
    """``'max_offload_tokens' = 128``: those that lie there, of the configuration where it has one; ""."""
    for numbers in (configured(engine), held(engine)):
        found = [f"'{name}' = {value}" for name, value in numbers if least <= value <= most]
        if found:
            return listed(found, 2)
    return ""


def _integer(value: Any) -> int | None:
    if isinstance(value, str) and value.isdigit() and len(value) <= _MOST_DIGITS:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
