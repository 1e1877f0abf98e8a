"""Single numbers beside a list: which part of what the list names they leave.

A number is understood if it says again what is known anyway, or if its name says that it is a beginning, an
end or a count. Of a number without a unit tokens and blocks are tried. Any other number that could be a
position leaves open how much is meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtrace.agent.metadata import words
from kvtrace.agent.metadata.step_requests import Interval

Number = tuple[str, int]
Span = tuple[str, Interval]


class Unclear(Exception):
    """How much is meant is open: the name of the number that says so."""


@dataclass(frozen=True)
class Known:
    """What is known of the request: tokens in a block (0 unknown), and numbers that tell of it alone."""

    size: int
    facts: frozenset[int]


def cut(numbers: Sequence[Number], spans: Sequence[Span], hull: Interval, known: Known) -> Interval | None:
    """The part of ``hull`` (token positions) that numbers leave; None where they say nothing.

    Raises:
        Unclear: how much is meant is open.
    """
    roles = [(name, role, value) for name, value in numbers if (role := _role(name, value, hull, known))]
    for name, (start, end) in spans:
        if start == end and not name:
            raise Unclear("a number")  # two offsets, or nothing
        roles += [(name, "start", start), (name, "end", end)]
    if roles and any(not _role_of_zero(name) for name, value in numbers if not value):
        raise Unclear(_names(roles))  # it may be the end, or anything
    if not roles:
        return None
    tokens, blocks = _part(roles, 1, hull, known), _part(roles, known.size, hull, known)
    if tokens is not None and blocks is not None and tokens != blocks:
        if _fits(tokens, known):  # as likely these tokens as these blocks
            raise Unclear(_names(roles))
        tokens = None
    part = blocks if tokens is None else tokens
    if part is None:
        raise Unclear(_names(roles))
    return part


def _names(roles: Sequence[tuple[str, str, int]]) -> str:
    return ", ".join(dict.fromkeys(name or "a number" for name, _, _ in roles))


def _role(name: str, value: int, hull: Interval, known: Known) -> str:
    """What a number is for, "" for nothing.

    Raises:
        Unclear: it could be a position, and its name does not say so.
    """
    word = words.read(name)
    if word.foreign or word.other or word.label or value < 0:
        return ""
    if word.unit == "chunk" and not word.role:
        return ""  # the how manieth of its parts
    if word.fact or word.unit == "chunk":
        if value in known.facts or value >= hull[1] or not value:
            return ""
        raise Unclear(name)
    if word.role in ("start", "end", "count"):
        if not value and word.role == "count" and not word.unit:
            raise Unclear(name)  # nothing of what?
        return word.role
    again = {0, *hull, hull[1] - hull[0]}
    if known.size:
        again |= {at // known.size for at in again if at % known.size == 0}
    if value in again or value >= hull[1]:
        return ""
    raise Unclear(name or "a number")


def _role_of_zero(name: str) -> bool:
    """Whether a name says what a zero is for, or that it is for nothing."""
    word = words.read(name)
    return bool(word.role or word.fact or word.foreign or word.other or word.label)


def _part(roles: Sequence[tuple[str, str, int]], unit: int, hull: Interval, known: Known) -> Interval | None:
    """The interval, if a number whose name gives no unit counts in this one; None where it can't be."""
    if not unit:
        return None
    said: dict[str, set[int]] = {"start": set(), "end": set(), "count": set()}
    for name, role, value in roles:
        own = words.read(name).unit
        said[role].add(value * (known.size if own == "block" else 1 if own else unit))
    if any(len(values) > 1 for values in said.values()):
        return None
    start = next(iter(said["start"]), hull[0])
    start = start or hull[0]
    end = next(iter(said["end"]), hull[1])
    room = known.size - 1 if known.size else 0
    if not hull[0] <= start <= hull[1] or end > hull[1] + room or (end < start and end):
        return None
    if said["count"]:
        count = next(iter(said["count"]))
        skips = any("skip" in words.words(name) for name, role, _ in roles if role == "start")
        # What is skipped is a part of what is counted; and more than there is behind a start counts it, too.
        upto = count if skips or start + count > hull[1] + room else start + count
        if not start <= upto <= hull[1] + room or (said["end"] and end not in (start + count, count)):
            return None
        end = min(end, upto)
    return start, max(start, min(end, hull[1]))


def _fits(part: Interval, known: Known) -> bool:
    """Whether an interval begins and ends with blocks, or where the request does."""
    return all(not at or at % known.size == 0 or at in known.facts for at in part)
