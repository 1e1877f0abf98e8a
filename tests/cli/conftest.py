"""kvtrace as a user's shell calls it, in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvtrace.cli.app import main


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """``shell("explain", path)``: the exit code, stdout and stderr."""

    def call(*words: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call
