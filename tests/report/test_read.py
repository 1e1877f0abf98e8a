"""Whatever a path holds: a report, or one line that says what it is."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutate import mutated
from sample import sample, with_loads

from kvtrace.render.markdown import markdown
from kvtrace.render.page import Screen
from kvtrace.render.report import report_page
from kvtrace.render.terminal import terminal
from kvtrace.report.digest import FIELD, seal
from kvtrace.report.load import ReportError, check_report, parse_report, read_report
from kvtrace.trace.format import pack_header

VALID = json.dumps(seal(with_loads())).encode()
BOOK = sample()["ledger"]["saves"]


def renders(report: Any) -> None:
    """All renderers get through, and their output can be written."""
    page = report_page(report, "x")
    (terminal(page, Screen(100, "truecolor")) + markdown(page)).encode("utf-8")
    json.dumps(report, allow_nan=False)


def changed(**parts: Any) -> bytes:
    return json.dumps({**sample(), **parts}).encode()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "the file is empty"),
        (b" \n", "the file is empty"),
        (b"not json", "not JSON"),
        (VALID[: len(VALID) // 2], "not JSON, or cut short"),
        (b"\xff\xfe\x00binary", "not UTF-8"),
        (b"\x89PNG\r\n\x1a\n" + bytes(range(256)), "not UTF-8"),
        (pack_header({"pid": 1}), "this is a spool"),
        (b"[" * 200_000, "nested too deep"),
        (b'{"schema":' * 100_000, "nested too deep"),
        (b"[]", "no schema field"),
        (b"null", "no schema field"),
        (b'{"a": 1}', "no schema field"),
        (b'{"schema": 1}', "no schema field"),
        (b'{"schema": "sarif"}', "JSON of another kind (schema 'sarif')"),
        (b'{"schema": "kvtrace.run/1"}', "run.json"),
        (b'{"schema": "kvtrace.report/3"}', "kvtrace.report/3 was made by a newer kvtrace"),
        (b'{"schema": "kvtrace.report/1"}', "kvtrace.report/1 was made by an older kvtrace"),
        (b'{"schema": "kvtrace.report/2"}', "lacks 'run'"),
        (b'{"schema": "kvtrace.report/2", "run": NaN}', "a bad number"),
        (b"1" * 5000, "not JSON"),
        (changed(verdict=7), "verdict should be string"),
        (changed(limits=[]), "limits should be object"),
        (changed(ledger={"saves": {**BOOK, "total": 3}, "loads": BOOK}), "not balance"),
    ],
)  # fmt: skip
def test_bad_files_get_one_line(tmp_path: Path, data: bytes, says: str) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(data)
    with pytest.raises(ReportError) as caught:
        read_report(path)
    line = str(caught.value)
    assert says in line and str(path) in line and "\n" not in line and len(line) < 400


def test_paths_that_hold_nothing(tmp_path: Path) -> None:
    def refused(path: str | Path) -> str:
        with pytest.raises(ReportError) as caught:
            read_report(path)
        return str(caught.value)

    assert "no such file" in refused(tmp_path / "absent")
    assert "no run in this directory" in refused(tmp_path)
    (tmp_path / "spool").mkdir()
    assert "no run in this directory" in refused(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    assert "no process loaded the agent" in refused(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "not a file" in refused(tmp_path / "pipe")
    assert "not a file" in refused("/dev/zero")
    assert "no such path" in refused("a\0b")
    assert refused("x" * 10_000)
    assert "cannot read" in refused(tmp_path / "run.json" / "below")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert "cannot read" in refused(tmp_path / "loop")


def test_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    with path.open("wb") as stream:
        stream.truncate(1 << 30)
    with pytest.raises(ReportError, match="larger than any report"):
        read_report(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_file_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(VALID)
    path.chmod(0)
    with pytest.raises(ReportError, match="cannot read"):
        read_report(path)


def test_good_files_and_directories(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_bytes(b"\xef\xbb\xbf" + VALID)  # an editor's byte order mark is no damage
    assert read_report(path) == read_report(str(path)) == read_report(tmp_path) == json.loads(VALID)


@settings(max_examples=200)
@given(st.integers(0, 2**32))
def test_damaged_json_is_refused_or_rendered(seed: int) -> None:
    report = mutated(dict(with_loads()), random.Random(seed))
    try:
        loaded = check_report(json.loads(json.dumps(report)), "here")
    except ReportError as error:
        assert "\n" not in str(error)
        return
    renders(loaded)


@settings(max_examples=200)
@given(
    st.integers(0, len(VALID)),
    st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), max_size=3),
)
def test_damaged_bytes_are_refused(end: int, flips: list[tuple[int, int]]) -> None:
    data = bytearray(VALID)
    for at, octet in flips:
        data[at] = octet
    try:
        loaded = parse_report(bytes(data[: end if not flips else None]), "here")
    except ReportError as error:
        assert "\n" not in str(error)
        return
    assert loaded == json.loads(VALID)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("verdict",), "All is well."),
        (("run", "exit_code"), 7),
        (("requests", "rows", 0, "prompt"), 1),
        (("coverage", "summary", 0, "fired"), 1),
        (("digest",), "sha256:" + "0" * 64),
    ],
)
def test_a_report_that_was_altered_is_refused(tmp_path: Path, path: tuple[Any, ...], value: Any) -> None:
    """Each of these is a valid report: only the checksum tells."""
    report = json.loads(VALID)
    target: Any = report
    for part in path[:-1]:
        target = target[part]
    assert target[path[-1]] != value
    target[path[-1]] = value
    check_report(report, "here")
    file = tmp_path / "report.json"
    file.write_text(json.dumps(report))
    with pytest.raises(ReportError, match="its checksum does not fit"):
        read_report(file)
    del report[FIELD]
    with pytest.raises(ReportError, match="its checksum does not fit"):
        parse_report(json.dumps(report).encode(), "here")


def test_the_checksum_is_of_what_a_report_says_not_its_form() -> None:
    report = json.loads(VALID)
    turned = {name: report[name] for name in reversed(report)}
    for text in (json.dumps(turned, indent=3), json.dumps(report, ensure_ascii=False)):
        assert parse_report(text.encode(), "here") == report
