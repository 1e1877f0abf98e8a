"""Layer names as groups: ``model.layers.0.attn`` is index ``0`` of ``model.layers.*.attn``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

# a number that is a whole part between dots
_NUMBER = re.compile(r"(?<![^.])\d{1,9}(?![^.])")
MAX_RANGES = 6


def group_of(layer: str) -> str:
    """The name with each number that stands between dots as ``*``."""
    return _NUMBER.sub("*", layer)


def index_of(layer: str) -> str:
    """The numbers that :func:`group_of` takes out, joined by dots; "" where there are none."""
    return ".".join(str(int(number)) for number in _NUMBER.findall(layer))


def ranges(indices: Iterable[str]) -> list[str]:
    """``0 1 2 5`` -> ``0-2``, ``5``; indices of several numbers stand one by one."""
    unique = set(indices)
    single = sorted(int(one) for one in unique if one.isdigit())
    runs: list[list[int]] = []
    for number in single:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    several = (one for one in unique if not one.isdigit())
    return shown + sorted(several, key=lambda one: [int(part) for part in one.split(".") if part.isdigit()])


def within(index: str, spans: Iterable[str]) -> bool:
    """True where `index` is in one of the spans that :func:`ranges` made."""
    for span in spans:
        low, _, high = span.partition("-")
        numbers = all(part.isdigit() for part in (index, low, high))
        if index == span or (numbers and int(low) <= int(index) <= int(high)):
            return True
    return False


def together(layers: Sequence[str]) -> str:
    """Layers of one group by their numbers, as ``layers.{0-2,5}.attn``; "" where they are of no one group."""
    groups = {group_of(layer) for layer in layers}
    if len(groups) != 1 or not all(map(index_of, layers)):
        return ""
    return spelled(groups.pop(), map(index_of, layers), False)


def spelled(group: str, indices: Iterable[str], every: bool) -> str:
    """The group for people: with ``*`` where it is `every` layer of it, else as ``layers.{0-2,5}.attn``."""
    if every or "*" not in group:
        return group
    spans = ranges(indices)
    if len(spans) > MAX_RANGES:
        spans = [*spans[:MAX_RANGES], "…"]
    if group.count("*") == 1:
        inside = spans[0] if len(spans) == 1 and spans[0].isdigit() else "{" + ",".join(spans) + "}"
        return group.replace("*", inside)
    return f"{group} at {', '.join(spans)}"
