"""Single numbers: which part of a request's slots they leave.

A number is understood if it says again what is known anyway (the end of the blocks beside it, the request's
length), or if its name says what it is (a beginning, an end, a count) and it can be one. Of a number
without a unit both units are tried. Whatever else could be a size leaves the part's size open.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kvtrace.agent.metadata import words
from kvtrace.agent.metadata.holdings import Interval
from kvtrace.agent.metadata.parts import Values
from kvtrace.agent.metadata.words import Name
from kvtrace.trace.format import Flag

Ranges = tuple[Interval, ...]


_MAY_END, _MAY_BEGIN = frozenset({"last", "tail", "to"}), frozenset({"head"})
"""Names of numbers that may be positions, and something else just as well."""
_ENDS_OF = {"to": ("from", "since", "begin", "start"), "tail": ("head", "start", "begin")}
"""Of these, those that stand beside a beginning of such a name: an interval."""
_TOKENS = Name(unit="token")


@dataclass(frozen=True)
class Facts:
    """What is known of the request.

    ``size``: tokens in a block, 0 unknown; ``capacity``: tokens that its blocks can hold, 0 unknown;
    ``known``: numbers that tell of the request alone (its prompt, what is computed); ``end``: tokens that
    are computed with this step, 0 unknown."""

    direction: int
    size: int
    capacity: int
    known: frozenset[int] = frozenset()
    awaited: Interval | None = None
    end: int = 0


@dataclass(frozen=True)
class Placed:
    """Token positions. ``counted``: numbers, not blocks, say where they begin or end. ``said``: the count of
    tokens that stands beside more or fewer slots, 0 for none."""

    ranges: Ranges
    counted: bool = False
    said: int = 0


class Unclear(Exception):
    """A number, by its name, that leaves open how much is meant."""


@dataclass
class _Given:
    """What numbers say, each with its name: beginnings, ends, counts. ``doubts``: what names leave open."""

    starts: list[tuple[Name, int]]
    ends: list[tuple[Name, int]]
    counts: list[tuple[Name, int]]
    zero: bool = False
    doubts: list[tuple[str, int]] = field(default_factory=list)

    def any(self) -> bool:
        return bool(self.starts or self.ends or self.counts)

    def all(self) -> Iterable[tuple[Name, int]]:
        return (*self.starts, *self.ends, *self.counts)


def place(values: list[Values], base: Ranges, bound: Interval | None, facts: Facts) -> Placed | None:
    """The part of ``base`` (what the lists name, () for no list) that the numbers and token ids leave.

    ``bound``: the positions of the token ids that stand beside it. None: neither says anything.

    Raises:
        Unclear: how much is meant is open.
    """
    hull = (base[0][0], base[-1][1]) if base else bound
    given = _sort(values, hull, base, facts)
    if given.zero and not base and not (given.ends or given.counts):
        return Placed((), True)  # a count of 0, from wherever
    if not given.any():
        _settle(given, hull, hull, facts)
        return Placed(_clip(base or ((bound,) if bound else ()), bound), bound is not None) if hull else None
    cut = _units(given, hull, facts)
    if cut is None:
        raise Unclear(_names(values))
    _settle(given, cut, hull, facts)
    start, end = cut
    if bound is not None and not base and (start < bound[0] or end > bound[1]):
        raise Unclear(_names(values))
    ended = bool(given.ends or given.counts)
    if bound is not None and not ended:
        end = min(end, bound[1])
        if facts.size and any(name.unit == "block" for name, _ in given.all()):
            end -= end % facts.size  # positions in blocks: what does not fill one is none
    said = {value for name, value in given.counts if name.unit == "token"}
    return Placed(_clip(base or ((start, end),), (start, max(start, end))), True, max(said, default=0))


def _clip(ranges: Ranges, to: Interval | None) -> Ranges:
    if to is None:
        return ranges
    cut = ((max(start, to[0]), min(end, to[1])) for start, end in ranges)
    return tuple((start, end) for start, end in cut if start < end)


def _names(values: list[Values]) -> str:
    names = [name for one in values for name, _ in one.numbers] + [
        name for one in values for name, _ in one.spans
    ]
    return ", ".join(dict.fromkeys(name or "a number" for name in names))


def _sort(values: list[Values], hull: Interval | None, base: Ranges, facts: Facts) -> _Given:
    """The numbers that add something, by what their names make of them."""
    given = _Given([], [], [])
    again = _Again.of(hull, base, facts)
    hits: list[int] = []
    if base and _from_nothing_to_nothing(values):
        given.ends.append((replace(_TOKENS, end=True), 0))
    for one in values:
        for name, (start, end) in one.spans:
            if (start, end) != hull:
                given.starts.append((words.read(name), start))
                given.ends.append((words.read(name), end))
        for name, value in one.numbers:
            word = words.read(name)
            if word.foreign or word.no_size or (value == facts.size and "size" in name.lower()):
                continue
            if word.fact:
                if word.hit and facts.direction == Flag.LOAD:
                    hits.append(value)
                elif value not in facts.known:
                    given.doubts.append((name, value))
            elif word.unit == "chunk":
                given.doubts.append((name, value))
            elif word.start:
                if value not in again.start(word):
                    given.starts.append((word, value))
            elif word.end:
                if value not in again.end(word):
                    given.ends.append((word, value))
            elif end := _told(_MAY_END, name, value, facts):
                if end not in again.end(_TOKENS):
                    given.ends.append((replace(_TOKENS, end=True), end))
            elif begin := _told(_MAY_BEGIN, name, value, facts):
                if begin not in again.start(_TOKENS):
                    given.starts.append((replace(_TOKENS, start=True), begin))
            elif word.count or word.unit:
                if not value and not word.direction:
                    given.zero = True
                elif value not in again.count(word):
                    given.counts.append((word, value))
            elif value in (facts.end, facts.awaited[1] if facts.awaited else 0) and _reaches(
                hull, value, facts
            ):
                given.ends.append((Name(unit="token", end=True), value))
            elif value not in again.any():
                given.doubts.append((name, value))
    _hits(given, sorted(set(hits)), facts)
    if given.zero and not given.any() and base:
        raise Unclear("a count of 0")
    return given


def _from_nothing_to_nothing(values: list[Values]) -> bool:
    """Whether an interval from 0 to 0 stands there, in names that are read with care alone."""
    zero = {name.strip("_").lower() for one in values for name, value in one.numbers if not value}
    return any(end in zero and zero.intersection(begins) for end, begins in _ENDS_OF.items())


def _told(names: frozenset[str], name: str, value: int, facts: Facts) -> int:
    """The position that a number of such a name stands for, where blocks end or the request does; an end may
    be meant with or without itself. 0 for none."""
    if name.strip("_").lower() not in names or not facts.size:
        return 0
    for at in (value, value + 1) if names is _MAY_END else (value,):
        if at > 0 and (at % facts.size == 0 or at in facts.known or at == facts.end):
            return at
    return 0


def _reaches(hull: Interval | None, value: int, facts: Facts) -> bool:
    """Whether the blocks beside a number go just as far as it does."""
    return hull is not None and hull[0] < value <= hull[1] < value + max(1, facts.size)


@dataclass(frozen=True)
class _Again:
    """Numbers that say what the lists say anyway: where they begin and end, how much they are; in tokens
    and, where that comes out even, in blocks."""

    places: tuple[int, int, int] | None
    size: int

    @classmethod
    def of(cls, hull: Interval | None, base: Ranges, facts: Facts) -> _Again:
        if hull is None:
            return cls(None, facts.size)
        count = sum(end - start for start, end in base) if base else hull[1] - hull[0]
        return cls((*hull, count), facts.size)

    def _same(self, at: int, word: Name | None) -> set[int]:
        if self.places is None:
            return set()
        value = self.places[at]
        blocks = {value // self.size} if self.size and value % self.size == 0 else set()
        unit = "" if word is None else word.unit
        return blocks if unit == "block" else {value} if unit else {value} | blocks

    def start(self, word: Name) -> set[int]:
        return self._same(0, word)

    def end(self, word: Name) -> set[int]:
        return self._same(1, word)

    def count(self, word: Name) -> set[int]:
        return self._same(2, word)

    def any(self) -> set[int]:
        return {0} | self._same(0, None) | self._same(1, None) | self._same(2, None)


def _settle(given: _Given, cut: Interval | None, hull: Interval | None, facts: Facts) -> None:
    """Numbers whose names say nothing are harmless where they say again what is known by now, or can be
    neither a position nor a count."""
    most = hull[1] if hull is not None else facts.capacity
    again: set[int] = set()
    place = 0  # the how manieth of such parts it is
    if cut is not None and cut[0] < cut[1]:
        known = _Again((*cut, cut[1] - cut[0]), facts.size)
        again = {0} | known.end(Name())  # a beginning said again could be a count
        again |= {value for value in known.count(Name()) if not _may_end(value, cut, facts)}
        place = 0 if cut[0] % (cut[1] - cut[0]) else cut[0] // (cut[1] - cut[0])
    for name, value in given.doubts:
        if cut is not None and value >= cut[1] and words.read(name).fact:
            continue  # it tells of more than this part
        is_place = value == place and not words.read(name).count
        if value not in again and not is_place and (0 < value <= most or not most):
            raise Unclear(name or "a number")


def _may_end(value: int, cut: Interval, facts: Facts) -> bool:
    """Whether a count said again could be an earlier end just as well, in tokens or in blocks."""
    return any(cut[0] < at < cut[1] for at in (value, value * facts.size))


def _hits(given: _Given, hits: list[int], facts: Facts) -> None:
    """What a load spec tells of hits: found here, found there. From the one to the other is loaded."""
    if given.any() or not hits or facts.direction != Flag.LOAD:
        return
    tokens = Name(unit="token", start=True)
    if len(hits) == 2 and (not facts.capacity or hits[1] <= facts.capacity):
        given.starts.append((tokens, hits[0]))
        given.ends.append((tokens, hits[1]))
    elif facts.awaited is not None and len(hits) == 1:
        if hits[0] == facts.awaited[1]:
            given.ends.append((tokens, hits[0]))
        elif hits[0] == facts.awaited[0]:
            given.starts.append((tokens, hits[0]))


def _units(given: _Given, hull: Interval | None, facts: Facts) -> Interval | None:
    """The interval that the numbers say; None where they contradict each other or leave a choice."""
    found = []
    for unit in ("token", "block"):
        if unit == "block" and (not facts.size or all(name.unit for name, _ in given.all())):
            continue
        interval = _interval(given, unit, hull, facts)
        if interval is not None and interval not in found:
            found.append(interval)
    if len(found) == 2 and not _plausible(given, facts):
        del found[0]
    return found[0] if len(found) == 1 else None


def _interval(given: _Given, unit: str, hull: Interval | None, facts: Facts) -> Interval | None:
    """One reading: numbers without a unit of their own are of ``unit``."""

    def tokens(numbers: list[tuple[Name, int]]) -> list[int] | None:
        values = {value * (facts.size if (name.unit or unit) == "block" else 1) for name, value in numbers}
        if any((name.unit or unit) == "block" for name, _ in numbers) and not facts.size:
            return None
        return sorted(values)

    starts, ends, counts = tokens(given.starts), tokens(given.ends), tokens(given.counts)
    if starts is None or ends is None or counts is None:
        return None
    if len(starts) > 1 or len(ends) > 1 or len(counts) > 1:
        return None
    low, high = hull if hull is not None else (0, facts.capacity or 1 << 62)
    if unit == "block" and any(
        not name.unit and value * facts.size >= high + facts.size for name, value in given.all()
    ):
        return None  # more blocks than there are
    start = _start(starts[0], low, given.starts[0][0]) if starts else low
    if start is None or start > high:
        return None
    end = high
    if ends:
        end = ends[0]
        if end < start or (hull is None and end > high) or (hull is not None and end <= low and start != end):
            return None
    if counts:
        counted = _end(start, counts[0], bool(starts), low, high, given.counts[0][0])
        if counted is None or (ends and counted != end and ends[0] != counts[0]):
            return None
        end = counted if not ends else end
    if not ends and not counts and hull is None:
        return None  # from there on: up to where?
    return start, min(end, high)


def _plausible(given: _Given, facts: Facts) -> bool:
    """Whether positions that can be blocks are as likely tokens: they begin and end with blocks, or where the
    request does."""
    places = [value for name, value in (*given.starts, *given.ends) if not name.unit]
    return all(value % facts.size == 0 or value in facts.known or value == facts.end for value in places)


def _start(value: int, low: int, name: Name) -> int | None:
    """A beginning before that of the slots counts from theirs, if it is what is left out."""
    if value >= low or value == 0:
        return max(value, low)
    return low + value if name.skip else None


def _end(start: int, count: int, started: bool, low: int, high: int, name: Name) -> int | None:
    """Where ``count`` tokens end: counted from the start, or the length of all up to there."""
    end = start + count
    if end <= high:
        return end
    if started and start > low and count > start:
        return count  # of the whole, as it began at 0
    return high
