"""The parts of a page, printed for a terminal and as Markdown."""

from __future__ import annotations

import typing

from kvtrace.render.markdown import markdown
from kvtrace.render.page import (
    Badge,
    Bullets,
    Code,
    Column,
    Command,
    Facts,
    Heading,
    Labelled,
    Page,
    Paragraph,
    Part,
    Row,
    Screen,
    Table,
    Terms,
    Timeline,
    TimelineRow,
)
from kvtrace.render.terminal import terminal

COLUMNS = (Column("what"), Column("where"), Column("values"), Column())


def both(*parts: Part, width: int = 80) -> tuple[str, str]:
    page: Page = list(parts)
    return terminal(page, Screen(width)), markdown(page)


def test_every_part_has_both_printers() -> None:
    parts: list[Part] = [
        Heading("Title"),
        Facts(["one", "two"]),
        Paragraph(("run ", Code("a_b")), "bold", gap=True),
        Badge("FAULT", (Code("hook-raised"), " · 3 tokens"), "failed"),
        Labelled("Evidence", ["first", "second"]),
        Labelled("Remedy", ["only"]),
        Bullets(["x", "y"]),
        Terms([("local-hit", "none")]),
        Table((Column("a"),), [Row(("1",))]),
        Timeline([TimelineRow("+1 s", "step 1", "began", [("rank 0", "ran")])]),
        Command("kvtrace docs hook-raised"),
    ]
    assert {type(part) for part in parts} == set(typing.get_args(Part))
    text, page = both(*parts)
    assert text == (
        "Title\none · two\n\nrun a_b\n\nFAULT  hook-raised · 3 tokens\n"
        "  Evidence   first\n             second\n"
        "  Remedy     only\n  x\n  y\n  local-hit  none\n  a\n  1\n\n        +1 s  step 1       began\n"
        "                             rank 0  ran\n\nNext  kvtrace docs hook-raised\n"
    )
    assert page == (
        "### Title\n\none · two  \n\n**run `a_b`**\n\n**FAULT** `hook-raised` · 3 tokens\n\n"
        "Evidence:\n\n- first\n- second\n\nRemedy: only\n\n- x\n- y\n\n- `local-hit`: none\n\n"
        "| a |\n| --- |\n| 1 |\n\n- +1 s · step 1: began\n  - rank 0: ran\n\n"
        "Next: `kvtrace docs hook-raised`\n"
    )


def test_columns_that_say_nothing_are_left_out() -> None:
    rows = [Row((Code("hook"), "", "100 % -> 0 %", "")), Row((Code("op"), "", "5 % -> 12 %", ""))]
    text, page = both(Table(COLUMNS, rows, head=False))
    assert text.splitlines() == ["  hook  100 % -> 0 %", "  op    5 % -> 12 %"]
    assert page.splitlines()[0] == "| what | values |"


def test_prose_stands_beside_its_row_or_under_it() -> None:
    row = Row(("name", "layers", "1 -> 2", "called in few of the steps in which it was due"))
    beside, _ = both(Table(COLUMNS, [row], head=False))
    assert len(beside.splitlines()) == 1
    wrapped, _ = both(Table(COLUMNS, [row], head=False), width=60)
    assert [line[:24].strip() for line in wrapped.splitlines()] == ["name  layers  1 -> 2", ""]
    under, _ = both(Table(COLUMNS, [Row(("name" * 9, *row.cells[1:]))], head=False), width=60)
    assert under.splitlines()[1].startswith("      called in few")


def test_a_brief_table_says_how_many_rows_are_left_out() -> None:
    rows = [Row((str(number),)) for number in range(60)]
    text, page = both(Table((Column("n"),), rows, "Numbers", brief=3))
    assert text.splitlines() == ["Numbers", "  0", "  1", "  2", "  and 57 more (--format json has them all)"]
    assert page.startswith("### Numbers\n\n| n |") and page.endswith("| 49 |\n\nand 10 more\n")


def test_bars_and_totals() -> None:
    rows = [Row(("saved", "50 %"), "good", bar=0.5), Row(("all", "100 %"), total=True)]
    text, page = both(Table((Column("outcome"), Column("share", right=True)), rows, "Ledger"))
    assert text.splitlines() == ["Ledger   share", "  saved   50 %  ████", "  all    100 %"]
    assert "| **all** | **100 %** |" in page and "█" not in page


def test_style_needs_colours() -> None:
    page: Page = [Paragraph("said", "bad")]
    assert "\x1b[31m" in terminal(page, Screen(colours="truecolor")) and terminal(page, Screen()) == "said\n"
