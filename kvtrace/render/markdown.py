"""The explanation as GitHub Markdown, for an issue or a pull request.

Every string of the report is escaped: it can neither open a table cell, a code span or a tag,
nor mention a person or an issue of the place where it is pasted.
"""

from __future__ import annotations

import re

from kvtrace.render import content
from kvtrace.render.wording import clean
from kvtrace.report.model import Ledger, Report
from kvtrace.words import count, percent

# an underscore inside a word is no emphasis on GitHub, and names are easier to read without the backslash
_SPECIAL = re.compile(r"([\\`*{}\[\]<>|~$&]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9]))")
_MENTION = re.compile(r"([@#])(?=\w)")
_LINE_START = re.compile(r"^(\s*)(\d*)([-+=#.)])(?=\s|$|[-=])")
_NOT_A_JOINT = "\u200b"


def render_markdown(report: Report, source: str | None = None, traced: str | None = None) -> str:
    """`report` as Markdown.

    `source` is the path it came from and `traced` its run directory with spools, for the next command.
    """
    out: list[str] = ["## kvtrace: " + text(report["run"]["name"] or "run"), ""]
    out += [f"{text(line)}  " for line in content.headline(report)]
    out += ["", f"**{text(clean(report['verdict']))}**" if report["verdict"].strip() else ""]
    out += _books(report)
    out += _road(report)
    out += _findings(report)
    out += _checked(report)
    out += _details(report)
    out += ["", "### Limits", "", *(f"- {text(line)}" for line in content.limits(report))]
    out += ["", f"Next: {code(content.next_command(report, source, traced))}", ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(out))


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


def _cell_code(value: str) -> str:
    return code(value).replace("|", "\\|")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]], right: set[int]) -> list[str]:
    rule = ["---:" if at in right else "---" for at in range(len(head))]
    return [f"| {' | '.join(row)} |" for row in (head, tuple(rule), *rows)]


def _books(report: Report) -> list[str]:
    ledger = report["ledger"]
    out = ["", "### Where the tokens went", "", *_book(ledger["saves"], "every token, each layer and rank")]
    if ledger["loads"]["total"] > 0:
        return [
            *out,
            "",
            "### What the connector loaded",
            "",
            *_book(ledger["loads"], "every prompt token"),
        ]
    return [*out, "", text(content.no_loads(report))]


def _book(book: Ledger, total: str) -> list[str]:
    rows = [(text(row.label), count(row.tokens), percent(row.share)) for row in content.accounts(book)]
    rows.append(
        (f"**{total}**", f"**{count(book['total_tokens'])}**", f"**{percent(1.0)}**" if book["total"] else "")
    )
    return [*_table(("account", "tokens", "share"), [*rows], {1, 2}), "", text(content.book_note(book))]


def _road(report: Report) -> list[str]:
    rows = [(text(row.name), row.came, row.went, text(row.note)) for row in content.stages(report)]
    if not rows:
        return []
    head = ("stage", "in", "out", "")
    return ["", "### Save pipeline", "", *_table(head, [*rows], {1, 2})]


def _findings(report: Report) -> list[str]:
    out = ["", "### Findings"]
    for one in content.findings(report):
        facts = "".join(f" · {text(fact)}" for fact in one.facts)
        out += ["", f"**{text(one.severity)}** {code(one.id)}{facts}", "", text(one.title)]
        for label, lines in (("Evidence", one.evidence), ("Remedy", one.remedy)):
            if lines:
                out += ["", f"{label}:", "", *(f"- {text(line)}" for line in lines)]
        out += ["", f"More: {code(one.command)}" + (f" ({text(one.rule)})" if one.rule else "")]
    return out if report["findings"] else [*out, "", "No findings."]


def _checked(report: Report) -> list[str]:
    out: list[str] = []
    for title, rows in (
        ("Checked, and not the cause", content.ruled_out(report)),
        ("Not observed", content.not_observed(report)),
    ):
        if rows:
            out += ["", f"### {title}", "", *(f"- {code(name)}: {text(why)}" for name, why in rows)]
    return out


def _details(report: Report) -> list[str]:
    out: list[str] = []
    covered = content.coverage(report)
    if covered:
        rows = [(_cell_code(row.name), row.calls, text(row.extra), text(row.where)) for row in covered]
        out += ["", "### Coverage", "", *_table(("hook or op", "calls / due", "", "seen in"), [*rows], {1})]
    for one in content.graphs(report):
        ran = [(text(row[0]), *row[1:]) for row in one.rows]
        modes = ("mode", "steps", "padding", "op bodies in Python", "save hooks")
        out += ["", "### CUDA graphs", "", text(one.summary), "", *(f"- {text(line)}" for line in one.why)]
        out += ["", *_table(modes, [*ran], {1, 2, 3, 4})]
    worst = content.requests(report)
    if worst:
        head = ("request", "prompt", "saved", "not saved", "verdict")
        cells = [(_cell_code(row[0]), *row[1:4], text(row[4])) for row in worst]
        out += ["", "### Requests, worst first", "", *_table(head, [*cells], {1, 2, 3})]
    spent = content.timing(report)
    if spent:
        times = ("hook", "clock", "calls", "median", "p99", "of the steps")
        lines = [(_cell_code(row[0]), *row[1:]) for row in spent]
        out += ["", "### Time in the connector", "", *_table(times, [*lines], {2, 3, 4, 5})]
    both = content.both_clocks(report)
    if both:
        clocks = ("hook or op", "calls", "host median", "device median", "host sum", "device sum")
        pairs = [(_cell_code(row[0]), *row[1:]) for row in both]
        out += ["", "### Host and device", "", *_table(clocks, [*pairs], {1, 2, 3, 4, 5})]
    if note := content.device_note(report):
        out += ["", text(note)]
    return out
