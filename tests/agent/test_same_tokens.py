"""Which layer of what was loaded is a model's first: seen from blocks with the same tokens, however slots lie
in them, and not where it does not hold."""

from __future__ import annotations

from typing import Any

import pytest

from kvtrace.agent.watch.prompts import Span
from kvtrace.agent.watch.same_tokens import Place, SameTokens, votes

torch = pytest.importorskip("torch")

BLOCKS, SIZE, WIDTH, LAYERS, WORDS = 16, 4, 64, 3, 9


class Model:
    """KV by block; the first layer's values hang on the token alone, all else on everything before."""

    def __init__(self, positions: bool = False, dtype: Any = torch.float32) -> None:
        self.made = torch.Generator().manual_seed(3)
        self.values = self.random(WORDS, WIDTH)
        self.positions = positions
        shape = (BLOCKS, SIZE * 2 * WIDTH)
        self.caches = {f"layers.{at}": torch.zeros(shape, dtype=dtype) for at in range(LAYERS)}
        self.order = torch.randperm(SIZE * 2 * WIDTH, generator=self.made)
        """How slots lie in a block: in no order at all."""
        self.same = SameTokens(0, SIZE, [Place(name, 0, 1) for name in self.caches], SIZE * 2 * WIDTH * 4)

    def random(self, *shape: int) -> Any:
        return torch.randn(shape, generator=self.made)

    def write(self, tokens: list[int], blocks: list[int], into: dict[int, int] | None = None) -> None:
        """``into``: a layer -> the one whose KV it gets, where that is another one."""
        for at, block in enumerate(blocks):
            own = tokens[at * SIZE : (at + 1) * SIZE]
            kv = [self.random(len(own), 2 * WIDTH) for _ in range(LAYERS)]
            if not self.positions:
                kv[0][:, WIDTH:] = self.values[own]
            for layer, cache in enumerate(self.caches.values()):
                flat = torch.zeros(SIZE * 2 * WIDTH)
                flat[: len(own) * 2 * WIDTH] = kv[(into or {}).get(layer, layer)].reshape(-1)
                cache[block] = flat[self.order].to(cache.dtype)

    def look(self, spans: list[Span], loaded: dict[str, int]) -> list[list[int]]:
        found = self.same.look(torch, spans, loaded, self.caches)
        return votes(found[0], found[1].tolist()) if found is not None else []


ONE, OTHER = [1, 2, 3, 4, 5, 6, 7, 8, 1, 1], [1, 3, 3, 5, 5, 2, 7, 1, 2, 2]
SHIFTED = {0: 1, 1: 2, 2: 0}


def loads(model: Model, into: dict[int, int] | None = None) -> list[list[int]]:
    """Two prompts of two loaded blocks and a begun one that is computed."""
    found = []
    for req_id, tokens, blocks in (("a", ONE, [1, 2, 3]), ("b", OTHER, [4, 5, 6])):
        model.write(tokens[:8], blocks[:2], into)
        model.write(tokens[8:], blocks[2:])
        found += model.look([Span(req_id, tokens, [blocks], 8, 10)], {req_id: 8})
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_layer_is_alike_where_it_belongs(dtype: Any) -> None:
    found = loads(Model(dtype=dtype))
    assert found and all(one[0] and not any(one[1:]) for one in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_another_layer_it_is_known_again(dtype: Any) -> None:
    found = loads(Model(dtype=dtype), SHIFTED)
    assert found and all(one[2] and not any(one[:2]) for one in found)


def test_numbers_of_one_byte_are_compared_as_they_are() -> None:
    """They are often alike by chance: then nothing is said, and nothing false."""
    found = loads(Model(dtype=torch.float8_e4m3fn), SHIFTED)
    assert found and not any(any(one[:2]) for one in found)


def test_what_stood_in_a_block_before_is_forgotten() -> None:
    model = Model()
    for number in range(40):
        tokens = [(number + at) % WORDS for at in range(8)]
        model.look([Span(str(number), tokens, [[1 + number % 6, 7 + number % 6]], 0, 8)], {})
    assert set(model.same._blocks) == set(range(1, 13))
    assert sum(map(len, model.same._with.values())) == 12 * SIZE


def test_no_more_is_compared_at_once_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtrace.agent.watch.same_tokens._COMPARED", 1)
    assert [sum(one) for one in loads(Model())] == [1, 1]


def test_a_model_whose_first_layer_hangs_on_positions_is_alike_nowhere() -> None:
    assert not any(map(any, loads(Model(positions=True), SHIFTED)))


def test_layers_that_are_alike_together_say_nothing() -> None:
    assert not any(map(any, loads(Model(), {1: 0})))


def test_the_same_prompt_once_more_is_no_pair() -> None:
    model = Model()
    model.write(ONE[:8], [1, 2])
    assert model.look([Span("a", ONE[:8], [[1, 2]], 0, 8)], {}) == []
    for layer in model.caches.values():
        layer[[3, 4]] = layer[[1, 2]]
    model.same.look(torch, [], {}, model.caches)
    pairs = model.same.look(torch, [Span("b", [*ONE[:8], 0], [[3, 4, 5]], 8, 9)], {"b": 8}, model.caches)
    assert pairs is None


def test_it_looks_at_so_many_loads_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtrace.agent.watch.same_tokens.MOST_LOADS", 1)
    assert len(loads(Model())) == 1
