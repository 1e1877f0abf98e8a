"""Who sits at the terminal is told once where to look; a log file gets nothing."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest
from launching import ENVIRON, RUN

RECORDS = "touch 'a run/spool/front-1.kvt'; sleep 1.5"


@pytest.mark.parametrize("terminal", [True, False])
def test_one_line_once_a_process_records(tmp_path: Path, terminal: bool) -> None:
    ours, theirs = pty.openpty() if terminal else os.pipe()
    command = [*RUN, "-o", "a run", "--", "/bin/sh", "-c", RECORDS]
    subprocess.run(command, cwd=tmp_path, env=ENVIRON, stderr=theirs, check=False)
    os.set_blocking(ours, False)
    said = os.read(ours, 1 << 16).decode()
    line = "kvtrace: vLLM is traced; to look at it while it runs: kvtrace top 'a run'"
    assert said.count(line) == terminal
