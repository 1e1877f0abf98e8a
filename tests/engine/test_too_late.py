"""vLLM's attention was imported before kvtrace came: what hangs on it is not observed, and never 0 of N."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from side_by_side import Done, Place, Ran, Script

from kvtrace.report.load import read_report

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


def too_late(place: Place) -> Done:
    early = place.folder / "early.py"
    early.write_text(EARLY)
    return place.start(sys.executable, "-I", early, OFFLINE, place.model, place.store)


SCRIPTS = (too_late,)


def test_unhooked_ops_are_not_observed_and_the_books_kept(ran: Mapping[Script, Ran]) -> None:
    run = ran[too_late]
    assert run.done.returncode == 3, run.done.stderr[-3000:]
    report = read_report(run.place.run / "report.json")
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
