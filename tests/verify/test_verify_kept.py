"""The agent's copies of computed blocks: how far loaded ones are from them, in numbers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvtrace.agent.prints.kept import KeptCopies, StepBlocks  # noqa: E402
from kvtrace.agent.state import AGENT  # noqa: E402
from kvtrace.agent.steps.prompts import Filled  # noqa: E402
from kvtrace.trace.config import AgentConfig  # noqa: E402
from kvtrace.trace.facts import LoadErrorsFact  # noqa: E402

SIZE, BLOCKS = 4, 12


class Layer(SimpleNamespace):
    __hash__ = object.__hash__


@pytest.fixture
def facts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LoadErrorsFact]]:
    found: list[LoadErrorsFact] = []
    monkeypatch.setattr(AGENT, "config", AgentConfig(Path("x"), b"k" * 16, copies=64))
    monkeypatch.setattr(AGENT, "fact", lambda fact, role, flush=True: found.append(fact))
    yield found


def engine(copies: int = 64) -> tuple[KeptCopies, list[Layer], dict[Any, Any]]:
    layers = [Layer(name=f"layers.{n}", dim=0, split=1) for n in range(2)]
    source = torch.Generator().manual_seed(1)
    tensors = {layer: torch.randn(BLOCKS, SIZE, 8, generator=source) for layer in layers}
    return KeptCopies(copies, [layers], [SIZE]), layers, tensors


def step(name: str, tokens: list[int], blocks: list[int], tensors: Any, loaded: int = 0) -> StepBlocks:
    filled = [Filled(name, 0, 0, blocks)]
    return StepBlocks(1, filled, {name: tokens}, {name: loaded} if loaded else {}, tensors)


def test_equal_blocks_have_no_error(facts: list[LoadErrorsFact]) -> None:
    kept, layers, tensors = engine()
    tokens = list(range(10))
    kept.take(step("one", tokens, [1, 2], tensors))
    assert not facts
    for layer in layers:
        tensors[layer][3:5] = tensors[layer][1:3]
        tensors[layer][1:3] = 0  # the copy is what was, not what is
    kept.take(step("two", tokens, [3, 4], tensors, loaded=8))
    (fact,) = facts
    assert fact.loaded and fact.places == (0, 1) and fact.differing == 0
    assert fact.largest == (0.0, 0.0) and fact.layers == ("layers.0", "layers.1")


def test_numbers_that_differ_are_told_from_another_prompt(facts: list[LoadErrorsFact]) -> None:
    kept, layers, tensors = engine()
    tokens = list(range(8))
    kept.take(step("one", tokens, [1, 2], tensors))
    near, far = layers
    tensors[near][3:5] = tensors[near][1:3] * 1.005
    tensors[far][3:5] = tensors[far][6:8]
    kept.take(step("two", tokens, [3, 4], tensors, loaded=8))
    (fact,) = facts
    assert fact.differing == 2
    assert fact.mean[0] == pytest.approx(0.005, rel=0.01) and fact.largest[0] < 0.03
    assert fact.mean[1] > 1 and fact.largest[1] > 1


def test_only_the_same_tokens_are_compared(facts: list[LoadErrorsFact]) -> None:
    kept, _, tensors = engine()
    kept.take(step("one", [1, 2, 3, 4, 5, 6, 7, 8], [1, 2], tensors))
    kept.take(step("two", [9, 2, 3, 4, 5, 6, 7, 8], [3, 4], tensors, loaded=8))
    assert not facts


def test_computed_twice_is_noise(facts: list[LoadErrorsFact]) -> None:
    kept, _, tensors = engine()
    tokens = list(range(8))
    kept.take(step("one", tokens, [1, 2], tensors))
    kept.take(step("two", tokens, [3, 4], tensors))
    (fact,) = facts
    assert not fact.loaded and fact.differing == 2


def test_what_is_no_number_is_far(facts: list[LoadErrorsFact]) -> None:
    kept, layers, tensors = engine()
    kept.take(step("one", list(range(4)), [1], tensors))
    tensors[layers[0]][3] = float("nan")
    tensors[layers[1]][3] = tensors[layers[1]][1]
    kept.take(step("two", list(range(4)), [3], tensors, loaded=4))
    assert facts[0].largest[0] > 1e6 and facts[0].largest[1] == 0


def test_copies_are_bounded_and_a_null_block_is_nobodys(facts: list[LoadErrorsFact]) -> None:
    kept, _, tensors = engine(copies=1)
    kept.take(step("one", list(range(8)), [1, 2], tensors))
    kept.take(step("two", list(range(50, 58)), [0, 5], tensors))
    kept.take(step("three", list(range(8)), [3, 4], tensors, loaded=8))
    assert not facts


def test_bytes_of_fp8_are_numbers(facts: list[LoadErrorsFact]) -> None:
    kept, layers, tensors = engine()
    for layer in layers:
        tensors[layer] = tensors[layer].to(torch.float8_e4m3fn).view(torch.uint8)
    kept.take(step("one", list(range(4)), [1], tensors))
    for layer in layers:
        tensors[layer][3] = tensors[layer][1]
        tensors[layer][3, 0, 0] ^= 1
    kept.take(step("two", list(range(4)), [3], tensors, loaded=4))
    assert 0 < facts[0].largest[0] < 0.2
