"""No fault from silence: what no metadata names may have been stored all the same."""

from __future__ import annotations

from pathlib import Path

from diagnosed import analyse, ids, not_observed, prompts, tokens
from synth import Chunk, Entry, Fate, Prompt, Sim

from kvtrace.ledger import read_run
from kvtrace.trace.format import Fact

LOST = "not-saved:metadata-has-no-store"


def test_an_unreadable_step_costs_its_request_alone(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    sim.arrive(Prompt("a", 128, digest=1))
    sim.step([Chunk("a", 0, 64, first=True)], prompts={"a": 128})
    sim.step([Chunk("a", 64, 64)], prompts={"a": 128}, unreadable=True)
    sim.one_step("b", 96, digest=2)
    sim.finish("a", 128)
    diagnosis = analyse(sim)
    assert tokens(diagnosis) == {"not-observed": 128, LOST: 96}
    assert "connector-metadata" in not_observed(diagnosis)


def test_a_background_save_that_no_metadata_names_is_no_loss(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    sim.one_step("a", 64, digest=1)
    sim.open_save("a")
    sim.done("a", 0)
    sim.done("a")
    diagnosis = analyse(sim)
    assert ids(diagnosis) == []
    assert tokens(diagnosis) == {"not-observed": 64}
    assert [(one.verdict, one.tokens.lost) for one in diagnosis.requests] == [("not-observed", 0)]


def test_a_lookup_that_finds_a_prompt_tells_of_an_unseen_store(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    sim.one_step("a", 96, digest=1)
    sim.one_step("again", 96, taken=64, digest=1)
    diagnosis = analyse(sim)
    assert ids(diagnosis) == []
    assert tokens(diagnosis)["not-observed"] == 96 + 32


def test_a_hook_that_raised_explains_unreadable_metadata(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    raising = Fate(raising=frozenset({(0, 0)}))
    step = sim.one_step("a", 64, digest=1, ends=False, unreadable=True, fate=raising)
    sim.effect(0, step, 0, 0)
    sim.workers[0].fact(
        Fact.EXCEPTION,
        {"hook": "save_kv_layer", "layer": sim.layer_names[0], "step": step, "type": "AttributeError",
         "message": "x", "where": "c.py:1 in f", "count_so_far": 1},
    )  # fmt: skip
    assert "stored-nothing" not in ids(analyse(sim))


def test_blocks_named_before_their_tokens_are_no_loss(tmp_path: Path) -> None:
    """The worker may wait for them: that they are named in no later step says nothing."""
    sim = Sim(tmp_path / "run", block=96, batched=180, ints={"unit": 192})
    (prompt,) = prompts([400])
    sim.arrive(prompt)
    for start, first, size in ((0, 0, 192), (180, 192, 192), (360, 384, 0)):
        tokens = min(180, 400 - start)
        entries = [Entry(prompt.id, size, -1, first)] if size else []
        sim.step([Chunk(prompt.id, start, tokens, first=not start)], entries, prompts={prompt.id: 400})
    sim.finish(prompt.id, 400)
    diagnosis = analyse(sim)
    assert "metadata-has-no-store" not in ids(diagnosis)
    assert diagnosis.saves.accounts["not-observed"] == (12 + 24 + 16) * 2


def test_beside_an_entry_without_a_size_no_size_counts(tmp_path: Path) -> None:
    """A reader that does not understand one entry of a list guesses at the others."""
    sim = Sim(tmp_path)
    names = ("a", "b")
    for n, name in enumerate(names):
        sim.arrive(Prompt(name, 64, digest=n + 1))
        sim.lookup(name, 0, 0, 0)
    entries = [Entry("a", 64, -1, 32), Entry("b", -1, -1, -1)]
    sim.step([Chunk(name, 0, 64, first=True) for name in names], entries, prompts=dict.fromkeys(names, 64))
    sim.finish("a", 64)
    sim.finish("b", 64)
    sim.write()
    run = read_run(tmp_path)
    assert not run.entries
    assert {one.outcome for one in run.base} == {"not-observed"}
