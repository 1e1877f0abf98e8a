"""Numbers, names and lines for people. Pure functions, shared by every renderer."""

from __future__ import annotations

import re
from collections.abc import Iterable

from kvtrace.render.styled import cell_len
from kvtrace.words import clean, listed

_BLOCKS = " ▏▎▍▌▋▊▉█"


def bar(share: float, cells: int = 8) -> str:
    """A bar of eighth blocks; anything above nothing shows."""
    eighths = round(min(max(share, 0.0), 1.0) * cells * 8)
    if share > 0 and eighths == 0:
        eighths = 1
    full, rest = divmod(eighths, 8)
    return "█" * full + (_BLOCKS[rest] if rest else "")


def names(items: Iterable[str], most: int = 8) -> str:
    """``engine core, worker 0, worker 1``; long rows of numbered names become ranges."""
    unique = list(dict.fromkeys(clean(item, 80) for item in items))
    return listed(_ranges(unique) if len(unique) > 3 else unique, most)


def _ranges(items: list[str]) -> list[str]:
    """Neighbours that differ by a number that counts up: ``worker 0 .. worker 7``."""
    out: list[list[str]] = []
    last: tuple[str, int] | None = None
    for item in items:
        match = re.fullmatch(r"(.*?)(\d{1,9})(\D*)", item)
        this = (f"{match[1]}#{match[3]}", int(match[2])) if match else None
        if this and last and this[0] == last[0] and this[1] == last[1] + 1:
            out[-1].append(item)
        else:
            out.append([item])
        last = this
    flat: list[str] = []
    for run in out:
        flat.extend([f"{run[0]} .. {run[-1]}"] if len(run) > 2 else run)
    return flat


_GROUP = re.compile(r"(?<=\d) (?=\d{3}(?!\d))|(?<=\d) (?=%)")


def glued(text: str) -> str:
    """`text` as one word for :func:`wrap`."""
    return text.replace(" ", "\0")


def wrap(text: str, width: int, first: str = "", rest: str | None = None) -> list[str]:
    """`text` in lines of `width` cells, broken between words only.

    `first` stands before the first line, `rest` (default: as many spaces) before the others.
    A word longer than the line is left whole, and ``58 720`` and ``6.1 %`` are one word.
    """
    rest = " " * cell_len(first) if rest is None else rest
    words = [word.replace("\0", " ") for word in _GROUP.sub(glued(" "), text).split(" ") if word]
    lines, line, used = [], first, cell_len(first)
    empty = True
    for word in words:
        cells = cell_len(word)
        if not empty and used + 1 + cells > width:
            lines.append(line)
            line, used, empty = rest, cell_len(rest), True
        if not empty:
            line, used = line + " ", used + 1
        line, used, empty = line + word, used + cells, False
    lines.append(line)
    return lines


def pad(text: str, width: int, right: bool = False) -> str:
    """`text` in a column of `width` cells."""
    fill = " " * max(0, width - cell_len(text))
    return fill + text if right else text + fill
