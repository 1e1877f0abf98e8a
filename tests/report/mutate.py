"""Random damage to a JSON document."""

from __future__ import annotations

import copy
import random
from typing import Any

HOSTILE: list[Any] = [
    None, True, False, 0, -1, 1, 1.0, 0.5, -0.5, 3, 1e300, 2**63, -(2**63), 10**400, [], {}, [[]], {"a": []},
    "[red]x[/red]", "[/]", "\x1b[2J\x1b]0;title\x07", "a\nb\r\tc", "\x9b31m", "\u202eevil", "\ud800", "", "x",
    "|`*_<b>@me #1", "é" * 5000, "漢字" * 60, "{x}", "%s", "\0", "0",
    "kvtrace.report/2", "fault", "token-layers", "saved", ":", "not-saved:",
]  # fmt: skip


def mutated(value: Any, rng: random.Random, times: int | None = None) -> Any:
    """`value` with one to four parts replaced, removed, added, doubled or renamed (in place)."""
    for _ in range(rng.randint(1, 4) if times is None else times):
        holder: Any = {"": value}
        key: Any = ""
        for _ in range(rng.randint(0, 7)):
            inner = copy.deepcopy(holder[key])
            if isinstance(inner, dict) and inner:
                holder, key = inner, rng.choice(list(inner))
            elif isinstance(inner, list) and inner:
                holder, key = inner, rng.randrange(len(inner))
            else:
                break
        act = rng.random()
        if act < 0.65 or key == "":
            holder[key] = copy.deepcopy(rng.choice(HOSTILE))
        elif act < 0.8:
            del holder[key]
        elif isinstance(holder, list):
            holder.insert(0, copy.deepcopy(holder[key]))
        else:
            holder[rng.choice([one for one in HOSTILE if isinstance(one, str)])] = copy.deepcopy(holder[key])
        if "" in holder and isinstance(holder, dict) and key == "":
            value = holder[""]
    return value
