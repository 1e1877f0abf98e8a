"""A cause is ruled out by what was seen of all, never by what the watch did not see of some."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from diagnosed import analyse, graded, not_observed, prompts, ruled_out
from synth import WATCHED, Entry, Fate, Policy, Rounding, Sim
from test_effects import sim_of, watched
from test_load_rules import LOAD

from kvtrace.causes import Diagnosis, diagnose
from kvtrace.ledger import read_run
from kvtrace.terms import Grade
from kvtrace.trace.facts import Limit
from kvtrace.trace.format import Fact


def test_ranks_whose_files_nobody_saw_may_share_them(tmp_path: Path) -> None:
    def run(name: str, files: bool) -> Diagnosis:
        sim = sim_of(tmp_path, name, tp=2)
        sim.watching = WATCHED
        sim.serve(prompts([64]), Rounding(32).policy())
        for rank, layer in ((0, 0), (0, 1), (1, 0), (1, 1)):
            target = 10 * rank + layer + 1 if files else 0
            sim.stored("req-1", 0, 64, layer, rank, size=9999 * files, files=int(files), target=target)
        return analyse(sim)

    assert "ranks-share-store" in ruled_out(run("seen", files=True))
    assert "ranks-share-store" not in ruled_out(run("unseen", files=False))


@pytest.mark.parametrize("kind", [Limit.EXCEPTIONS, Limit.STEPS, Limit.THREAD, Limit.PROCESS])
def test_exceptions_that_may_not_be_seen_are_not_ruled_out(tmp_path: Path, kind: Limit) -> None:
    def run(name: str, *limits: Limit) -> Diagnosis:
        sim = watched(tmp_path, [64, 128], measure=lambda n, rank, layer, slots: slots, name=name)
        for one in limits:
            sim.workers[0].fact(Fact.WATCH_LIMITS, {"connector": 11, "kind": one.value, "what": "x"})
        sim.write()
        found = read_run(sim.dir)
        return diagnose(replace(found, base=graded(found.base, Grade.PROVED)))

    assert "exception-swallowed" in ruled_out(run("seen"))
    assert "exception-swallowed" not in ruled_out(run("unseen", kind))


def test_ranks_that_saved_nothing_did_not_save_the_same(tmp_path: Path) -> None:
    sim = watched(tmp_path, [20, 30], tp=2)
    assert "ranks-diverge" not in ruled_out(analyse(sim))


def test_metadata_that_could_not_be_read_rules_out_no_empty_key(tmp_path: Path) -> None:
    sim = sim_of(tmp_path)
    sim.one_step("a", 64, [Entry("a", 64, -1, 0)], digest=1)
    sim.one_step("b", 96, digest=2, unreadable=True)
    assert "false-already-stored" not in ruled_out(analyse(sim))


def test_loads_of_which_nothing_was_seen_rule_nothing_out(tmp_path: Path) -> None:
    sim = Sim(tmp_path / "run", ints={"unit": 32})
    sim.serve(prompts([96]), Policy(Rounding(32).policy().store, match=lambda prompt, local: 64))
    diagnosis = analyse(sim)
    for ident in ("load-after-use", "load-not-injected", "loaded-partly"):
        assert ident not in ruled_out(diagnosis)
    assert {"load-after-use", "load-not-injected"} <= set(not_observed(diagnosis))


def loaded(sim: Sim, *layers: int) -> Diagnosis:
    """Two loads of 96 tokens: one was seen to be written into both layers, the other into these of them."""
    for digest, (name, into) in enumerate({"a": (0, 1), "b": layers}.items(), 1):
        step = sim.one_step(name, 128, [Entry(name, 128, 128, 0)], taken=96, digest=digest)
        for layer in range(2):
            sim.effect(0, step, layer, 96 if layer in into else 0, hook="start_load_kv", flags=LOAD)
    return analyse(sim)


def test_a_load_that_missed_a_layer_rules_out_no_part_no_delay(tmp_path: Path) -> None:
    whole, part = loaded(Sim(tmp_path / "whole"), 0, 1), loaded(Sim(tmp_path / "part"), 0)
    for ident in ("loaded-partly", "load-after-use", "load-not-injected"):
        assert ident in ruled_out(whole)
        assert ident not in ruled_out(part)


def test_without_an_attention_body_no_late_load_is_ruled_out(tmp_path: Path) -> None:
    sim = Sim(tmp_path / "run")
    unseen = Fate(dead_pairs=frozenset({(0, 0), (0, 1)}))
    step = sim.one_step("a", 128, [Entry("a", 128, 128, 0)], taken=96, digest=1, fate=unseen)
    for layer in range(2):
        sim.effect(0, step, layer, 96, hook="start_load_kv", flags=LOAD)
    diagnosis = analyse(sim)
    assert "load-after-use" not in ruled_out(diagnosis)
    assert "or attention began, was not seen" in not_observed(diagnosis)["load-after-use"]


@pytest.mark.parametrize("hook", ["start_load_kv", "thread"])
def test_a_caught_exception_does_not_rule_out_failed_loads(tmp_path: Path, hook: str) -> None:
    sim = Sim(tmp_path / "run")
    sim.workers[0].fact(
        Fact.SWALLOWED,
        {"hook": hook, "layer": "", "step": 1, "connector": 71, "type": "OSError", "message": "gone",
         "where": "c.py:3 in load", "count": 1},
    )  # fmt: skip
    assert "load-failed" not in ruled_out(loaded(sim, 0, 1))


def stored(sim: Sim, left_out: int = 0, grade: Grade = Grade.WRITTEN) -> Diagnosis:
    """Three prompts, all but the one of ``left_out`` tokens named in the metadata, saved as well as that."""
    for length in (96, 128, 160):
        name = f"of-{length}"
        sim.one_step(name, length, [] if length == left_out else [Entry(name, length, -1, 0)], digest=length)
    sim.write()
    run = read_run(sim.dir)
    return diagnose(replace(run, base=graded(run.base, grade)))


def test_prompts_left_out_may_have_been_taken_for_stored(tmp_path: Path) -> None:
    assert "false-already-stored" in ruled_out(stored(sim_of(tmp_path, "whole")))
    left = stored(sim_of(tmp_path, "left"), 128)
    assert [finding.id for finding in left.findings] == ["metadata-has-no-store"]
    assert "false-already-stored" not in ruled_out(left)


@pytest.mark.parametrize(
    ("grade", "excluded"),
    [(Grade.DECLARED, False), (Grade.READ, False), (Grade.WRITTEN, True), (Grade.PROVED, True)],
)
def test_what_was_not_seen_sent_may_be_taken_for_stored(tmp_path: Path, grade: Grade, excluded: bool) -> None:
    """Its way is not seen."""
    found = ruled_out(stored(sim_of(tmp_path), grade=grade))
    assert ("false-already-stored" in found) == excluded


@pytest.mark.parametrize("ident", ["exception-swallowed", "false-already-stored", "save-lost"])
def test_tokens_lost_for_one_reason_leave_open_what_is_behind(tmp_path: Path, ident: str) -> None:
    sim = watched(
        tmp_path, [64, 128, 192], measure=lambda n, rank, layer, slots: slots // 2 if layer else slots
    )
    diagnosis = analyse(sim)
    assert [finding.id for finding in diagnosis.findings] == ["slots-short"]
    assert ident not in ruled_out(diagnosis)


def test_prompts_that_were_not_stored_rule_out_no_unit(tmp_path: Path) -> None:
    def run(name: str, *lengths: int) -> Diagnosis:
        sim = watched(tmp_path, list(lengths), name=name)
        return analyse(sim)

    assert "below-save-granularity" in ruled_out(run("whole", 64, 96))
    assert "below-save-granularity" not in ruled_out(run("rest", 64, 100))


@pytest.mark.parametrize(
    ("slow", "other"), [("wait_for_save", "hook-slow"), ("save_kv_layer", "save-blocks-step")]
)
def test_one_slow_hook_leaves_open_that_the_others_are(tmp_path: Path, slow: str, other: str) -> None:
    sim = Sim(tmp_path / "run", ints={"unit": 32})
    sim.slow = {slow: 50_000_000}
    sim.serve(prompts([64] * 5), Rounding(32).policy())
    assert other not in ruled_out(analyse(sim))


def test_async_saves_that_returned_may_have_lost_their_reads(tmp_path: Path) -> None:
    sim = Sim(tmp_path / "run", tp=1, ints={"unit": 32}, noop=("save_kv_layer", "wait_for_save"))
    for prompt in prompts([64, 96]):
        sim.serve([prompt], Rounding(32).policy())
        sim.open_save(prompt.id)
        sim.done(prompt.id, 0)
        sim.done(prompt.id)
    diagnosis = analyse(sim)
    assert "save-lost" not in ruled_out(diagnosis)
    assert "2 asynchronous saves began and came back" in not_observed(diagnosis)["save-lost"]


def test_without_metadata_nobody_knows_what_a_store_covers(tmp_path: Path) -> None:
    sim = sim_of(tmp_path)
    sim.one_step("a", 64, unreadable=True)
    assert "already-stored" not in ruled_out(analyse(sim))
