"""A page: what a verb says, as a list of parts. :mod:`kvtrace.render.terminal` prints it for a terminal or a
pipe, :mod:`kvtrace.render.markdown` for an issue or a pull request: the same words in both.

A paragraph without text and a table without rows say nothing, and are left out.

Who makes a page cleans the strings that come from a report (:func:`kvtrace.words.clean`); none is
escaped for a markup language yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

Style = Literal["", "dim", "bold", "good", "bad", "limit", "note", "passed", "failed"]


class Screen(NamedTuple):
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


class Heading(NamedTuple):
    """`quiet`: a terminal does without it, what follows speaks for itself."""

    text: Line
    level: int = 3
    quiet: bool = False


class Facts(NamedTuple):
    """Short facts in one line, dots between them: the line breaks there."""

    facts: Sequence[str]


class Paragraph(NamedTuple):
    """`indent`: below a badge or a table. `gap`: an empty line before it."""

    text: Line
    style: Style = ""
    indent: bool = False
    gap: bool = False


class Badge(NamedTuple):
    """``FAULT  hook-raised``: a word that stands out, and a line; `whole`: the line stands out too; `gap`: an
    empty line before it."""

    word: str
    text: Line = ""
    style: Style = "bold"
    whole: bool = True
    gap: bool = True


class Labelled(NamedTuple):
    """``Evidence  ...``: lines under one label, which is `wide` cells in a terminal."""

    label: str
    lines: Sequence[Line]
    wide: int = 11


class Bullets(NamedTuple):
    lines: Sequence[Line]


class Terms(NamedTuple):
    """A name and what there is to say of it, row by row."""

    rows: Sequence[tuple[str, str]]


class Column(NamedTuple):
    head: str = ""
    right: bool = False


class Row(NamedTuple):
    """`bar`: a share that is drawn behind the row, in the row's style."""

    cells: tuple[str, ...]
    style: Style = ""
    bar: float | None = None
    total: bool = False


class Table(NamedTuple):
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


class TimelineRow(NamedTuple):
    """When, in which step, what; and details, each with a label (may be empty)."""

    at: str
    step: str
    text: str
    details: Sequence[tuple[str, str]] = ()


class Timeline(NamedTuple):
    moments: Sequence[TimelineRow]


class Command(NamedTuple):
    """The command to go on with. `gap`: an empty line before it."""

    command: str
    gap: bool = True


Part: TypeAlias = (
    Heading | Facts | Paragraph | Badge | Labelled | Bullets | Terms | Table | Timeline | Command
)
Page: TypeAlias = list[Part]


def bulleted(title: str, lines: Sequence[Line]) -> Page:
    """The lines under a heading; nothing of none."""
    return [Heading(title), Bullets(lines)] if lines else []
