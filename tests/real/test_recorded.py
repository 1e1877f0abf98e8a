"""Recorded runs of real connectors (scripts/real_connectors.py), explained by today's kvtrace.

``runs/`` holds the recordings, as scripts/real/keep_run.py makes them. What lay in the store of each is in
the table here; reports/real-connectors.md says how it was counted.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
import real_connectors as real

from kvtrace.report.build import build_report

RUNS = Path(__file__).parent / "runs"
CASES = {case.name: case for case in real.cases()}
AT_REST = {
    "vua-in-one-step": 1716,
    "kvblockd-up": 960,
    "kvblockd-down": 0,
    "example-chunked": 640,
    "offloading": 992,
    "multi": 992,
    "decode-bench": 0,
    "lmcache-in-one-step": 896,
    "nixl": 0,
}


def test_each_recording_is_small_and_in_the_table() -> None:
    files = {file.name.removesuffix(".tar.xz"): file for file in RUNS.iterdir()}
    assert set(files) == set(AT_REST)
    assert max(file.stat().st_size for file in files.values()) < 50_000


@pytest.mark.parametrize("name", AT_REST)
def test_a_recorded_run_has_its_finding_and_no_number_too_high(name: str, tmp_path: Path) -> None:
    with tarfile.open(RUNS / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    result = real.Result(CASES[name], truth=real.Truth(AT_REST[name], "counted when it was recorded"))
    result.take(build_report(tmp_path))
    assert result.first_right, (result.first, result.findings)
    assert result.number in ("right", "read, and not at rest"), (result.number, result.grades)
