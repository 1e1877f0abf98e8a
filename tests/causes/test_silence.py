"""No fault from silence: what no metadata names may have been stored all the same."""

from __future__ import annotations

from pathlib import Path

from synth import Chunk, Entry, Fate, Prompt, Sim
from test_rules import analyse, ids, prompts, tokens

from kvtrace.ledger import read_run
from kvtrace.trace.format import Fact

LOST = "not-saved:metadata-has-no-store"


def serve(sim: Sim, name: str, length: int, *entries: Entry, unreadable: bool = False) -> None:
    """A prompt in one step."""
    sim.step([Chunk(name, 0, length, first=True)], entries, prompts={name: length}, unreadable=unreadable)


def start(tmp_path: Path, *lengths: int) -> Sim:
    sim = Sim(tmp_path)
    for prompt in prompts(list(lengths)):
        sim.arrive(prompt)
    return sim


def test_readable_metadata_of_all_steps_shows_a_loss(tmp_path: Path) -> None:
    sim = start(tmp_path, 64, 96)
    serve(sim, "req-1", 64)
    serve(sim, "req-2", 96)
    sim.finish("req-1", 64)
    sim.finish("req-2", 96)
    diagnosis = analyse(sim)
    assert ids(diagnosis) == ["metadata-has-no-store"]
    assert tokens(diagnosis) == {LOST: 160}


def test_an_unreadable_step_costs_its_request_alone(tmp_path: Path) -> None:
    sim = start(tmp_path, 128, 96)
    sim.step([Chunk("req-1", 0, 64, first=True)], prompts={"req-1": 128})
    sim.step([Chunk("req-1", 64, 64)], prompts={"req-1": 128}, unreadable=True)
    serve(sim, "req-2", 96)
    sim.finish("req-1", 128)
    sim.finish("req-2", 96)
    diagnosis = analyse(sim)
    assert tokens(diagnosis) == {"not-observed": 128, LOST: 96}
    assert "connector-metadata" in {one.id for one in diagnosis.not_observed}


def test_a_background_save_that_no_metadata_names_is_no_loss(tmp_path: Path) -> None:
    sim = start(tmp_path, 64)
    serve(sim, "req-1", 64)
    sim.finish("req-1", 64)
    sim.open_save("req-1")
    sim.done("req-1", 0)
    sim.done("req-1")
    diagnosis = analyse(sim)
    assert ids(diagnosis) == []
    assert tokens(diagnosis) == {"not-observed": 64}
    assert [row.verdict for row in diagnosis.requests.itertuples()] == ["not-observed"]
    assert [row.not_saved_tokens for row in diagnosis.requests.itertuples()] == [0]


def test_a_lookup_that_finds_a_prompt_tells_of_an_unseen_store(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    first, again = prompts([96, 96])
    again.digest = first.digest
    sim.arrive(first)
    serve(sim, first.id, 96)
    sim.finish(first.id, 96)
    sim.arrive(again)
    sim.lookup(again.id, 0, 64, 64)
    sim.step([Chunk(again.id, 64, 32, first=True)], prompts={again.id: 96})
    sim.finish(again.id, 96)
    diagnosis = analyse(sim)
    assert ids(diagnosis) == []
    assert tokens(diagnosis)["not-observed"] == 96 + 32


def test_the_evidence_tells_of_the_hits_of_these_requests(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    for prompt in prompts([96, 96]):
        sim.arrive(prompt)
    sim.lookup("req-1", 0, 32, 32)
    sim.step([Chunk("req-1", 32, 64, first=True)], prompts={"req-1": 96})
    serve(sim, "req-2", 96, Entry("req-2", 96))
    sim.finish("req-1", 96)
    sim.finish("req-2", 96)
    diagnosis = analyse(sim)
    found = next(one for one in diagnosis.findings if one.id == "metadata-has-no-store")
    text = " ".join(found.evidence)
    assert "the only lookup found some" in text
    assert "no lookup hit" not in text


def test_a_hook_that_raised_explains_unreadable_metadata(tmp_path: Path) -> None:
    sim = start(tmp_path, 64)
    step = sim.step(
        [Chunk("req-1", 0, 64, first=True)], prompts={"req-1": 64}, unreadable=True,
        fate=Fate(raising=frozenset({(0, 0)})),
    )  # fmt: skip
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
    assert run.entries.empty
    assert set(run.base["outcome"]) == {"not-observed"}
