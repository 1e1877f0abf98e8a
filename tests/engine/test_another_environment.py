"""A vLLM that lives in another virtual environment, where kvtrace cannot be imported."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from kvtrace.report.read import read_report

from .server import KVTRACE

pytestmark = pytest.mark.engine
OFFLINE = Path(__file__).parent / "offline.py"


def other_environment(path: Path) -> Path:
    """A venv that sees this one's packages, but not the checkout that kvtrace is installed from."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(path)], check=True)
    python = path / "bin" / "python"
    (site,) = path.glob("lib/python*/site-packages")
    (site / "vllm-from-there.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def test_it_is_traced_and_nothing_is_written_into_it(tmp_path, vllm_env, tiny_model):
    python = other_environment(tmp_path / "venv")
    assert subprocess.run([python, "-c", "import kvtrace"], capture_output=True, cwd=tmp_path).returncode
    before = sorted(path for path in (tmp_path / "venv").rglob("*") if "__pycache__" not in path.parts)
    run = subprocess.run(
        [*KVTRACE, "run", "-o", tmp_path / "run", "--", python, OFFLINE, tiny_model, tmp_path / "store"],
        env=vllm_env | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_PLUGINS": "some_other_plugin"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 3, run.stderr[-3000:]
    report = read_report(tmp_path / "run" / "report.json")
    assert report["requests"]["total"] == 6
    assert report["ledger"]["saves"]["accounts"]["saved"] > 0
    after = sorted(path for path in (tmp_path / "venv").rglob("*") if "__pycache__" not in path.parts)
    assert after == before
