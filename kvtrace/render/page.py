"""A page: what a verb says, as a list of parts. :mod:`kvtrace.render.terminal` prints it for a terminal or a
pipe, :mod:`kvtrace.render.markdown` for an issue or a pull request: the same words in both.

Who makes a page cleans the strings that come from a report (:func:`kvtrace.render.layout.clean`); none is
escaped for a markup language yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Style = Literal["", "dim", "bold", "good", "bad", "limit", "note", "passed", "failed"]


@dataclass(frozen=True)
class Screen:
    """What is printed on: its width in cells, and its colours (None: neither colour nor style)."""

    width: int = 100
    colours: Literal["auto", "truecolor"] | None = None


class Code(str):
    """A name, a path or a command, as it is typed: a code span in Markdown."""

    __slots__ = ()


Line: TypeAlias = str | tuple[str, ...]
"""One line of text, or its pieces; those that are :class:`Code` become code spans."""


def plain(line: Line) -> str:
    return line if isinstance(line, str) else "".join(line)


@dataclass(frozen=True)
class Heading:
    """`quiet`: a terminal does without it, what follows speaks for itself."""

    text: Line
    level: int = 3
    quiet: bool = False


@dataclass(frozen=True)
class Facts:
    """Short facts in one line, dots between them: the line breaks there."""

    facts: Sequence[str]


@dataclass(frozen=True)
class Paragraph:
    """`indent`: below a badge or a table. `gap`: an empty line before it."""

    text: Line
    style: Style = ""
    indent: bool = False
    gap: bool = False


@dataclass(frozen=True)
class Badge:
    """``FAULT  hook-raised``: a word that stands out, and a line; `whole`: the line stands out too; `gap`: an
    empty line before it."""

    word: str
    text: Line = ""
    style: Style = "bold"
    whole: bool = True
    gap: bool = True


@dataclass(frozen=True)
class Labelled:
    """``Evidence  ...``: lines under one label, which is `wide` cells in a terminal."""

    label: str
    lines: Sequence[Line]
    wide: int = 11


@dataclass(frozen=True)
class Bullets:
    lines: Sequence[Line]


@dataclass(frozen=True)
class Terms:
    """A name and what there is to say of it, row by row."""

    rows: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Column:
    """`join` stands before the column in a terminal, where no cell is padded beyond `most` cells."""

    head: str = ""
    right: bool = False
    join: str = "  "
    most: int = 60


@dataclass(frozen=True)
class Row:
    """`bar`: a share that is drawn behind the row, in the row's style."""

    cells: tuple[str, ...]
    style: Style = ""
    bar: float | None = None
    total: bool = False


@dataclass(frozen=True)
class Table:
    """Columns in which no cell says anything are left out. The last one may be prose and is wrapped.

    In a terminal the title stands in the place of the first column's head, and without `head` there is no
    line of heads at all; `brief`: so many rows are shown there; `gap`: an empty line before the title.
    """

    columns: Sequence[Column]
    rows: Sequence[Row]
    title: str = ""
    head: bool = True
    brief: int = 0
    gap: bool = True

    def used(self) -> list[int]:
        """The columns that say something."""
        return [at for at in range(len(self.columns)) if at == 0 or any(row.cells[at] for row in self.rows)]


@dataclass(frozen=True)
class TimelineRow:
    """When, in which step, what; and details, each with a label (may be empty)."""

    at: str
    step: str
    text: str
    details: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class Timeline:
    moments: Sequence[TimelineRow]


@dataclass(frozen=True)
class Command:
    """The command to go on with. `gap`: an empty line before it."""

    command: str
    gap: bool = True


Part: TypeAlias = (
    Heading | Facts | Paragraph | Badge | Labelled | Bullets | Terms | Table | Timeline | Command
)
Page: TypeAlias = list[Part]
