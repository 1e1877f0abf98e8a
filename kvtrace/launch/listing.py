"""Listings: text files beside a data file that only grows, whose lines say where each name's record stands.

A name that comes again may have its record where the later line says: then the bytes at the earlier place
stand there still, and nobody finds them. No format is known. Two numbers of a line are a record's place
where, line after line, records lie one behind the other and make up the data file; the rest of a line is the
name. Of anything else nothing is said, nor where most lines repeat a name, unless several names come again
and several only once: what comes again and again is a word of each record (its layer, an order), and none.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise, permutations
from pathlib import Path
from typing import NamedTuple

_MOST_BYTES = 8 << 20
_MOST_BESIDE = 16
"""Files in one folder: stores with more have a file for each record."""
_LEAST_LINES = 3
_MOST_NUMBERS = 6
_SHARE_NAMED = 0.9
"""Of the data file's bytes that the lines name together."""
_FAR = 1 << 63
_TOKEN = re.compile(r'"[^"]*"|\'[^\']*\'|[^\s,;:|=\[\](){}"\']+')


class _Line(NamedTuple):
    name: tuple[str, ...]
    numbers: tuple[int, ...]


_Place = tuple[tuple[str, ...], int, int]
"""(name, begin, end) of a record."""


class Listings:
    """Of the files that a run wrote to; each is read once."""

    def __init__(self, wrote: Iterable[Path]) -> None:
        self._beside: dict[Path, list[Path]] = defaultdict(list)
        for path in wrote:
            self._beside[path.parent].append(path)
        self._lines: dict[Path, list[_Line]] = {}
        self._left: dict[Path, list[tuple[int, int]]] = {}

    def leads_to(self, data: Path, offset: int) -> bool:
        """Whether a byte of a data file is in no record whose name has come again since."""
        left = self._left.get(data)
        if left is None:
            left = self._left[data] = self._left_behind(data)
        at = bisect_right(left, (offset, _FAR)) - 1
        return at < 0 or left[at][1] <= offset

    def _left_behind(self, data: Path) -> list[tuple[int, int]]:
        """Begin and end of each record, rising, whose name has come again since."""
        beside = self._beside[data.parent]
        for path in beside if len(beside) <= _MOST_BESIDE else ():
            try:
                places = _places(self._lines_of(path), data.stat().st_size) if path != data else []
            except OSError:
                continue
            if places:
                latest = {name: start for name, start, _ in places}
                again = [(start, end) for name, start, end in places if latest[name] != start]
                return again if 2 * len(again) < len(places) or _are_names(places) else []
        return []

    def _lines_of(self, path: Path) -> list[_Line]:
        if path not in self._lines:
            self._lines[path] = _lines(path)
        return self._lines[path]


def _lines(path: Path) -> list[_Line]:
    """[] of what is no text of lines, each with as many numbers."""
    if not 0 < path.stat().st_size <= _MOST_BYTES:
        return []
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError:
        return []
    found = []
    for line in text.splitlines():
        tokens = _TOKEN.findall(line)
        numbers = tuple(int(token) for token in tokens if token.isdecimal() and len(token) < 20)
        name = tuple(token for token in tokens if not token.isdecimal())
        if not name or not 2 <= len(numbers) <= _MOST_NUMBERS:
            return []
        found.append(_Line(name, numbers))
    same = len({len(one.numbers) for one in found}) == 1
    return found if same and len(found) >= _LEAST_LINES else []


def _places(lines: Sequence[_Line], size: int) -> list[_Place]:
    """The records, line by line; [] where no two of the numbers are a record's place."""
    for first, second in permutations(range(len(lines[0].numbers)), 2) if lines else ():
        for is_end in (False, True):
            places = [_place(one, first, second, is_end) for one in lines]
            follow = all(before[2] <= after[1] for before, after in pairwise(places))
            fit = all(start < end for _, start, end in places) and places[-1][2] <= size
            if follow and fit and sum(end - start for _, start, end in places) >= _SHARE_NAMED * size:
                return places
    return []


def _are_names(places: Sequence[_Place]) -> bool:
    """Whether what most lines repeat tells records apart all the same."""
    times = Counter(name for name, _, _ in places)
    once = sum(many == 1 for many in times.values())
    return once > 1 and len(times) - once > 1


def _place(line: _Line, first: int, second: int, is_end: bool) -> _Place:
    """``first``: which number is its begin; ``second``: its end, or its size."""
    start, other = line.numbers[first], line.numbers[second]
    rest = tuple(str(number) for at, number in enumerate(line.numbers) if at not in (first, second))
    return line.name + rest, start, other if is_end else start + other
