"""The answers of ``kvtrace check`` and ``kvtrace diff`` in a terminal, or plain in a pipe."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from kvtrace.gate.outcome import Difference, Outcome
from kvtrace.render import gate
from kvtrace.render.wording import clean, pad, wrap

MAX_ROWS = 12
_MIN_WIDTH = 60
_STYLES = {"better": "green", "worse": "red", "failed": "red"}


def render_check(outcome: Outcome, console: Console) -> None:
    """Prints the outcome of a gate."""
    page = _Page(max(console.width, _MIN_WIDTH))
    page.line(gate.headline(outcome), "bold green" if outcome.passed else "bold red")
    page.words(gate.asked(outcome), "  ", style="dim")
    for note in outcome.notes:
        page.words(clean(note), "  ", style="dim")
    for group in gate.groups(outcome):
        page.gap()
        page.line(
            group.title, "bold red" if group.cause is None or group.cause.severity == "fault" else "yellow"
        )
        if group.cause is not None:
            page.words(clean(group.cause.title), "  ")
        page.rows([(one.name, one.where, one.before, one.after, one.text) for one in group.rows], style="red")
        if group.cause is not None:
            page.labelled("Evidence", [clean(line) for line in group.cause.evidence[:3]])
        page.labelled("Remedy", group.remedies)
        if group.cause is not None:
            page.labelled("More", [f"kvtrace docs {clean(group.cause.id, 80)}"])
    for title, rows, style in (
        ("Better than asked", gate.better(outcome), "green"),
        ("Changed, and no failure", gate.changed(outcome), ""),
    ):
        if rows:
            page.gap()
            page.line(title, "bold")
            page.rows([(one.name, one.where, one.before, one.after, one.text) for one in rows], style=style)
    if command := gate.next_command(outcome):
        page.gap()
        page.line(f"Next  {command}")
    page.show(console)


def render_diff(difference: Difference, console: Console) -> None:
    """Prints what differs between two runs."""
    page = _Page(max(console.width, _MIN_WIDTH))
    page.line(f"A  {clean(difference.a)}", "dim")
    page.words(clean(difference.verdicts[0]), "   ")
    page.line(f"B  {clean(difference.b)}", "dim")
    page.words(clean(difference.verdicts[1]), "   ")
    if difference.empty:
        page.gap()
        page.line("No difference in settings, targets, coverage, ledgers or findings.")
    for title, rows in gate.sections(difference):
        page.gap()
        page.line(title, "bold")
        page.changes(rows)
    page.show(console)


class _Page:
    def __init__(self, width: int) -> None:
        self.width = width
        self.out: list[Text] = []

    def gap(self) -> None:
        self.out.append(Text())

    def line(self, text: str, style: str = "") -> None:
        self.out.append(Text(text, style=style))

    def words(self, text: str, first: str = "", rest: str | None = None, style: str = "") -> None:
        if text.strip():
            for line in wrap(text, self.width, first, rest):
                self.out.append(Text(line, style=style))

    def labelled(self, label: str, lines: list[str]) -> None:
        for number, text in enumerate(lines):
            self.words(text, first=f"  {pad('' if number else label, 11)}", rest=" " * 13)

    def rows(self, rows: list[tuple[str, str, str, str, str]], style: str = "") -> None:
        """what, where, from -> to, words; aligned, and never more than a screen of them."""
        shown = rows[:MAX_ROWS]
        wide = gate.widths(shown)
        for name, where, before, after, text in shown:
            first = f"  {pad(name, wide[0])}  " + (f"{pad(where, wide[1])}  " if wide[1] else "")
            self.row(first + f"{pad(before, wide[2], True)} -> {pad(after, wide[3])}", text, style)
        if len(rows) > len(shown):
            self.line(f"  and {len(rows) - len(shown)} more (--json has them all)")

    def changes(self, rows: list[gate.ChangeRow]) -> None:
        wide = gate.widths([(one.name, one.where, one.before, one.after) for one in rows])
        for one in rows:
            first = f"  {pad(one.name, wide[0])}  " + (f"{pad(one.where, wide[1])}  " if wide[1] else "")
            first += f"{pad(one.before, min(wide[2], 24), True)} -> {pad(one.after, min(wide[3], 24))}"
            self.row(first, one.text, _STYLES.get(one.verdict, ""))

    def row(self, first: str, text: str, style: str) -> None:
        """A row of a table; its words beside it where they fit in one line, else under it."""
        if cell_len(first) + 2 + cell_len(text) <= self.width:
            self.line(f"{first}  {text}".rstrip())
            self.out[-1].stylize(style, 0, len(first))
        else:
            self.line(first.rstrip(), style)
            self.words(text, first=" " * 6)

    def show(self, console: Console) -> None:
        for line in self.out:
            line.rstrip()
            console.print(line, soft_wrap=True, markup=False, highlight=False, emoji=False)
