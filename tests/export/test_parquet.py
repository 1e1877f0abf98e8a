"""Parquet: two runs in one folder are one table for DuckDB; the columns are those of the docs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
from small_run import recorded

from kvtrace.export.frames import load
from kvtrace.export.run import open_run
from kvtrace.export.tables import BOOL, BY_NAME, FLOAT, INT, TABLES, TEXT

Shell = Callable[..., tuple[int, str, str]]
SQL_TYPES = {TEXT: "VARCHAR", INT: "BIGINT", FLOAT: "DOUBLE", BOOL: "BOOLEAN"}


def asked(fleet: Path, table: str, what: str, rest: str = "") -> list[tuple[Any, ...]]:
    return duckdb.sql(f"select {what} from read_parquet('{fleet}/{table}/**/*.parquet') {rest}").fetchall()


@pytest.fixture
def fleet(shell: Shell, tmp_path: Path) -> Path:
    place = tmp_path / "fleet"
    for number, name in enumerate("ab"):
        run = recorded(tmp_path / name, tag=7 + number)
        text = (run / "run.json").read_text(encoding="utf-8")
        (run / "run.json").write_text(text.replace('"host": "h"', f'"host": "node {number}"'))
        code, out, err = shell("export", run, "--format", "parquet", "-o", place)
        assert (code, err) == (0, "") and "events " in out
    return place


def test_two_runs_are_one_table(fleet: Path, tmp_path: Path) -> None:
    runs = {open_run(tmp_path / name).key for name in "ab"}
    assert {run for (run,) in asked(fleet, "requests", "distinct run")} == runs
    assert {host for (host,) in asked(fleet, "requests", "distinct host")} == {"node 0", "node 1"}
    saves = asked(
        fleet,
        "events",
        "run, rank, sum(slots)",
        "where kind = 'hook' and name = 'save_kv_layer' group by all",
    )
    assert sorted(saves) == sorted((run, rank, 1024) for run in runs for rank in (0, 1))
    lost = asked(fleet, "ledger", "sum(tokens)", "where ledger = 'saves' and outcome = 'not-saved'")
    assert lost == [(2 * (303 + 188),)]


def test_columns_and_types_are_those_of_the_docs(fleet: Path) -> None:
    for table in TABLES:
        described = duckdb.sql(f"describe select * from read_parquet('{fleet}/{table.name}/**/*.parquet')")
        types = {row[0]: row[1] for row in described.fetchall()}
        assert {one.name: types[one.name] for one in table.columns} == {
            one.name: SQL_TYPES[one.type] for one in table.columns
        }
        assert (types["run"], types["host"], types["rank"]) == ("VARCHAR", "VARCHAR", "BIGINT")
        path = next((fleet / table.name).rglob("*.parquet"))
        for field in pq.read_schema(path):
            column = next(one for one in table.columns if one.name == field.name)
            assert field.metadata[b"unit"].decode() == column.unit
            assert field.metadata[b"meaning"].decode() == column.meaning


def test_the_rows_are_those_of_the_frames(fleet: Path, tmp_path: Path) -> None:
    run = load(tmp_path / "a")
    for name in BY_NAME:
        frame = getattr(run, name)
        written = asked(fleet, name, "count(*)", f"where run = '{frame['run'].iloc[0]}'")
        assert written == [(len(frame),)]


def test_an_export_of_the_same_run_replaces_it_when_asked(shell: Shell, fleet: Path, tmp_path: Path) -> None:
    words = ("export", tmp_path / "a", "--format", "parquet", "-o", fleet, "--steps", "1:1")
    code, _, err = shell(*words)
    assert code == 2 and "there already" in err and err.count("\n") == 1
    assert shell(*words, "--force")[0] == 0
    key = open_run(tmp_path / "a").key
    assert asked(fleet, "steps", "max(step)", f"where run = '{key}'") == [(1,)]
    assert asked(fleet, "steps", "max(step)", f"where run <> '{key}'") == [(6,)]


def test_names_that_no_folder_may_have(shell: Shell, tmp_path: Path) -> None:
    run = recorded(tmp_path / "a")
    text = (run / "run.json").read_text(encoding="utf-8")
    (run / "run.json").write_text(text.replace('"name": "test"', '"name": "../a=b c/é"').replace('"h"', '""'))
    place = tmp_path / "out"
    assert shell("export", run, "--format", "parquet", "-o", place)[0] == 0
    assert asked(place, "requests", "distinct run, host") == [(open_run(run).key, "unknown")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "out"]


def test_without_pyarrow_one_line_says_what_to_install(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    code, out, err = shell("export", tmp_path / "not read", "--format", "parquet")
    assert (code, out) == (2, "")
    assert err == "kvtrace: parquet needs pyarrow: install it: pip install 'kvtrace[parquet]'\n"
