"""The tables of an export: every record once, what was asked for and no more, nothing foreign unescaped."""

from __future__ import annotations

import csv
import os
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small_run import recorded
from synth import Policy, Prompt, Sim, SpoolFile, nothing, run_json

from kvtrace import causes, ledger
from kvtrace.errors import KvtraceError
from kvtrace.export.events import EXPORTED
from kvtrace.export.run import open_run
from kvtrace.export.selection import Wanted, parse_layers, parse_steps
from kvtrace.export.tables import PARTITIONS, TABLES
from kvtrace.export.write import BY_NAME as FORMATS
from kvtrace.report.build import build_report
from kvtrace.trace import rows
from kvtrace.trace.format import Kind
from kvtrace.trace.reader import Spool, spool_paths

Shell = Callable[..., tuple[int, str, str]]
Rows = list[dict[str, str]]


def tables(shell: Shell, run: Path, *options: str) -> dict[str, Rows]:
    """The CSV files of an export, by table."""
    place = run.parent / "out"
    code, out, err = shell("export", run, "--format", "csv", "-o", place, "--force", *options)
    assert (code, err) == (0, "") and out.startswith("wrote ")
    found = {}
    for table in TABLES:
        with open(place / f"{table.name}.csv", encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            assert tuple(reader.fieldnames or ()) == (*(one.name for one in PARTITIONS), *table.names)
            found[table.name] = list(reader)
    return found


def recorded_kinds(run: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    for path in spool_paths(run):
        for chunk in Spool(path).chunks():
            kinds, counts = np.unique(rows.kind(chunk[:, 0]), return_counts=True)
            found.update(
                {Kind(k).name.lower(): n for k, n in zip(kinds.tolist(), counts.tolist(), strict=True)}
            )
    return Counter({kind: n for kind, n in found.items() if kind in {one.name.lower() for one in EXPORTED}})


def test_every_record_is_one_event(shell: Shell, run: Path) -> None:
    events = tables(shell, run)["events"]
    assert Counter(row["kind"] for row in events) == recorded_kinds(run)
    saves = [row for row in events if row["name"] == "save_kv_layer" and row["slots"] == "512"]
    assert {(row["rank"], row["layer"].split(".")[2]) for row in saves} == {
        ("0", "0"), ("0", "1"), ("1", "0"), ("1", "1"),
    }  # fmt: skip
    assert {row["rank"] for row in events if row["side"] == "scheduler"} == {"-1"}
    chunk = next(row for row in events if row["kind"] == "chunk" and row["start"] == "512")
    assert (chunk["request"], chunk["tokens"], chunk["prompt"]) == ("cmpl-7b00-0", "188", "700")
    assert chunk["layer"] == chunk["dur_ns"] == chunk["mode"] == ""


def test_the_ledger_and_the_findings_are_those_of_the_report(shell: Shell, run: Path) -> None:
    found, report = tables(shell, run), build_report(run)
    for name in ("saves", "loads"):
        mine = [row for row in found["ledger"] if row["ledger"] == name]
        assert sum(int(row["token_layers"]) for row in mine) == report["ledger"][name]["total"]  # type: ignore[literal-required]
    assert [row["id"] for row in found["findings"] if row["status"] == "found"] == [
        one["id"] for one in report["findings"]
    ]
    assert len([row for row in found["findings"] if row["status"] == "ruled out"]) == len(report["ruled_out"])
    assert {row["id"]: row["verdict"] for row in found["requests"]} == {
        row["id"]: row["verdict"] for row in report["requests"]["rows"]
    }


def test_a_step_has_a_row_of_the_scheduler_and_of_each_worker(shell: Shell, run: Path) -> None:
    steps = tables(shell, run)["steps"]
    assert Counter(row["rank"] for row in steps) == {"-1": 6, "0": 6, "1": 6}
    assert {row["forward"] for row in steps if row["side"] == "worker"} == {"True"}
    assert {row["forward"] for row in steps if row["side"] == "scheduler"} == {""}


def test_only_the_steps_that_are_asked_for(shell: Shell, run: Path) -> None:
    found = tables(shell, run, "--steps", "5:5")
    assert {row["step"] for row in found["events"]} == {"5", ""}
    assert [row["request"] for row in found["events"] if not row["step"]] == ["cmpl-7b00-0"]  # its arrival
    assert {row["step"] for row in found["steps"]} == {"5"}
    assert [row["id"] for row in found["requests"]] == ["cmpl-7b00-0"]


def test_only_the_layers_that_are_asked_for(shell: Shell, run: Path) -> None:
    events = tables(shell, run, "--layers", "1")["events"]
    assert {row["layer"] for row in events} == {"", "model.layers.1.self_attn.attn"}
    assert len([row for row in events if not row["layer"]]) == len(
        [row for row in tables(shell, run)["events"] if not row["layer"]]
    )


def test_only_the_request_that_is_asked_for_and_its_steps(shell: Shell, run: Path) -> None:
    found = tables(shell, run, "--request", "mine")
    assert [row["id"] for row in found["requests"]] == ["cmpl-7f3a-0"]
    assert {row["request"] for row in found["events"]} == {"cmpl-7f3a-0", ""}
    assert {row["step"] for row in found["events"] if row["kind"] == "exec"} == {"1", "4"}  # prefill, its end


def test_words_for_steps_and_layers() -> None:
    assert parse_steps("") is None and parse_steps("3:9") == (3, 9)
    assert parse_steps(":9") == (1, 9) and parse_steps("7:") == (7, (1 << 32) - 1)
    for bad in ("9", "9:3", "0:3", "a:b", "1:2:3", "-1:5", "1:99999999999"):
        with pytest.raises(KvtraceError, match="no range of steps"):
            parse_steps(bad)
    names = [f"model.layers.{n}.attn" for n in range(12)]
    assert parse_layers("", names) is None
    assert parse_layers("1,10-11", names) == {names[1], names[10], names[11]}
    assert parse_layers("layers.11", names) == {names[11]}
    assert parse_layers("0", ["a", "b"]) == {"a"}
    for bad in ("12", "x", "", "3-1"):
        with pytest.raises(KvtraceError, match="no layer"):
            parse_layers(f"1,{bad}", names)


def test_text_of_others_obeys_nobody(shell: Shell, tmp_path: Path) -> None:
    """Ids come from clients: no line break, no escape sequence, no formula reaches a file."""
    folder = tmp_path / "run"
    sim = Sim(folder)
    sim.serve([Prompt('=cmd|"x"!A1\r\n\x1b[2J', 64), Prompt("@a,b", 64)], Policy(nothing))
    sim.write()
    run_json(folder)
    found = tables(shell, folder)
    ids = {row["id"] for row in found["requests"]}
    assert ids == {'\'=cmd|"x"!A1  \\x1b[2J', "'@a,b"}
    assert "\x1b" not in (tmp_path / "out" / "events.csv").read_text(encoding="utf-8")


def test_an_export_replaces_nothing_unasked(shell: Shell, run: Path, tmp_path: Path) -> None:
    place = tmp_path / "out"
    assert shell("export", run, "--format", "csv", "-o", place)[0] == 0
    (place / "mine.txt").write_text("kept")
    before = (place / "events.csv").read_bytes()
    code, out, err = shell("export", run, "--format", "csv", "-o", place, "--steps", "1:1")
    assert (code, out) == (2, "") and err.count("\n") == 1 and "there already" in err and "--force" in err
    assert (place / "events.csv").read_bytes() == before
    assert shell("export", run, "--format", "csv", "-o", place, "--steps", "1:1", "--force")[0] == 0
    assert (place / "events.csv").read_bytes() != before and (place / "mine.txt").read_text() == "kept"
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]  # nothing half done is left


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("nowhere", "--format", "csv"), "no such file or directory"),
        ((".", "--format", "csv"), "no spools"),
        (("run", "--format", "xls"), "--format 'xls' is not known: write one of perfetto"),
        (("run", "--format", "csv", "--steps", "5:1"), "'5:1' is no range of steps"),
        (("run", "--format", "csv", "--layers", "77"), "no layer '77': 2 layers own KV"),
        (("run", "--format", "csv", "--request", "zzz"), "no such request: zzz"),
        (("run", "--format", "csv", "-o", "file"), "no directory: file"),
        (("run", "--format", "perfetto", "-o", "run"), "a directory, not a file: run"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    shell: Shell, run: Path, words: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    Path("file").write_text("x")
    code, out, err = shell("export", *words)
    assert (code, out) == (2, "") and err.count("\n") == 1 and says in err


def test_two_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    first, second = recorded(tmp_path / "a"), recorded(tmp_path / "b", tag=8)
    text = (second / "run.json").read_text(encoding="utf-8")
    (second / "run.json").write_text(text.replace('"started_wall_ns": 1', '"started_wall_ns": 2'))
    one, other = open_run(first), open_run(second)
    assert one.name == other.name == "test" and one.key != other.key
    moved = tmp_path / "elsewhere"
    first.rename(moved)
    assert open_run(moved).key == one.key


def test_times_of_one_host_are_on_one_clock(tmp_path: Path) -> None:
    """A wall clock that was set between the starts of two processes moves nothing."""
    from kvtrace.export.run import _clock

    known: list[tuple[str, int]] = []
    assert _clock(known, "a", 5_000) == 5_000
    assert _clock(known, "a", 900_000) == 5_000  # less than a second off
    assert _clock(known, "b", 7_000) == 7_000
    assert _clock(known, "a", 3_000_000_000) == 3_000_000_000  # another machine of that name


@pytest.mark.parametrize("kind", sorted(FORMATS))
def test_a_header_with_impossible_numbers_is_no_obstacle(shell: Shell, tmp_path: Path, kind: str) -> None:
    run = tmp_path / "run"
    header = {"pid": 10**30, "ppid": 1, "role": "scheduler", "perf_ns": -(10**40), "wall_ns": 10**40}
    sim = Sim(run, base=SpoolFile(run, "scheduler-1-7", header))
    sim.serve([Prompt("a", 64)], Policy(nothing))
    sim.write()
    assert shell("export", run, "--format", kind, "-o", tmp_path / "out")[0] == 0


def test_a_kind_of_record_that_is_gone_can_be_cut_too(run: Path) -> None:
    """Spools of other versions hold kinds that this one does not know."""
    gone = np.zeros((2, 8), dtype=np.int64)
    gone[:, 0] = 0xFE
    for wanted in (Wanted(steps=(1, 1)), Wanted(layers="0")):
        assert len(open_run(run, wanted).selection.of(gone, {})) == 2


def test_the_books_are_of_the_whole_run(run: Path) -> None:
    part = open_run(run, Wanted(steps=(1, 1)))
    whole = causes.diagnose(ledger.read_run(run))
    assert part.report["ledger"]["saves"]["total"] == whole.saves.total


def test_the_page_and_the_program_name_the_same_columns() -> None:
    """The page is made of the tables; the header of each file is held to them by ``tables``."""
    page = (Path(__file__).resolve().parents[2] / "kvtrace" / "export" / "tables.md").read_text(
        encoding="utf-8"
    )
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", page, re.MULTILINE | re.DOTALL))
    assert list(sections) == [table.name for table in TABLES]
    for table in TABLES:
        rows_of_page = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \|", sections[table.name], re.MULTILINE)
        assert rows_of_page == [(one.name, one.type, one.unit) for one in table.columns]
