"""docs/scale.md: its queries, run by DuckDB on the exported tables, give the numbers of the report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import duckdb
import pytest
from scenario_runs import Runs
from small_run import recorded

from kvtrace.report.build import build_report
from kvtrace.report.model import Report

Shell = Callable[..., tuple[int, str, str]]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "scale.md"
VIEWS, OUTCOMES, COVERAGE, REQUESTS = re.findall(r"```sql\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)


def agree(fleet: Path, report: Report) -> None:
    """The queries and the report say the same."""
    with duckdb.connect() as db:
        db.execute(VIEWS.replace("'fleet/", f"'{fleet}/"))
        outcomes = {
            (ledger, f"{outcome}:{cause}" if cause else outcome): amount
            for _, ledger, outcome, cause, amount in db.sql(OUTCOMES).fetchall()
            if amount
        }
        fired = Counter({(rank, layer, hook): n for _, rank, layer, hook, n in db.sql(COVERAGE).fetchall()})
        ((_, requests, tokens),) = db.sql(REQUESTS).fetchall()
    books = (("saves", report["ledger"]["saves"]), ("loads", report["ledger"]["loads"]))
    assert outcomes == {
        (ledger, name): amount
        for ledger, book in books
        for name, amount in book["accounts"].items()
        if amount
    }
    want: Counter[tuple[int, str | None, str]] = Counter()
    for row in report["coverage"]["hooks"]:
        if row["rank"] is not None:
            want[row["rank"], row["layer"], row["hook"]] += row["fired"]
    assert fired == +want and fired
    assert (requests, tokens) == (report["requests"]["total"], report["ledger"]["saves"]["total_tokens"])


def test_the_queries_give_the_numbers_of_the_report(shell: Shell, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    assert shell("export", run, "--format", "parquet", "-o", tmp_path / "fleet")[0] == 0
    agree(tmp_path / "fleet", build_report(run))


@pytest.mark.engine
def test_so_they_do_for_a_run_of_a_real_engine(runs: Runs, shell: Shell, tmp_path: Path) -> None:
    runs.outcome("healthy-chunk-store")
    run = runs.folder("healthy-chunk-store")
    assert shell("export", run, "--format", "parquet", "-o", tmp_path / "fleet")[0] == 0
    agree(tmp_path / "fleet", build_report(run))
