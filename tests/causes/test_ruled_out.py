"""A cause is ruled out by what was seen of all, never by what the watch did not see of some."""

from __future__ import annotations

from pathlib import Path

import pytest
from synth import Chunk, Entry, Policy, Rounding, Sim
from test_effects import all_of, sim_of
from test_rules import analyse, prompts, ruled_out

from kvtrace.causes import Diagnosis

OF_CALLS = ("stored-nothing", "slots-short", "exception-swallowed", "ranks-share-store")


def not_observed(diagnosis: Diagnosis) -> dict[str, str]:
    return {one.id: one.why for one in diagnosis.not_observed}


@pytest.mark.parametrize("ident", OF_CALLS)
def test_store_calls_rule_out_only_where_all_of_them_were_measured(tmp_path: Path, ident: str) -> None:
    whole, part = sim_of(tmp_path, "whole", tp=2), sim_of(tmp_path, "part", tp=2)
    whole.serve(prompts([64, 128, 192]), Rounding(32).policy(), measure=all_of)
    part.serve(prompts([64, 128, 192]), Rounding(32).policy(),
               measure=lambda n, rank, layer, slots: slots if n == 1 else None)  # fmt: skip
    assert ident in ruled_out(analyse(whole))
    assert ident not in ruled_out(analyse(part))


def test_what_was_not_measured_of_some_calls_is_said(tmp_path: Path) -> None:
    sim = sim_of(tmp_path)
    sim.serve(prompts([64, 128]), Rounding(32).policy(),
              measure=lambda n, rank, layer, slots: slots if n == 1 else None)  # fmt: skip
    said = not_observed(analyse(sim))
    assert "2 of 4 store calls" in said["stored-nothing"]
    assert "2 store calls that were watched, of 4" in said["exception-swallowed"]


def test_ranks_that_saved_nothing_did_not_save_the_same(tmp_path: Path) -> None:
    sim = sim_of(tmp_path, tp=2)
    sim.serve(prompts([20, 30]), Rounding(32).policy())
    assert "ranks-diverge" not in ruled_out(analyse(sim))


def test_metadata_that_could_not_be_read_rules_out_no_empty_key(tmp_path: Path) -> None:
    sim = sim_of(tmp_path)
    first, second = prompts([64, 96])
    for prompt, unreadable in ((first, False), (second, True)):
        sim.arrive(prompt)
        entries = [] if unreadable else [Entry(prompt.id, prompt.length, -1, 0)]
        sim.step([Chunk(prompt.id, 0, prompt.length, first=True)], entries,
                 prompts={prompt.id: prompt.length}, unreadable=unreadable)  # fmt: skip
        sim.finish(prompt.id, prompt.length)
    assert "false-already-stored" not in ruled_out(analyse(sim))


def test_loads_of_which_nothing_was_seen_rule_nothing_out(tmp_path: Path) -> None:
    sim = Sim(tmp_path / "run", ints={"unit": 32})
    sim.serve(prompts([96]), Policy(Rounding(32).policy().store, match=lambda prompt, local: 64))
    diagnosis = analyse(sim)
    for ident in ("load-after-use", "load-not-injected", "loaded-partly"):
        assert ident not in ruled_out(diagnosis)
    assert {"load-after-use", "load-not-injected"} <= set(not_observed(diagnosis))
