"""scripts/soak.py: what grows is said, and so is each number that is not exact."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import soak
from synth import Prompt, Rounding, Sim, run_json


def test_growth_is_that_of_the_last_third() -> None:
    samples = [soak.Sample(1000 + at, 5, 2 + (at > 60)) for at in range(90)]
    grown = soak.growth(samples)
    assert grown == soak.Sample(60, 0, 1)
    assert not soak.not_flat({"p": grown}, {})


def test_growth_counts_beside_that_of_an_untraced_process() -> None:
    leaks, flat = soak.Sample(20 * 1024, 0, 0), soak.Sample(0, 0, 0)
    said = ["p grew by 20.0 MiB, 0 descriptors, 0 threads more than untraced"]
    assert soak.not_flat({"p": leaks}, {"p": flat}) == soak.not_flat({"p": leaks}, {}) == said
    assert not soak.not_flat({"p": leaks}, {"p": soak.Sample(5 * 1024, 0, 0)})
    for more in (soak.Sample(0, 3, 0), soak.Sample(0, 0, 3)):
        assert soak.not_flat({"p": more}, {"p": flat}) and not soak.not_flat({"p": more}, {"p": more})


def test_processes_of_one_name_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "named", {7: "run", 8: "worker", 9: "run", 12: "run"}.get)
    assert soak.by_name({9: [2], 8: [4], 7: [1], 12: [3]}) == {
        "run": [1], "worker": [4], "run #2": [2], "run #3": [3],
    }  # fmt: skip


def test_this_process_can_be_sampled() -> None:
    here = soak.sample(os.getpid())
    assert here.memory > 1000 and here.descriptors > 2 and here.threads >= 1
    assert soak.descendants(os.getpid())[0] == os.getpid()


def test_every_number_that_differs_is_said(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    ids = [f"cmpl-soak-{at}-0-0-1a2b3c4d" for at in range(3)]
    sim.serve([Prompt(one, 96, digest=1 + at, output=3) for at, one in enumerate(ids)], Rounding(32).policy())
    sim.write()
    run_json(tmp_path)
    sent = {f"soak-{at}-0": soak.Sent("answered", 96, 3) for at in range(3)}
    assert soak.not_exact(tmp_path, sent) == []
    assert soak.not_exact(tmp_path, {**sent, "soak-9-0": soak.Sent("left at once", 96, 0)}) == []
    wrong = {
        "soak-0-0": soak.Sent("answered", 95, 3),
        "soak-1-0": soak.Sent("answered", 96, 4),
        "soak-8-0": soak.Sent("broken off", 96, 0),
    }
    assert soak.not_exact(tmp_path, wrong) == [
        "soak-2-0 stands in the run and was not sent",
        "soak-0-0: prompt 96, sent 95",
        "soak-1-0: output 3, answered 4",
        "soak-8-0 (broken off) stands in the run 0 times",
    ]


def test_who_was_given_up_while_waiting_had_no_load_due(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    sim.serve([Prompt("cmpl-soak-0-0-0-1a2b3c4d", 96, digest=1, output=3)], Rounding(32).policy())
    for at in (1, 2):
        given_up = Prompt(f"cmpl-soak-{at}-0-0-1a2b3c4d", 84, digest=1 + at)
        sim.arrive(given_up)
        sim.finish(given_up.id, 0, 0, "FINISHED_ABORTED" if at == 1 else "FINISHED_STOPPED")
    sim.write()
    run_json(tmp_path)
    sent = {"soak-0-0": soak.Sent("answered", 96, 3)}
    sent |= {f"soak-{at}-0": soak.Sent("broken off", 84, 0) for at in (1, 2)}
    (wrong,) = soak.not_exact(tmp_path, sent)  # the other one was not given up, and stands in no ledger
    assert "total 192" in wrong and wrong.endswith("requests' tokens 180 x 2")
