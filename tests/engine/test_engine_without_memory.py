"""A vLLM that runs out of memory before its first step: the ordinary report, and one line that says why."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm_env import vllm_env as make_vllm_env

from kvtrace.report.read import read_report

from .server import KVTRACE
from .test_traced_is_like_untraced import run_offline

pytestmark = pytest.mark.engine


def test_the_verdict_names_the_stage_and_the_exception(tmp_path: Path, tiny_model: Path) -> None:
    env = make_vllm_env() | {"VLLM_CPU_KVCACHE_SPACE": "1000000"}  # GiB
    run = tmp_path / "run"
    child = run_offline(env, tiny_model, tmp_path / "store", prefix=(*KVTRACE, "run", "-o", str(run), "--"))
    assert child.returncode == 1 and "Traceback" in child.stderr  # vLLM's own end, as without kvtrace
    report = read_report(run / "report.json")
    assert "determine_available_memory of a worker raised" in report["verdict"]
    assert report["verdict"].endswith(".") and not report["verdict"].endswith("..")
    (line,) = [note for note in report["limits"]["notes"] if note.startswith("the engine did not start: ")]
    assert "KV" in line and "\n" not in line
