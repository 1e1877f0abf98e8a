"""benchmarks/analyze.py: the run that it makes has the short one's shape and outcomes, its table what was
measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvtrace.report.build import build_report

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def analyze(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
    import analyze

    return analyze


@pytest.mark.parametrize("engines", [1, 3])
def test_a_repeated_run_has_the_outcomes_so_many_times(
    analyze: ModuleType, tmp_path: Path, engines: int
) -> None:
    analyze.made_up(tmp_path / "short")
    short = build_report(tmp_path / "short")
    made, requests, spools = analyze.repeat(tmp_path / "short", tmp_path / "long", 40_000, engines)
    long = build_report(tmp_path / "long")
    times = requests // short["requests"]["total"]
    assert 20_000 < made < 80_000 and times > 1 and spools == 2 * engines
    assert long["requests"]["total"] == requests and len(long["run"]["engines"]) == engines
    for book in ("saves", "loads"):
        accounts = short["ledger"][book]["accounts"]  # type: ignore[literal-required]
        want = {name: n * times for name, n in accounts.items()}
        assert long["ledger"][book]["accounts"] == want  # type: ignore[literal-required]
    assert not long["limits"]["damaged"] and [one["id"] for one in long["findings"]] == [
        one["id"] for one in short["findings"]
    ]


def test_wrong_outcomes_are_no_measurement(analyze: ModuleType) -> None:
    analyze._check({"saves": {"saved": 2}}, {"saves": {"saved": 6}}, 3)
    with pytest.raises(SystemExit, match="outcomes"):
        analyze._check({"saves": {"saved": 2}}, {"saves": {"saved": 5}}, 3)


def test_the_last_line_says_how_the_time_grows(analyze: ModuleType) -> None:
    small = analyze.Row(1_000_000, 10, 2, 64_000_000, (0.1, 0.05), (1.5, 1.0), 100.0)
    large = small._replace(records=10_000_000, read=(1.0, 0.5), analysis=(9.0, 8.0), peak=200.0)
    assert analyze.last_line([small, large]) == "analyze: ratio_1e7=16.0 exponent=0.90 peak_mb=200"
    assert "ratio_1e7=none exponent=nan" in analyze.last_line([small])
    assert (
        "| 1,000,000 | 10 | 2 | 64 MB | 0.10 s, 0.05 s | 1.50 s, 1.00 s | 20.0 | 100 MiB |"
        in analyze.table([small], "made up")
    )


def test_what_numpy_reads_is_all_of_it(analyze: ModuleType, tmp_path: Path) -> None:
    analyze.made_up(tmp_path / "run")
    (wall, cpu), _, rest = analyze._timed(analyze._ANALYSE, tmp_path / "run", False)
    assert wall > 0 and cpu > 0
    assert json.loads(rest)["saves"] == build_report(tmp_path / "run")["ledger"]["saves"]["accounts"]
