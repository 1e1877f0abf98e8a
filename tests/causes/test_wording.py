"""What the save-side findings and rule-outs say, where it was once wrong."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from diagnosed import analyse, prompts, ruled_out, said, served, the, tokens
from synth import Chunk, Entry, Policy, Prompt, Rounding, Sim

from kvtrace.ledger import read_run


def test_a_lookup_that_rounds_further_down_than_the_store(tmp_path: Path) -> None:
    def store(prompt: Prompt, index: int, start: int, end: int, last: bool) -> list[Entry]:
        return [Entry(prompt.id, 0, prompt.length)] if prompt.length == 20 else []

    sim = Sim(tmp_path, connector="ExampleConnector", block=32, ints={"_block_size": 32})
    sim.serve(prompts([20, 33, 33, 25]), Policy(store))
    diagnosis = analyse(sim)
    text = said(diagnosis, "false-already-stored")
    assert "a store would round 33 tokens to 32; a lookup that rounds further down" in text
    assert "as floor((n - 2) / 32) x 32, gets 0" in text
    assert "after it 1 such prompt got no entry at all" in said(diagnosis, "below-save-granularity")
    assert "64 tokens would have been stored" in text


def test_a_unit_is_the_number_that_the_connector_calls_so(tmp_path: Path) -> None:
    sim = Sim(tmp_path, batched=256, ints={"unit": 256, "block_size": 32})
    sim.serve(prompts([256, 512, 768]), Rounding(256).policy())
    text = ruled_out(analyse(sim))["below-save-granularity"]
    assert text.startswith("3 prompts stored in whole units of 256 tokens (max_num_batched_tokens, ")
    # A number of the connector's that is no unit by name stays out of it.
    sim = Sim(tmp_path / "plain", batched=512, ints={"hidden": 256, "block_size": 32})
    sim.serve(prompts([256, 512, 768]), Rounding(32).policy())
    text = ruled_out(analyse(sim))["below-save-granularity"]
    assert text.startswith("3 prompts stored in whole units of 32 tokens (the engine's block size")


def test_only_chunks_with_something_to_store_count(tmp_path: Path) -> None:
    sim = served(tmp_path, [130, 140, 256], Rounding(128).policy(), batched=128, ints={"unit": 128})
    assert ruled_out(analyse(sim))["first-chunk-only"] == (
        "all 3 prompts computed in several chunks; all 1 with more to store have stores past the first"
    )
    sim = served(tmp_path / "none", [130, 140], Rounding(128).policy(), batched=128, ints={"unit": 128})
    assert ruled_out(analyse(sim))["first-chunk-only"] == "all 2 prompts computed in several chunks"


def test_prompt_or_prompt_less_one(tmp_path: Path) -> None:
    sim = Sim(tmp_path / "stock", connector="ExampleConnector", ints={"_block_size": 32})
    sim.serve(prompts([66, 100]), Rounding(32, d=1).policy())
    assert "every store is floor((prompt - 1) / 32) x 32 tokens" in said(
        analyse(sim), "below-save-granularity"
    )
    sim = served(tmp_path / "own", [66, 100], Rounding(32, d=1).policy(), ints={"unit": 32})
    assert "floor(prompt / 32) x 32 ((prompt - 1) would fit as well) tokens" in said(
        analyse(sim), "below-save-granularity"
    )
    sim = served(tmp_path / "told", [64, 100])
    assert "every store is floor(prompt / 32) x 32 tokens" in said(analyse(sim), "below-save-granularity")


def test_one_prompt_is_spoken_of_as_one(tmp_path: Path) -> None:
    sim = served(tmp_path, [50], Rounding(128, d=1).policy(), block=128, ints={"_block_size": 128})
    text = said(analyse(sim), "below-save-granularity")
    assert "the only prompt is shorter" in text
    # One that came from the store has nothing to store: it is not said to be longer or shorter.
    sim = served(tmp_path / "held", [50, 70])
    sim.one_step("again", 64, taken=64)
    assert "2 of 3 prompts with something to store: 50 to 70 tokens" in said(
        analyse(sim), "below-save-granularity"
    )


def test_the_connector_comes_before_the_engine(tmp_path: Path) -> None:
    sim = Sim(tmp_path / "engine", batched=2048, ints={"max_batch": 2048})
    sim.serve(prompts([1870, 2210]), Rounding(2048).policy())
    finding = the(analyse(sim), "below-save-granularity")
    assert finding.remedy[0].startswith("If units of 2 048 tokens are not meant, change the rounding in ")
    setting = "or lower --max-num-batched-tokens (for the whole engine: long prompts take more steps)"
    assert finding.remedy[1] == setting
    sim = Sim(tmp_path / "option", batched=4096, extra={"chunk_size": 2048})
    sim.serve(prompts([1870, 2210]), Rounding(2048).policy())
    finding = the(analyse(sim), "below-save-granularity")
    setting = 'lower "chunk_size" in kv_connector_extra_config'
    assert finding.remedy[0] == f"If units of 2 048 tokens are not meant, {setting}"
    assert finding.remedy[1].startswith("or change the rounding in ")


def test_a_larger_unit_that_fits_as_well_is_named(tmp_path: Path) -> None:
    """Chunks of two blocks, and no prompt whose tail would have told them from one."""
    ints = {"_bs": 32, "_per": 2, "_span": 64}
    sim = Sim(tmp_path / "alike", ints=ints)
    sim.serve(prompts([70, 150, 200]), Rounding(64).policy())
    finding = the(analyse(sim), "below-save-granularity")
    assert "whole units of 32 or 64 tokens only" in finding.title
    assert finding.remedy[0].startswith("If units of 32 or 64 tokens are not meant, change the rounding in ")
    sim = Sim(tmp_path / "told", ints=ints)
    sim.serve(prompts([70, 150, 240]), Rounding(64).policy())  # 48 of them lost, more than a block
    assert "whole units of 64 tokens only" in the(analyse(sim), "below-save-granularity").title


def test_the_attention_op_is_named(tmp_path: Path) -> None:
    diagnosis = analyse(served(tmp_path, [64]))
    text = ruled_out(diagnosis)["direct-call-bypass"]
    assert text.startswith("unified_attention_with_output ran in 2/2 layer-steps")
    assert diagnosis.stages[3].note.startswith("unified_attention_with_output ran in 2/2 layer-steps")


def test_what_a_save_reads_again_was_not_computed_here(tmp_path: Path) -> None:
    sim = Sim(tmp_path, kv_blocks=64, ints={"unit": 32})
    sim.arrive(Prompt("a", 128, digest=1))
    sim.lookup("a", 64, 0, 0)
    sim.step([Chunk("a", 64, 64, first=True)], [Entry("a", 128, 128, 0)], prompts={"a": 128})
    sim.finish("a", 128)
    diagnosis = analyse(sim)
    assert tokens(diagnosis) == {"saved": 128}
    assert diagnosis.verdict.startswith("All 64 prompt tokens computed here were ")
    whole: Counter[str] = Counter()
    for one in read_run(tmp_path).whole:
        whole[one.outcome] += one.amount
    assert whole == {"saved": 64, "local-hit": 64}  # none of them is a generated one
