"""A page as GitHub Markdown, for an issue, a pull request, a job summary.

Every string of a page is escaped: it can neither open a table cell, a code span or a tag,
nor mention a person or an issue of the place where it is pasted.
"""

from __future__ import annotations

import re

from kvtrace.render.page import (
    Badge,
    Bullets,
    Code,
    Command,
    Facts,
    Heading,
    Labelled,
    Line,
    Page,
    Paragraph,
    Part,
    Table,
    Terms,
    Timeline,
    plain,
)
from kvtrace.words import clean

MAX_BRIEF_ROWS = 50
"""Rows of a table that is brief in a terminal."""

# an underscore inside a word is no emphasis on GitHub, and names are easier to read without the backslash
_SPECIAL = re.compile(r"([\\`*{}\[\]<>|~$&]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")
_MENTION = re.compile(r"([@#])(?=\w)")
_LINE_START = re.compile(r"^(\s*)(\d*)([-+=#.)])(?=\s|$|[-=])")
_NOT_A_JOINT = "\u200b"


def markdown(page: Page) -> str:
    """`page` as Markdown that ends in a newline."""
    blocks: list[list[str]] = []
    for part in page:
        lines = _lines(part)
        if isinstance(part, Facts) and blocks and blocks[-1][-1].endswith("  "):
            blocks[-1] += lines  # one paragraph, a line each
        elif lines:
            blocks.append(lines)
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def text(value: str) -> str:
    """`value` (one line) as running text or as a table cell."""
    value = _SPECIAL.sub(r"\\\1", clean(value))
    value = _MENTION.sub(rf"\1{_NOT_A_JOINT}", value).replace("://", f":{_NOT_A_JOINT}//")
    return _LINE_START.sub(r"\1\2\\\3", value)


def code(value: str) -> str:
    """`value` (one line) as a code span that its own backticks cannot end."""
    value = clean(value)
    longest = max((len(run) for run in re.findall("`+", value)), default=0)
    fence = "`" * (longest + 1)
    space = " " if longest or value != value.strip() else ""
    return f"{fence}{space}{value or ' '}{space}{fence}"


def line(value: Line) -> str:
    """A line, its code spans and its running text."""
    pieces = (value,) if isinstance(value, str) else value
    return "".join(code(piece) if isinstance(piece, Code) else text(piece) for piece in pieces)


def _lines(part: Part) -> list[str]:
    match part:
        case Heading(value, level):
            return [f"{'#' * level} {line(value)}"]
        case Facts(facts):
            return [text(" · ".join(facts)) + "  "]
        case Paragraph(value, style):
            shown = line(value)
            return [f"**{shown}**" if style == "bold" else shown] if plain(value).strip() else []
        case Badge(word, value):
            return [f"**{text(word)}** {line(value)}".rstrip()]
        case Labelled(label, lines):
            if len(lines) < 2:
                return [f"{text(label)}: {line(one)}" for one in lines]
            return [f"{text(label)}:", "", *(f"- {line(one)}" for one in lines)]
        case Bullets(lines):
            return [f"- {line(one)}" for one in lines]
        case Terms(rows):
            return [f"- {code(name)}: {text(words)}" for name, words in rows]
        case Table():
            return _table(part) if part.rows else []
        case Timeline(moments):
            out = []
            for moment in moments:
                when = " · ".join(filter(None, (moment.at, moment.step)))
                out.append(f"- {text(when)}: {text(moment.text)}" if when else f"- {text(moment.text)}")
                for label, words in moment.details:
                    out.append("  - " + (f"{text(label)}: " if label else "") + text(words))
            return out
        case Command(command):
            return [f"Next: {code(command)}"]


def _table(table: Table) -> list[str]:
    used = table.used()
    heads = [table.columns[at] for at in used]
    out = [f"### {text(table.title)}", ""] if table.title else []
    out.append(f"| {' | '.join(text(column.head) for column in heads)} |")
    out.append(f"| {' | '.join('---:' if column.right else '---' for column in heads)} |")
    most = MAX_BRIEF_ROWS if table.brief else len(table.rows)
    for row in table.rows[:most]:
        cells = [_cell(row.cells[at]) for at in used]
        if row.total:
            cells = [f"**{cell}**" if cell else "" for cell in cells]
        out.append(f"| {' | '.join(cells)} |")
    if len(table.rows) > most:
        out += ["", f"and {len(table.rows) - most} more"]
    return out


def _cell(value: str) -> str:
    if not value:
        return ""
    return code(value).replace("|", "\\|") if isinstance(value, Code) else text(value)
