"""A vLLM that runs out of memory before its first step: the ordinary report, and one line that says why."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from side_by_side import Done, Place, Ran, Script

from kvtrace.report.load import read_report

pytestmark = pytest.mark.engine
OFFLINE = Path(__file__).parent / "offline.py"


def without_memory(place: Place) -> Done:
    gib = "1000000"
    return place.start(sys.executable, OFFLINE, place.model, place.store, VLLM_CPU_KVCACHE_SPACE=gib)


SCRIPTS = (without_memory,)


def test_the_verdict_names_the_stage_and_the_exception(ran: Mapping[Script, Ran]) -> None:
    run = ran[without_memory]
    assert run.done.returncode == 1 and "Traceback" in run.done.stderr  # vLLM's own end, as without kvtrace
    report = read_report(run.place.run / "report.json")
    assert "determine_available_memory of a worker raised" in report["verdict"]
    assert report["verdict"].endswith(".") and not report["verdict"].endswith("..")
    (line,) = [note for note in report["limits"]["notes"] if note.startswith("the engine did not start: ")]
    assert "KV" in line and "\n" not in line
