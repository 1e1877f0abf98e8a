"""A recording that stopped in the middle: said first, and nothing is concluded from what was not recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from synth import Chunk, Entry, Fate, Prompt, Rounding, Sim, run_json

from kvtrace.render.brief import brief_text
from kvtrace.render.page import Screen
from kvtrace.report.build import build_report
from kvtrace.trace.format import Stop


def report_of(sim: Sim) -> Any:
    sim.write()
    run_json(sim.dir)
    return build_report(sim.dir)


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        (Stop.WRITE_FAILED, "a write failed (disk full, quota)"),
        (Stop.SIZE_LIMIT, "its spool reached twice the limit (--limit)"),
        (Stop.AGENT_ERROR, "the agent failed there"),
    ],
)
def test_a_worker_whose_recording_stopped(tmp_path: Path, stop: Stop, words: str) -> None:
    """The scheduler goes on: of what it scheduled then, nothing is known."""
    sim = Sim(tmp_path, layers=1)
    sim.serve([Prompt("a", 64, digest=1)], Rounding(32).policy())
    sim.serve(
        [Prompt("b", 128, digest=2)], Rounding(32).policy(), fate=lambda n: Fate(missing_ranks=frozenset({0}))
    )
    sim.workers[0].trailer(stop, 31)
    report = report_of(sim)
    line = f"worker 0 after step 1: {words}; 31 records missing"
    assert report["verdict"].startswith(f"The recording is incomplete ({line}). Of what was recorded: 64 of")
    assert f"the recording is incomplete: {line}" in report["limits"]["notes"]
    assert report["ledger"]["saves"]["accounts"] == {"saved": 64, "not-observed": 128}
    assert not [one for one in report["findings"] if one["severity"] == "fault"]


def test_a_scheduler_whose_recording_stopped(tmp_path: Path) -> None:
    """The connector stores with the last chunk: that of a request in flight was not recorded."""
    sim = Sim(tmp_path, layers=1, batched=64)
    sim.serve([Prompt("a", 64, digest=1)], Rounding(32).policy())
    sim.arrive(Prompt("b", 128, digest=2))
    sim.step([Chunk("b", 0, 64, first=True)], [], prompts={"b": 128})
    sim.scheduler.trailer(Stop.WRITE_FAILED, 5)
    report = report_of(sim)
    assert report["verdict"].startswith("The recording is incomplete (engine core: a write failed")
    assert report["ledger"]["saves"]["accounts"] == {"saved": 64, "not-observed": 64}
    assert not [one for one in report["findings"] if one["severity"] == "fault"]


def test_all_is_not_said_of_a_part(tmp_path: Path) -> None:
    sim = Sim(tmp_path, layers=1)
    sim.one_step("a", 64, [Entry("a", 64, 64, 0)], digest=1, ends=False)
    sim.finish("a", 64, 1)
    whole = report_of(sim)["verdict"]
    assert whole.startswith("All 64 prompt tokens")
    sim.workers[0].trailer(Stop.WRITE_FAILED, 5)
    assert "Of what was recorded: all 64 prompt tokens" in report_of(sim)["verdict"]


def test_a_recording_that_was_ended_on_purpose_is_whole(tmp_path: Path) -> None:
    sim = Sim(tmp_path, layers=1)
    sim.serve([Prompt("a", 64, digest=1)], Rounding(32).policy())
    sim.workers[0].trailer(Stop.CLEAN)
    report = report_of(sim)
    assert "incomplete" not in report["verdict"] and not report["limits"]["notes"]


def test_nothing_is_concluded_of_a_step_that_vllm_broke_off(tmp_path: Path) -> None:
    """Ctrl-C or out of memory before the metadata was bound: no hook could come."""
    sim = Sim(tmp_path, layers=2)
    sim.serve([Prompt("a", 64, digest=1)], Rounding(32).policy())
    broken = Fate(broken_ranks=frozenset({0}))
    sim.serve([Prompt("b", 128, digest=2)], Rounding(32).policy(), fate=lambda n: broken)
    report = report_of(sim)
    assert report["ledger"]["saves"]["accounts"] == {"saved": 128, "not-observed": 256}
    assert not [one for one in report["findings"] if one["severity"] == "fault"]


def test_a_request_not_ended_is_no_fault_of_the_connector(tmp_path: Path) -> None:
    """The engine was killed in the middle of a prompt, or still runs: the next chunk would have filled the
    unit that the last one began."""
    sim = Sim(tmp_path, layers=1, batched=48)
    sim.serve([Prompt("a", 64, digest=1)], Rounding(32).policy())
    sim.arrive(Prompt("b", 128, digest=2))
    sim.step([Chunk("b", 0, 48, first=True)], [Entry("b", 32, 128, 0)], prompts={"b": 128})
    report = report_of(sim)
    assert report["ledger"]["saves"]["accounts"] == {"saved": 96, "not-observed": 16}
    assert not [one for one in report["findings"] if one["severity"] == "fault"]
    assert report["limits"]["notes"][0].startswith("1 of 2 requests had not ended when the recording did")
    assert "1 of 2 requests had not ended" in brief_text(report, Screen())
    assert report["verdict"].startswith("96 of 112 prompt tokens") and "of 16 it is not" in report["verdict"]
    sim.finish("b", 48, status="FINISHED_ABORTED")
    report = report_of(sim)
    assert "not-observed" not in report["ledger"]["saves"]["accounts"]
    assert not [note for note in report["limits"]["notes"] if "had not ended" in note]
