"""vLLM's attention was imported before kvtrace came: what hangs on it is not observed, and never 0 of N."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvtrace.report.read import read_report

from .server import KVTRACE

pytestmark = pytest.mark.engine
OFFLINE = Path(__file__).parent / "offline.py"

# ``-I`` leaves PYTHONPATH out, so that kvtrace comes with vLLM's plugins: after this import.
EARLY = """
import runpy, sys
import vllm.model_executor.layers.attention.attention
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])  # where the script keeps its connector
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_unhooked_ops_are_not_observed_and_the_books_kept(
    tmp_path: Path, vllm_env: dict[str, str], tiny_model: Path
) -> None:
    early = tmp_path / "early.py"
    early.write_text(EARLY)
    command = [sys.executable, "-I", early, OFFLINE, tiny_model, tmp_path / "store"]
    run = subprocess.run(
        [*KVTRACE, "run", "-o", tmp_path / "run", "--", *command],
        env=vllm_env | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 3, run.stderr[-3000:]
    report = read_report(tmp_path / "run" / "report.json")
    targets = report["instrumentation"]["targets"]
    assert {one["id"] for one in targets if one["status"] == "late"} == {
        "attention-decorator",
        "op-registration",
    }
    assert report["coverage"]["ops"] == []
    assert report["ledger"]["saves"]["accounts"]["saved"] > 0
    why = {one["id"]: one["why"] for one in report["not_observed"]}
    assert "imported before kvtrace came" in why["attention-ops"]
    assert "imported before kvtrace came" in why["direct-call-bypass"]
