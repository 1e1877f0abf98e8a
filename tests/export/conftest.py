from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# the synthetic runs that the ledger's tests are made of
LEDGER = Path(__file__).resolve().parents[1] / "ledger"
if str(LEDGER) not in sys.path:
    sys.path.insert(0, str(LEDGER))

from small_run import recorded  # noqa: E402

from kvtrace.cli.app import main  # noqa: E402


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return recorded(tmp_path / "run")


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """``shell("export", path)``: the exit code, stdout and stderr."""

    def call(*words: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call
