"""What people read: golden pages, plain pipes, and strings that would like to be more than text."""

from __future__ import annotations

import json
import os
import re
import unicodedata
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample import sample, with_loads

from kvtrace.render.html.page import page as html_page
from kvtrace.render.layout import bar, clean, names, wrap
from kvtrace.render.markdown import markdown
from kvtrace.render.page import Screen
from kvtrace.render.report import report_page
from kvtrace.render.terminal import terminal
from kvtrace.report.load import check_report
from kvtrace.report.model import Report
from kvtrace.words import count, duration, percent, size

GOLDEN = Path(__file__).parent / "golden"
SOURCE = "reports/20261120-181500-vua"
HOSTILE = "[red]x[/red] [/] \x1b[2J\x1b]8;;http://evil\x07 \x9b31m \u202e | ` @me #12 <b> \ud800\n## no"


def as_text(report: Report, width: int = 100, colours: Literal["truecolor"] | None = None) -> str:
    return terminal(report_page(report, SOURCE, SOURCE), Screen(width, colours))


def as_markdown(report: Report) -> str:
    return markdown(report_page(report, SOURCE, SOURCE))


def golden(name: str, text: str) -> None:
    """Compares with the golden file; KVTRACE_GOLDEN=write makes it anew."""
    path = GOLDEN / name
    if os.environ.get("KVTRACE_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_golden_text() -> None:
    golden("flagship.txt", as_text(sample()))
    golden("uneven.txt", as_text(with_loads()))


def test_golden_markdown() -> None:
    """The parts of other pages are the same: test_page has each of them in both printers."""
    golden("flagship.md", as_markdown(sample()))


def test_profiles_are_named() -> None:
    report = sample()
    report["run"]["profiles"] = ["profiles/worker-r0-7-ab.speedscope.json"]
    for page in (as_text(report), as_markdown(report), html_page(report)):
        assert "worker-r0-7-ab.speedscope.json" in page and "speedscope.app" in page


def test_plain_has_no_escape_and_colour_has_the_same_words() -> None:
    plain = as_text(with_loads())
    coloured = as_text(with_loads(), colours="truecolor")
    assert "\x1b" not in plain and "\x1b[" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == plain


@pytest.mark.parametrize("width", [72, 80, 100, 200])
def test_lines_fit_where_words_allow_and_no_number_is_torn(width: int) -> None:
    page = as_text(sample(), width)
    tables = page.index("Coverage")
    for line in page[:tables].splitlines():
        assert len(line) <= width or " " not in line.strip(), line
    assert "58 720" in page and not re.search(r"\d\n *%", page)


def hostile_report() -> Report:
    """Every free string of the report is hostile."""

    def spoil(value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: spoil(part, name) for name, part in value.items()}
        if isinstance(value, list):
            return [spoil(part, key) for part in value]
        fixed = ("schema", "unit", "trust", "severity", "role", "status", "clock", "kind")
        return f"{HOSTILE} {value}" if isinstance(value, str) and key not in fixed else value

    report = spoil(with_loads())
    for book in report["ledger"].values():
        book["accounts"] = {f"{HOSTILE}{name}": n for name, n in book["accounts"].items()}
    return check_report(json.loads(json.dumps(report)), "here")


def test_hostile_strings_are_harmless_in_a_terminal() -> None:
    page = as_text(hostile_report(), colours="truecolor")
    page = re.sub(r"\x1b\[[\d;]*m", "", page)
    assert "[red]x[/red] [/]" in page and "\\x1b[2J" in page and "\\x9b31m" in page
    assert all(char.isprintable() or char == "\n" for char in page)
    page.encode("utf-8")


def test_hostile_strings_are_harmless_in_markdown() -> None:
    page = as_markdown(hostile_report())
    page.encode("utf-8")
    assert "\x1b" not in page and "\n## no" not in page
    spans = re.compile(r"(?<!\\)(`+)(?!`).*?(?<!`)\1(?!`)")
    for line in page.splitlines():
        bare = spans.sub("", line)
        assert not re.search(r"(?<!\\)[`<]", bare.replace("| <0.1 %", "")), line
        assert "@me" not in bare and "#12" not in bare
    for block in re.findall(r"(?:^\|.*\|\n)+", page, re.M):
        columns = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(columns) == 1, block


def test_empty_report() -> None:
    report = sample()
    report["run"]["engines"] = []
    report["run"]["processes"] = []
    report["run"]["vllm"] = None
    report["stages"] = []
    report["findings"] = report["ruled_out"] = report["not_observed"] = report["timing"] = []  # type: ignore[typeddict-item]
    report["coverage"] = {"hooks": [], "ops": [], "summary": []}
    report["requests"] = {"total": 0, "shown": 0, "rows": []}
    book = report["ledger"]["saves"]
    report["ledger"]["saves"] = {**book, "total": 0, "accounts": {}, "tokens": {}, "total_tokens": 0.0}
    page = as_text(check_report(report, "here"))
    assert "no engine was seen" in page and "No findings" in page and "explain" in page.splitlines()[-1]
    assert "No findings" in as_markdown(report)


def test_words_for_numbers() -> None:
    assert [count(n) for n in (0, 58720, 1234567, 0.5, 1000.04)] == [
        "0",
        "58 720",
        "1 234 567",
        "0.5",
        "1 000",
    ]
    assert [percent(x) for x in (0, 0.0001, 0.879, 0.9999, 1)] == [
        "0 %",
        "<0.1 %",
        "87.9 %",
        ">99.9 %",
        "100 %",
    ]
    assert [duration(s) for s in (0, 9e-7, 0.0123, 1.25, 61.2, 150, 7300)] == [
        "0 s", "900 ns", "12 ms", "1.2 s", "61 s", "2 min 30 s", "2 h 1 min",
    ]  # fmt: skip
    assert (size(12), size(2048), size(3 << 30)) == ("12 B", "2.0 KiB", "3.0 GiB")
    assert (bar(0), bar(1e-9), bar(0.5), bar(1)) == ("", "▏", "████", "████████")
    assert names([f"worker {n}" for n in range(64)]) == "worker 0 .. worker 63"
    assert names(["engine core", "worker 0", "worker 1", "worker 2"]) == "engine core, worker 0 .. worker 2"


@given(st.text(max_size=200))
def test_clean_is_one_printable_line(text: str) -> None:
    assert all(char.isprintable() or unicodedata.category(char) == "Zs" for char in clean(text))
    assert len(clean(text).splitlines()) <= 1


@given(st.lists(st.text("abc 1.%", min_size=1, max_size=9), max_size=30), st.integers(10, 60))
def test_wrap_keeps_every_word(words: list[str], width: int) -> None:
    text = " ".join(" ".join(words).split())
    lines = wrap(text, width, "> ")
    assert " ".join(line[2:].strip() for line in lines).split() == text.split()


def test_states_are_told_where_the_model_has_any() -> None:
    report = sample()
    assert "States" not in as_text(report)
    saves = {"total": 10, "accounts": {"taken": 2, "not-taken": 8}}
    loads = {"total": 2, "accounts": {"not-given": 2}}
    counts: Any = {"unit": "states", "layers": 2, "pairs": 2, "requests": 5, "grade": "read"}
    report["ledger"]["states"] = {**counts, "saves": saves, "loads": loads}
    check_report(report, "here")
    for text in (as_text(report), as_markdown(report), html_page(report)):
        assert "saves: of 10 states 8 not read at the end of the prompt, 2 read by the connector" in text
        assert "loads: of 2 states 2 not written" in text


def test_what_another_connector_loaded_is_not_called_the_gpus() -> None:
    """Of a store that is written to alone local-hit holds what the one beside it loaded."""
    report = sample()
    ledger = {**report["ledger"]["saves"], "accounts": {"saved": 8}, "tokens": {"saved": 1, "local-hit": 1}}
    part: Any = {
        "name": "Archive", "index": 1, "ledger": {**report["ledger"], "saves": ledger}, "verdict": "",
        "coverage": [], "findings": [], "ruled_out": [], "not_observed": [],
    }  # fmt: skip
    report["connectors"] = [part]
    assert "With Archive alone (local-hit: or loaded by another)" in as_text(report, 200)
