"""Who sits at the terminal is told once where to look; a log file gets nothing."""

from __future__ import annotations

from pathlib import Path

from kvtrace.launch.status import Status
from kvtrace.trace.format import SPOOL_DIR


def test_one_line_once_a_process_records(tmp_path: Path) -> None:
    said: list[str] = []
    status = Status(tmp_path, "reports/a run", True, said.append)
    status.look()  # no directory yet
    (tmp_path / SPOOL_DIR).mkdir()
    status.look()
    assert not said
    (tmp_path / SPOOL_DIR / "front-1.kvt").touch()
    status.look()
    status.look()
    assert said == ["vLLM is traced; to look at it while it runs: kvtrace top 'reports/a run'"]


def test_nothing_where_no_terminal_is(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / SPOOL_DIR).mkdir()
    (tmp_path / SPOOL_DIR / "front-1.kvt").touch()
    Status(tmp_path, "r", False, said.append).look()
    assert not said
