"""The explanation in a terminal, or plain in a pipe.

Lines are laid out here and never re-wrapped by rich: the same words come out with and without
colour, and markup in a report's strings is never interpreted.
"""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from kvtrace.render import content
from kvtrace.render.wording import bar, clean, glued, pad, wrap
from kvtrace.report.model import Ledger, Report
from kvtrace.words import count, percent

_SEVERITY = {"FAULT": "bold red", "LIMIT": "yellow", "NOTE": "cyan"}
_MIN_WIDTH = 60


def render_text(
    report: Report, console: Console, source: str | None = None, traced: str | None = None
) -> None:
    """Prints `report` to `console`.

    `source` is the path it came from and `traced` its run directory with spools, for the next command.
    """
    for line in _Page(report, max(console.width, _MIN_WIDTH), source, traced).lines():
        console.print(line, soft_wrap=True, markup=False, highlight=False, emoji=False)


def _short_parts_whole(line: str) -> str:
    """Keeps ``prefix caching off`` and the like on one line: breaks go to the dots between them."""
    return " · ".join(glued(part) if len(part) < 40 else part for part in line.split(" · "))


class _Page:
    """The lines of one explanation at one width."""

    def __init__(self, report: Report, width: int, source: str | None, traced: str | None) -> None:
        self.report, self.width, self.source, self.traced = report, width, source, traced
        self.out: list[Text] = []

    def lines(self) -> list[Text]:
        for line in content.headline(self.report):
            self.words(_short_parts_whole(line), style="dim", rest="  ")
        self.gap()
        self.words(clean(self.report["verdict"]), style="bold")
        self.books()
        self.stages()
        self.findings()
        self.checked()
        self.coverage()
        self.graphs()
        self.requests()
        self.timing()
        self.both_clocks()
        self.tail()
        return self.out

    def gap(self) -> None:
        self.out.append(Text())

    def words(self, text: str, first: str = "", rest: str | None = None, style: str = "") -> None:
        for line in wrap(text, self.width, first, rest):
            self.out.append(Text(line, style=style))

    def title(self, text: str) -> None:
        self.gap()
        self.out.append(Text(text, style="bold"))

    def books(self) -> None:
        ledger = self.report["ledger"]
        self.book("Where the tokens went", ledger["saves"], "every token, each layer and rank")
        if ledger["loads"]["total"] > 0:
            self.book("What the connector loaded", ledger["loads"], "every prompt token")
        else:
            self.gap()
            self.words(content.no_loads(self.report), rest="  ")

    def book(self, title: str, book: Ledger, total: str) -> None:
        rows = content.accounts(book)
        wide = max(cell_len(text) for text in (*(row.label for row in rows), total, title)) + 2
        figures = max(8, *(len(count(row.tokens)) for row in rows), len(count(book["total_tokens"])), 0)
        self.gap()
        self.out.append(
            Text(f"{pad(title, wide)}  {pad('tokens', figures, True)}  {pad('share', 8, True)}", style="bold")
        )
        for row in rows:
            line = Text(f"  {pad(row.label, wide)}{pad(count(row.tokens), figures, True)}  ")
            line.append(f"{pad(percent(row.share), 8, True)}  ")
            line.append(bar(row.share), style="green" if row.good else "red")
            line.rstrip()
            self.out.append(line)
        whole = percent(1.0) if book["total"] else ""
        line = Text(f"  {pad(total, wide)}{pad(count(book['total_tokens']), figures, True)}  ")
        line.append(pad(whole, 8, True))
        line.rstrip()
        self.out.append(line)
        self.words(content.book_note(book), first="  ", style="dim")

    def stages(self) -> None:
        rows = content.stages(self.report)
        if not rows:
            return
        head = "Save pipeline"
        wide = max(len(head), *(cell_len(row.name) + 2 for row in rows))
        figures = max(8, *(len(row.came) for row in rows), *(len(row.went) for row in rows))
        self.title(f"{pad(head, wide)}  {pad('in', figures, True)}  {pad('out', figures, True)}")
        for row in rows:
            first = (
                f"  {pad(row.name, wide - 2)}  {pad(row.came, figures, True)}  {pad(row.went, figures, True)}"
            )
            if row.note:
                self.words(row.note, first=f"{first}   ", style="red" if row.loss else "")
            else:
                self.out.append(Text(first))

    def findings(self) -> None:
        if not self.report["findings"]:
            self.gap()
            self.words("No findings.")
        for one in content.findings(self.report):
            self.gap()
            self.finding(one)

    def finding(self, one: content.FindingText) -> None:
        fault = one.severity == "FAULT"
        head = " · ".join([one.id, *one.facts])
        first = len(self.out)
        self.words(head if fault else f"{head}: {one.title}", first=f"{one.severity}  ", rest="  ")
        for line in self.out[first:]:
            line.stylize(_SEVERITY.get(one.severity, ""), 0, len(line) if fault else len(one.severity))
        if fault:
            self.words(one.title, first="  ")
        for label, lines in (("Evidence", one.evidence), ("Remedy", one.remedy)):
            for number, text in enumerate(lines):
                self.words(text, first=f"  {pad('' if number else label, 11)}", rest=" " * 13)
        if fault:
            self.words(
                " · ".join(filter(None, (one.command, one.rule))), first=f"  {pad('More', 11)}", rest=" " * 13
            )

    def checked(self) -> None:
        rows = content.ruled_out(self.report)
        if rows:
            self.title("Checked, and not the cause")
            self.id_lines(rows)
        unseen = content.not_observed(self.report)
        if unseen:
            self.title("Not observed")
            self.id_lines(unseen)

    def id_lines(self, rows: list[tuple[str, str]]) -> None:
        wide = min(max(cell_len(name) for name, _ in rows), 30)
        for name, text in rows:
            self.words(text, first=f"  {pad(name, wide)}  ", rest=" " * (wide + 4))

    def table(self, head: tuple[str, ...], rows: list[tuple[str, ...]], right: set[int]) -> None:
        """Columns as wide as they need; those in `right` are numbers."""
        every = [head, *rows]
        wide = [max(cell_len(row[at]) for row in every) for at in range(len(head))]
        for number, row in enumerate(every):
            # the rows are indented under the title, which stands in the first column
            first = pad(row[0], wide[0] + 2) if number == 0 else "  " + pad(row[0], wide[0])
            cells = [pad(cell, wide[at], at in right) for at, cell in enumerate(row)]
            line = "  ".join([first, *cells[1:]]).rstrip()
            self.out.append(Text(line, style="bold" if number == 0 else ""))

    def coverage(self) -> None:
        rows = content.coverage(self.report)
        if not rows:
            return
        self.gap()
        start = len(self.out) + 1
        table = [(row.name, row.calls, row.extra, row.where) for row in rows]
        self.table(("Coverage", "calls/due", "", "seen in"), [*table], {1})
        for number, row in enumerate(rows):
            if not row.complete:
                self.out[start + number].stylize("red")

    def requests(self) -> None:
        rows = content.requests(self.report)
        if rows:
            self.gap()
            head = ("Requests, worst first", "prompt", "saved", "not saved", "verdict")
            self.table(head, [*rows], {1, 2, 3})

    def timing(self) -> None:
        rows = content.timing(self.report)
        if rows:
            self.gap()
            head = ("Time in the connector", "clock", "calls", "median", "p99", "of the steps")
            self.table(head, [*rows], {2, 3, 4, 5})

    def graphs(self) -> None:
        for one in content.graphs(self.report):
            self.title("CUDA graphs")
            self.words(one.summary, first="  ")
            for line in one.why:
                self.words(line, first="  ")
            head = ("  mode", "steps", "padding", "op bodies in Python", "save hooks")
            self.table(head, [*one.rows], {1, 2, 3, 4})

    def both_clocks(self) -> None:
        rows = content.both_clocks(self.report)
        if rows:
            self.gap()
            head = ("Host and device", "calls", "host median", "device median", "host sum", "device sum")
            self.table(head, [*rows], {1, 2, 3, 4, 5})
        if note := content.device_note(self.report):
            self.words(note, first="  ", rest="  ", style="dim")

    def tail(self) -> None:
        self.title("Limits")
        for line in content.limits(self.report):
            self.words(line, first="  ", rest="    ")
        self.gap()
        command = Text("Next  ")
        command.append(content.next_command(self.report, self.source, self.traced), style="bold")
        self.out.append(command)
