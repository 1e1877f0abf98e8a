"""Lines with styles, and how wide they are: as much of a terminal as a page needs.

Standard library only: an answer is on the screen before a library for terminals would be loaded.
"""

from __future__ import annotations

import re
from itertools import pairwise

_SGR = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_ESCAPE = re.compile(r"\x1b\[[\d;]*m")


class Styled:
    """A line: its text, and styles (words such as "bold red") from where to where."""

    __slots__ = ("spans", "text")

    def __init__(self, text: str = "", style: str = "") -> None:
        self.text = ""
        self.spans: list[tuple[int, int, str]] = []
        self.append(text, style)

    def append(self, text: str, style: str = "") -> None:
        if style and text:
            self.spans.append((len(self.text), len(self.text) + len(text), style))
        self.text += text

    def stylize(self, style: str, start: int = 0, end: int | None = None) -> None:
        self.spans.append((start, len(self.text) if end is None else end, style))

    def plain(self) -> str:
        return self.text.rstrip()

    def coloured(self) -> str:
        """With escape sequences; each style ends where it ends, or with the line."""
        text = self.plain()
        ends = {0, len(text), *(min(at, len(text)) for start, end, _ in self.spans for at in (start, end))}
        places, out = sorted(ends), []
        for start, end in pairwise(places):
            words = " ".join(style for first, last, style in self.spans if first <= start < last).split()
            codes = ";".join(_SGR[word] for word in dict.fromkeys(words))
            piece = text[start:end]
            out.append(f"\x1b[{codes}m{piece}\x1b[0m" if codes else piece)
        return "".join(out)


def bare(text: str) -> str:
    """`text` without escape sequences."""
    return _ESCAPE.sub("", text)


_ONE_CELL = frozenset("·…–—‘’“”•◀▶→←↑↓≥≤×µ°±½ ▏▎▍▌▋▊▉█")


def cell_len(text: str) -> int:
    """How many cells of a terminal `text` takes."""
    if text.isascii() or all(char < "\u0300" or char in _ONE_CELL for char in text):
        return len(text)
    from unicodedata import category, east_asian_width

    cells = 0
    for char in text:
        if category(char) not in ("Mn", "Me", "Cf"):
            cells += 2 if east_asian_width(char) in "WF" else 1
    return cells
