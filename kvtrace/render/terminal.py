"""A page in a terminal, or plain in a pipe: the same words come out with and without colour."""

from __future__ import annotations

from collections.abc import Sequence

from kvtrace.render.layout import bar, glued, pad, wrap
from kvtrace.render.page import (
    Badge,
    Bullets,
    Command,
    Facts,
    Heading,
    Labelled,
    Page,
    Paragraph,
    Part,
    Row,
    Screen,
    Style,
    Table,
    Terms,
    Timeline,
    TimelineRow,
    plain,
)
from kvtrace.render.styled import Styled, bare, cell_len

STYLES: dict[Style, str] = {
    "good": "green",
    "bad": "red",
    "passed": "bold green",
    "failed": "bold red",
    "limit": "yellow",
    "note": "cyan",
}
_MIN_WIDTH = 60
_TERM = 30
_SHORT = 40
_MOST_CELL = 60
"""No cell of a table is padded beyond it."""
_TIME, _STEP = 12, 11


def terminal(page: Page, screen: Screen) -> str:
    """`page` as text of the screen's width, with escape sequences where there are colours."""
    printer = _Printer(max(screen.width, _MIN_WIDTH))
    for part in page:
        printer.part(part)
    lines = (line.coloured() if screen.colours else line.plain() for line in printer.out)
    return "".join(f"{line}\n" for line in lines)


def height(text: str, screen: Screen) -> int:
    """Rows of the screen that `text` takes: a line that is too long takes several."""
    width = max(screen.width, 1)
    plain = bare(text)
    return sum(max(1, -(-cell_len(line) // width)) for line in plain.splitlines())


def widest(text: str) -> int:
    """Cells of the longest line of `text`."""
    return max(map(cell_len, bare(text).splitlines()), default=0)


class _Printer:
    def __init__(self, width: int) -> None:
        self.width = width
        self.out: list[Styled] = []

    def part(self, part: Part) -> None:
        match part:
            case Heading(text, quiet=quiet):
                if not quiet:
                    self.gap()
                    self.line(plain(text), "bold")
            case Facts(facts):
                self.words(" · ".join(facts), rest="  ", style="dim")
            case Paragraph(text, style, indent, gap) if plain(text):
                if gap:
                    self.gap()
                self.words(plain(text), first="  " if indent else "", style=style)
            case Badge():
                self.badge(part)
            case Labelled(label, lines, wide):
                for number, line in enumerate(lines):
                    first = f"  {pad('' if number else label, wide)}"
                    self.words(plain(line), first, " " * len(first))
            case Bullets(lines):
                for line in lines:
                    self.words(plain(line), "  ", "    ")
            case Terms(rows):
                wide = min(max(cell_len(name) for name, _ in rows), _TERM)
                for name, text in rows:
                    self.words(text, f"  {pad(name, wide)}  ", " " * (wide + 4))
            case Table() if part.rows:
                self.table(part)
            case Timeline(moments):
                self.gap()
                for moment in moments:
                    self.moment(moment)
            case Command(command, gap):
                if gap:
                    self.gap()
                self.line(f"Next  {command}")
                self.out[-1].stylize("bold", len("Next  "))

    def gap(self) -> None:
        if self.out:
            self.out.append(Styled())

    def line(self, text: str, style: Style = "") -> None:
        self.out.append(Styled(text, style=STYLES.get(style, style)))

    def words(self, text: str, first: str = "", rest: str | None = None, style: Style = "") -> None:
        # "prefix caching off" and the like stay on one line: breaks go to the dots between them
        most = min(_SHORT, self.width - cell_len(first if rest is None else rest))
        facts = (glued(fact) if cell_len(fact) < most else fact for fact in text.split(" · "))
        for line in wrap(" · ".join(facts), self.width, first, rest):
            self.line(line, style)

    def badge(self, part: Badge) -> None:
        if part.gap:
            self.gap()
        start = len(self.out)
        self.words(plain(part.text), first=f"{part.word}  " if plain(part.text) else part.word, rest="  ")
        shown = self.out[start:] if part.whole else self.out[start : start + 1]
        for line in shown:
            line.stylize(STYLES.get(part.style, part.style), 0, None if part.whole else len(part.word))

    def table(self, table: Table) -> None:
        rows = table.rows[: table.brief] if table.brief else table.rows
        used = table.used()
        last = used[-1]
        heads = [column.head for column in table.columns]
        every = [row.cells for row in rows]
        if table.head:
            heads[0] = table.title or heads[0]
            every.append((heads[0][2:] if table.title else heads[0], *heads[1:]))
        wide = {at: min(max(map(cell_len, (cells[at] for cells in every))), _MOST_CELL) for at in used}
        if table.head:
            if table.title and table.gap:
                self.gap()
            indent = "" if table.title else "  "
            first = pad(heads[0], wide[0] + 2 - len(indent))
            self.line((indent + self.cells(table, [first, *heads[1:]], used, wide)).rstrip(), "bold")
        for row in rows:
            self.row(table, row, used, wide, last)
        if len(table.rows) > len(rows):
            self.line(f"  and {len(table.rows) - len(rows)} more (--format json has them all)")

    def cells(self, table: Table, cells: Sequence[str], used: list[int], wide: dict[int, int]) -> str:
        """The cells of a row in their columns; the first is laid out already."""
        line = cells[0]
        for at in used[1:]:
            line += "  " + pad(cells[at], wide[at], table.columns[at].right)
        return line

    def row(self, table: Table, row: Row, used: list[int], wide: dict[int, int], last: int) -> None:
        cells = [f"  {pad(row.cells[0], wide[0])}", *row.cells[1:]]
        if row.bar is not None or last == 0 or table.columns[last].right:
            self.line(self.cells(table, cells, used, wide), "" if row.bar is not None else row.style)
            if row.bar is not None:
                self.out[-1].append(f"  {bar(row.bar)}", style=STYLES.get(row.style, row.style))
            return
        first = self.cells(table, cells, used[:-1], wide) + "  "
        prose, room = row.cells[last], self.width - cell_len(first)
        if table.head or cell_len(prose) <= room or room >= self.width // 3:
            self.words(prose, first, style=row.style)
        else:  # no column to keep to, and little room: under the row
            self.line(first, row.style)
            self.words(prose, first=" " * 6, style=row.style)

    def moment(self, moment: TimelineRow) -> None:
        when = f"{pad(moment.at, _TIME, True)}  {pad(moment.step, _STEP)}  "
        blank = " " * len(when)
        self.words(moment.text, first=when, rest=blank)
        for label, text in moment.details:
            self.words(text, first=f"{blank}  " + (f"{label}  " if label else ""), rest=f"{blank}    ")
