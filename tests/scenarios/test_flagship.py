"""What the flagship's connector stored is read from its files, prompt by prompt; the report says the same."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from scenario_runs import Runs, spec

LAYERS = 4
BLOCK = 32
NAMES = ("flagship", "flagship-in-flight", "flagship-healthy")


def rows(file: Path) -> int:
    """Tokens of one record: the first dimension of its tensor."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    count: int = header["kv"]["shape"][0]
    return count


def at_rest(store: Path, prompt: list[int], ranks: int) -> list[bool]:
    """Which tokens of a prompt lie in the store, in every layer of every rank. A record holds the last rows
    before the end of the prefix that its key is made of."""
    found = [True] * len(prompt)
    for rank in range(ranks):
        for layer in range(LAYERS):
            here = [False] * len(prompt)
            for end in range(BLOCK, len(prompt) + 1, BLOCK):
                tokens = b"".join(token.to_bytes(8, "little") for token in prompt[:end])
                folder = store / f"rank{rank}-{hashlib.sha1(tokens).hexdigest()}"
                file = folder / f"model.layers.{layer}.self_attn.attn.safetensors"
                if file.exists():
                    count = rows(file)
                    here[end - count : end] = [True] * count
            found = [a and b for a, b in zip(found, here, strict=True)]
    return found


@pytest.mark.engine
@pytest.mark.parametrize("name", NAMES)
def test_the_report_calls_saved_what_lies_in_the_files(name: str, runs: Runs) -> None:
    scenario = spec.load(name)
    report = runs.report(scenario.name)
    ranks = int(scenario.engine.get("tensor_parallel_size", 1))
    prompts = [prompt for part in scenario.rounds for prompt in part.prompts]
    truth = [sum(at_rest(runs.store(name), prompt, ranks)) for prompt in prompts]
    expect = scenario.expect
    assert sum(truth) == (expect.saves["saved"] if expect.in_store is None else expect.in_store)
    # requests are numbered as they came; the number is what the client called them
    told = {int(row["id"].split("-")[0]): row for row in report["requests"]["rows"]}
    for number, stored in enumerate(truth):
        row = told[number]
        # only the grade "read" may say more than lies there: what was read may not have come to rest
        assert row["saved"] == stored or (row["grade"] == "read" and row["saved"] > stored)
    incomplete = any(finding["id"] == "store-incomplete" for finding in report["findings"])
    assert incomplete == any(told[number]["saved"] != stored for number, stored in enumerate(truth))
    saves = report["ledger"]["saves"]
    grades = saves["grades"]["saved"]
    assert sum(grades.get(grade, 0) for grade in ("proved", "written")) <= sum(truth) * saves["pairs"]


@pytest.mark.engine
def test_one_record_of_several_in_a_step_is_written(runs: Runs) -> None:
    """The truth that the scenario in flight rests on: from the third prompt on the first chunk is lost."""
    scenario = spec.load("flagship-in-flight")
    runs.outcome(scenario.name)
    prompts = [prompt for part in scenario.rounds for prompt in part.prompts]
    lost = []
    for prompt in prompts:
        found = at_rest(runs.store(scenario.name), prompt, 1)
        lost.append(found.index(True) if True in found else len(found))
    assert lost == [0, 0, 480, 480, 352, 352]
