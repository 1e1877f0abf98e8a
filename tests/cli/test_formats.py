"""Formats as a table: a row is all that a format needs, and nothing is printed in a format without one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from sample import with_loads

from kvtrace.cli import check, diff, docs, doctor, explain, requests, scenario, verify, why
from kvtrace.cli.writing import write_file
from kvtrace.render.formats import Format
from kvtrace.report.digest import seal

Shell = Callable[..., tuple[int, str, str]]
TABLES: dict[str, Sequence[Format[Any]]] = {
    "explain": explain.FORMATS,
    "requests": requests.FORMATS,
    "why": why.FORMATS,
    "check": check.FORMATS,
    "diff": diff.FORMATS,
    "docs": docs.FORMATS,
    "doctor": doctor.FORMATS,
    "verify": verify.FORMATS,
    "scenario list": scenario.FORMATS,
}
REQUIRED = {"why": ["--request", "r"]}


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(seal(with_loads())))
    return path


@pytest.mark.parametrize("verb", TABLES)
def test_help_and_choice_come_from_the_rows(shell: Shell, verb: str) -> None:
    names = [one.name for one in TABLES[verb]]
    assert names[0] == "text" and len(set(names)) == len(names) and {"markdown", "json"} <= set(names)
    _, out, _ = shell(*verb.split(), "--help")
    assert f"--format {'|'.join(names)}" in out and "[default: text]" in " ".join(out.split())


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        *((verb, "nonsense") for verb in TABLES),
        *(("explain", name) for name in ("TEXT", "", "tex", "\x1b[2J")),
    ],
)
def test_a_name_without_a_row_is_a_usage_error(shell: Shell, report: Path, verb: str, name: str) -> None:
    paths = {"diff": [str(report)] * 2, "docs": [], "doctor": [], "verify": [], "scenario list": []}.get(
        verb, [str(report)]
    )
    code, out, err = shell(*verb.split(), *paths, *REQUIRED.get(verb, []), "--format", name)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert ", ".join(one.name for one in TABLES[verb]) in err and "\x1b" not in err


def test_every_format_of_a_report_prints_something_of_its_own(shell: Shell, report: Path) -> None:
    for verb in ("explain", "check", "diff", "requests"):
        paths = [str(report)] * (2 if verb == "diff" else 1)
        printed = [shell(verb, *paths, "--format", one.name)[1] for one in TABLES[verb]]
        assert len(set(printed)) == len(printed) and all(printed)


def test_text_and_markdown_say_the_same(shell: Shell, report: Path) -> None:
    """Every word of one stands in the other, markup and titles aside; an id may be shortened."""
    for verb, *options in (["explain", "-v"], ["requests"]):
        text, markdown = (
            shell(verb, *options, str(report), "--format", name)[1] for name in ("text", "markdown")
        )
        markdown = re.sub("[`*|#]", " ", markdown.replace("\\", "").replace("\u200b", ""))
        text = re.sub("[█▏▎▍▌▋▊▉]", " ", text)
        words = {word.strip(":,.;()") for word in markdown.split()}
        missing = {word.strip(":,.;()") for word in text.split()} - words
        missing = {word for word in missing if not any(one.startswith(word) for one in words)}
        assert not missing, missing


def test_json_options_of_check_are_the_row(shell: Shell, report: Path, tmp_path: Path) -> None:
    for name, option in (("junit", "--junit"), ("sarif", "--sarif")):
        file = tmp_path / f"out.{name}"
        code, out, _ = shell("check", str(report), "--format", name, option, str(file))
        assert code == 1 and file.read_text() == out
    assert shell("check", str(report), "--json") == shell("check", str(report), "--format", "json")


def test_a_written_file_has_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        write_file(tmp_path / "private", "x", replace=False)
        os.umask(0o002)
        write_file(tmp_path / "shared", "x", replace=False)
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("private", "shared")] == [0o600, 0o664]
