"""Fingerprints of KV: which blocks are taken, equal for equal KV and different for every other, and nobody's
step is in their way."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from kvtrace.agent.kv.caches import CACHES
from kvtrace.agent.prints import prints as prints_module
from kvtrace.agent.prints import rechecks
from kvtrace.agent.prints.prints import Prints
from kvtrace.agent.state import AGENT
from kvtrace.agent.steps.prompts import LOADED_ATTRIBUTE, Filled, PromptBlocks
from kvtrace.trace import rows
from kvtrace.trace.format import STEP_SHIFT, Flag, Kind

from . import fakes

torch = pytest.importorskip("torch")

STEP = 7 << STEP_SHIFT | 3
BLOCKS, SIZE = 12, 4


# --- which blocks -----------------------------------------------------------------------------------


def new(req_id: str, tokens: int, *tables: list[int], computed: int = 0) -> Any:
    prompt = list(range(tokens))
    return SimpleNamespace(
        req_id=req_id, prompt_token_ids=prompt, block_ids=tables, num_computed_tokens=computed
    )


def output(scheduled: dict[str, int], *admitted: Any, **running: tuple[Any, int]) -> Any:
    """``running``: of each request its new blocks and the tokens computed before."""
    return SimpleNamespace(
        num_scheduled_tokens=scheduled, scheduled_new_reqs=list(admitted), finished_req_ids=set(),
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(running), resumed_req_ids=set(),
            new_block_ids=[blocks for blocks, _ in running.values()],
            num_computed_tokens=[computed for _, computed in running.values()],
        ),
    )  # fmt: skip


def test_a_prompt_in_chunks_names_each_full_block_once() -> None:
    prompts = PromptBlocks()
    first = prompts.scheduled(output({"a": 6}, new("a", 14, [5, 6])), [4], wanted=True)
    second = prompts.scheduled(output({"a": 6}, a=(([7],), 6)), [4], wanted=True)
    third = prompts.scheduled(output({"a": 2}, a=(([8],), 12)), [4], wanted=True)
    assert first == [Filled("a", 0, 0, [5])]
    assert second == [Filled("a", 0, 1, [6, 7])]
    assert third == []  # the prompt's tail fills no block
    assert not prompts._prompts


def test_loaded_or_reused_blocks_are_named_with_the_first_chunk() -> None:
    found = PromptBlocks().scheduled(output({"a": 4}, new("a", 12, [5, 6, 7], computed=8)), [4], wanted=True)
    assert found == [Filled("a", 0, 0, [5, 6, 7])]


def test_blocks_of_a_step_that_is_not_watched_are_named_later() -> None:
    prompts = PromptBlocks()
    assert prompts.scheduled(output({"a": 4}, new("a", 8, [5])), [4], wanted=False) == []
    assert prompts.scheduled(output({"a": 4}, a=(([6],), 4)), [4], wanted=True) == [Filled("a", 0, 0, [5, 6])]


def test_generated_tokens_fill_no_block_of_the_prompt() -> None:
    prompts = PromptBlocks()
    prompts.scheduled(output({"a": 6}, new("a", 6, [5, 6])), [4], wanted=True)
    assert prompts.scheduled(output({"a": 1}, a=(None, 7)), [4], wanted=True) == []


def test_blocks_that_failed_to_load_are_named_when_computed() -> None:
    prompts = PromptBlocks()
    prompts.scheduled(output({"a": 4}, new("a", 16, [5, 6, 7], computed=8)), [4], wanted=True)
    assert prompts.scheduled(output({"a": 12}, a=(([8],), 4)), [4], wanted=True) == [
        Filled("a", 0, 1, [6, 7, 8])
    ]


def test_each_group_counts_its_own_blocks_and_some_are_left_out() -> None:
    found = PromptBlocks().scheduled(output({"a": 8}, new("a", 8, [1, 2], [3], [9])), [4, 8, 0], wanted=True)
    assert found == [Filled("a", 0, 0, [1, 2]), Filled("a", 1, 0, [3])]


def test_only_prompts_of_token_ids_alone_are_told_by_token() -> None:
    """An image's tokens all have one id, and an adapter makes other KV of the same."""
    for more, spans in (({}, 1), ({"mm_features": ["image"]}, 0), ({"lora_request": "adapter"}, 0)):
        prompts, request = PromptBlocks(), new("a", 8, [5, 6])
        vars(request).update(more)
        prompts.scheduled(output({"a": 6}, request), [4], wanted=True)
        assert len(prompts.ids) == spans


# --- the hash ---------------------------------------------------------------------------------------


class Wrapper:
    """In the place of vLLM's WorkerWrapperBase."""

    vllm_config: SimpleNamespace


class Engine:
    """Two layers of KV, and the fingerprints of one step over all blocks of a request."""

    def __init__(
        self, shape: tuple[int, ...] = (BLOCKS, 2, SIZE, 6), dtype: Any = torch.bfloat16, layers: int = 2,
        role: str = "kv_both", shared: bool = False,
    ) -> None:  # fmt: skip
        torch.manual_seed(1)
        self.layers = {f"layer.{i}": torch.randn(shape).to(dtype) for i in range(layers)}
        if shared:
            self.layers["layer.1"] = self.layers["layer.0"]
        self.prints = Prints()
        self.config = fakes.kv_cache_config(BLOCKS, SIZE, list(self.layers))
        context = {
            name: SimpleNamespace(kv_cache=tensor, attn_backend=None) for name, tensor in self.layers.items()
        }
        compilation = SimpleNamespace(static_forward_context=context)
        self.parallel = SimpleNamespace()
        self.wrapper = Wrapper()
        self.wrapper.vllm_config = SimpleNamespace(
            compilation_config=compilation,
            parallel_config=self.parallel,
            kv_transfer_config=SimpleNamespace(kv_role=role),
        )
        CACHES.register({})
        CACHES.configure(self.config, context)
        self.open()

    def open(self) -> None:
        self.prints.open(self.wrapper, self.config)

    def step(self, blocks: list[int], take: bool = True) -> None:
        AGENT.worker.step, AGENT.worker.watched = STEP, int(Flag.STORE)
        tokens = len(blocks) * SIZE
        self.prints.plan(output({"a": tokens}, new("a", tokens, blocks)))
        if take:
            self.prints.take()


def read(trace: Any) -> list[int]:
    """All prints so far, by place."""
    found: dict[int, int] = {}
    for one in trace.rows(Kind.PRINTS):
        assert one.step == STEP
        found.update({one.first + i: value for i, value in enumerate(one[4:]) if value})
    return [found[place] for place in sorted(found)]


@pytest.fixture(autouse=True)
def caches_as_before() -> Any:
    yield
    CACHES.__init__()  # type: ignore[misc]


def test_equal_kv_has_equal_prints_and_any_changed_bit_shows(trace: Any) -> None:
    engine = Engine()
    for tensor in engine.layers.values():
        tensor[7] = tensor[2]
    engine.step([2, 3, 4, 5, 6, 7])
    found = read(trace)
    assert found[0] == found[5] and len(set(found)) == 5
    engine.layers["layer.1"].view(torch.int16)[3, 1, 2, 5] ^= 1
    engine.step([2, 3, 4, 5, 6, 7])
    changed = read(trace)
    assert [a == b for a, b in zip(found, changed, strict=True)] == [True, False, True, True, True, True]


def test_layers_heads_and_slots_that_change_places_show(trace: Any) -> None:
    engine = Engine()
    engine.step([1, 2, 3])
    before = read(trace)
    one, two = (tensor.clone() for tensor in engine.layers.values())
    engine.layers["layer.0"][1], engine.layers["layer.1"][1] = two[1], one[1]
    for tensor in engine.layers.values():
        tensor[2] = tensor[2].flip(0).clone()  # heads
        tensor[3] = tensor[3].flip(1).clone()  # slots
    engine.step([1, 2, 3])
    assert not set(before) & set(read(trace))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(2, BLOCKS, SIZE, 6), (2 * BLOCKS, 3, SIZE // 2, 6), (BLOCKS, 1, SIZE, 5)])
def test_any_layout_and_type_of_kv_is_hashed(trace: Any, dtype: Any, shape: tuple[int, ...]) -> None:
    engine = Engine(shape, dtype)
    engine.step(list(range(1, BLOCKS)))
    assert len(set(read(trace))) == BLOCKS - 1


def test_blocks_hashed_in_parts_have_the_same_prints(trace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    engine.step([1, 2, 3, 4, 5])
    whole = read(trace)
    monkeypatch.setitem(prints_module._GATHERED, "cpu", 200)
    engine.step([1, 2, 3, 4, 5])
    assert read(trace) == whole


def test_the_kv_as_it_stands_when_the_step_is_over_counts(trace: Any) -> None:
    engine = Engine()
    engine.step([1], take=False)
    engine.layers["layer.0"][1] += 1  # a draft model, in sample_tokens
    engine.prints.take()
    (late,) = read(trace)
    engine.step([1])
    assert read(trace) == [late]


@pytest.mark.parametrize(
    ("role", "dtype", "sketched"),
    [("kv_both", torch.bfloat16, 3), ("kv_producer", torch.bfloat16, 0), ("kv_both", torch.uint8, 0)],
)
def test_numbers_are_sketched_where_the_connector_may_load(
    trace: Any, role: str, dtype: Any, sketched: int
) -> None:
    engine = Engine(role=role, dtype=dtype)
    engine.step([1, 2, 3])
    sketches = [value for one in trace.rows(Kind.SKETCHES) for value in one[4:] if value]
    assert len(sketches) == sketched and not set(sketches) & set(read(trace))


# --- looked at again --------------------------------------------------------------------------------


def load(
    engine: Engine, req_id: str, blocks: list[int], step: int, writes: bool = False, but: str = ""
) -> None:
    """All but the last block of a request come from the connector, or ought to; the last one is computed.
    ``but``: a layer that is left out."""
    AGENT.worker.step, AGENT.worker.watched = step, int(Flag.STORE)
    given = new(req_id, len(blocks) * SIZE, blocks, computed=(len(blocks) - 1) * SIZE)
    scheduled = output({req_id: SIZE}, given)
    setattr(scheduled, LOADED_ATTRIBUTE, [req_id])
    engine.prints.begins(scheduled, step)
    for name, tensor in engine.layers.items():
        tensor[blocks[-1]] += 1
        if writes and name != but:
            tensor[blocks[:-1]] += 1
    engine.prints.plan(scheduled)
    engine.prints.take()


def steps(engine: Engine, first: int, last: int, **more: Any) -> None:
    """Decode steps; ``more`` of the last one: its new requests, or those that are over."""
    for step in range(first, last + 1):
        one = output({}, *(more.get("admitted", ()) if step == last else ()))
        one.finished_req_ids = more.get("finished", set()) if step == last else set()
        AGENT.worker.step, AGENT.worker.watched = step, 0
        engine.prints.begins(one, step)
        engine.prints.plan(one)
        engine.prints.take()


def again(trace: Any) -> list[tuple[int, list[int]]]:
    """(step, prints) of all REPRINTS, without the engine's tag."""
    return [(one.step - STEP, [value for value in one[4:] if value]) for one in trace.rows(Kind.REPRINTS)]


def test_a_load_that_changed_nothing_is_looked_at_again(trace: Any) -> None:
    engine = Engine()
    engine.step([1, 2, 3])
    before = read(trace)
    load(engine, "b", [1, 2, 4], STEP + 1)
    steps(engine, STEP + 2, STEP + 7)
    engine.layers["layer.1"][2] += 1  # now it comes
    steps(engine, STEP + 8, STEP + 9)
    looks = again(trace)
    assert [step for step, _ in looks] == [2, 4, 8]
    assert [prints == before[:2] for _, prints in looks] == [True, True, False]


def test_loads_that_wrote_are_looked_at_as_their_blocks_go(trace: Any) -> None:
    engine = Engine()
    engine.step([1, 2, 3])
    load(engine, "b", [1, 2, 4], STEP + 1, writes=True)
    load(engine, "c", [5, 6], STEP + 1, writes=True)
    steps(engine, STEP + 2, STEP + 9, finished={"b", "c"})
    steps(engine, STEP + 9, STEP + 9, admitted=[new("hit", 12, [1, 2, 7], computed=8)])
    assert again(trace) == []
    steps(engine, STEP + 10, STEP + 10, admitted=[new("d", 4, [2])])
    engine.prints.ends()
    assert [(step, len(prints)) for step, prints in again(trace)] == [(9, 2), (10, 1)]


def test_a_step_with_nothing_to_hash_is_left_alone(trace: Any) -> None:
    """``idle``: until somebody is admitted, or a load looks as if it had not come."""
    engine = Engine()
    engine.step([1, 2, 3])
    assert engine.prints.idle
    load(engine, "b", [4, 5, 6], STEP + 1, writes=True)
    assert engine.prints.idle and engine.prints._rechecks.waiting
    load(engine, "c", [1, 2, 7], STEP + 2)
    assert not engine.prints.idle


def test_as_many_blocks_wait_as_there_is_room_for(trace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rechecks, "MOST_WAITING", 2)
    engine = Engine()
    for at, request in enumerate(("b", "c", "d")):
        load(engine, request, [at + 1, 6], STEP + at, writes=True)
    assert list(engine.prints._rechecks.waiting) == [(0, 2), (0, 3)]


def test_blocks_reused_without_a_load_are_not_looked_at_again(trace: Any) -> None:
    engine = Engine()
    engine.step([1, 2, 3])
    AGENT.worker.step = STEP + 1
    engine.prints.plan(output({"b": SIZE}, new("b", 12, [1, 2, 4], computed=8)))
    engine.prints.take()
    steps(engine, STEP + 2, STEP + 4)
    assert again(trace) == []


def test_loads_are_looked_at_as_request_blocks_or_connector_end(trace: Any) -> None:
    engine = Engine()
    engine.step([1, 2, 3])
    load(engine, "b", [1, 2, 4], STEP + 1)
    load(engine, "c", [3, 5], STEP + 2)
    steps(engine, STEP + 3, STEP + 6, finished={"b"})
    steps(engine, STEP + 7, STEP + 7, admitted=[new("d", 4, [2])])
    engine.prints.ends()
    looks = [(step, len(prints)) for step, prints in again(trace)]
    # b: after 2, 4 steps; before 6, where it ends; before 7, where block 2 goes. c: after 3, 5, at the end
    assert sorted(looks) == [(2, 2), (3, 1), (4, 2), (5, 1), (5, 2), (6, 2), (7, 1)]


@pytest.mark.parametrize("come", [True, False])
def test_the_last_look_is_not_waited_for(trace: Any, monkeypatch: pytest.MonkeyPatch, come: bool) -> None:
    """At the connector's shutdown what has come from the device by then is all."""
    engine = Engine()
    engine.step([1, 2, 3])
    load(engine, "b", [1, 2, 4], STEP + 1)
    monkeypatch.setattr(prints_module, "on_host", lambda tensor: False)
    monkeypatch.setattr(prints_module, "event_behind", lambda device: SimpleNamespace(query=lambda: come))
    engine.prints.ends()
    assert len(again(trace)) == come


def test_looking_again_keeps_to_the_budget(trace: Any) -> None:
    engine = Engine()
    engine.step([1, 2, 3])
    load(engine, "b", [1, 2, 4], STEP + 1)
    engine.prints.account.spent(2e9 * 2)
    steps(engine, STEP + 2, STEP + 9)
    assert again(trace) == []


# --- single layers ----------------------------------------------------------------------------------


def of_layers(trace: Any) -> dict[tuple[str, int], dict[str, int]]:
    """(request, place) -> the number of each layer, of all LAYERS records so far."""
    known = trace.names()
    found: dict[tuple[str, int], dict[str, int]] = {}
    for one in trace.rows(Kind.LAYERS):
        names = [known[layer] for layer in json.loads(known[one.layer_set])]
        words = (one.numbers0, one.numbers1, one.numbers2)
        mask = (1 << rows.NUMBER_BITS) - 1
        numbers = [word >> rows.NUMBER_BITS * part & mask for word in words for part in range(3)]
        for at in range(rows.NUMBERS // len(names)):
            own = numbers[at * len(names) : (at + 1) * len(names)]
            if any(own):
                place = known[one.request], one.first + at
                found.setdefault(place, {}).update(zip(names, own, strict=True))
    return found


@pytest.mark.parametrize("many", [2, 4, 12])
def test_equal_kv_has_equal_numbers_in_each_layer(trace: Any, many: int) -> None:
    engine = Engine(layers=many)
    first, *_, last = engine.layers.values()
    last[2] = first[3]
    engine.step([2, 3, 4, 5, 6])
    found = of_layers(trace)
    assert {place: set(own) for place, own in found.items()} == {
        ("a", place): set(engine.layers) for place in range(5)
    }
    names = list(engine.layers)
    assert found["a", 0][names[-1]] == found["a", 1][names[0]]
    assert len({number for own in found.values() for number in own.values()}) == 5 * many - 1


def test_a_connector_that_never_loads_has_none(trace: Any) -> None:
    engine = Engine(role="kv_producer")
    engine.step([1, 2, 3])
    assert of_layers(trace) == {} and len(read(trace)) == 3


def test_past_the_room_only_loaded_blocks_have_prints(trace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prints_module, "MOST_NUMBERS", 8)
    engine = Engine()
    engine.step([1, 2, 3, 4])
    engine.step([5, 6])
    load(engine, "b", [7, 8, 9], STEP + 1, writes=True)
    assert list(of_layers(trace)) == [*(("a", place) for place in range(4)), ("b", 0), ("b", 1)]


def test_a_layer_on_another_one_s_bytes_has_none_of_its_own(trace: Any) -> None:
    engine = Engine(shared=True)
    engine.step([1, 2])
    assert [list(own) for own in of_layers(trace).values()] == [["layer.0"]] * 2


# --- never in the way -------------------------------------------------------------------------------


def test_a_step_unwatched_or_without_a_seen_end_is_not_hashed(trace: Any) -> None:
    engine = Engine()
    AGENT.worker.step, AGENT.worker.watched = STEP, 0
    engine.prints.plan(output({"a": 4}, new("a", 4, [1])))
    engine.prints.take()
    engine.step([1], take=False)
    engine.prints.drop()
    engine.prints.take()
    assert read(trace) == []


def test_past_the_budget_nothing_is_hashed(trace: Any) -> None:
    engine = Engine()
    engine.step([1])
    engine.prints.account.spent(2e9 * 2)
    engine.step([1, 2])
    assert len(read(trace)) == 1


def test_a_block_spread_over_ranks_is_not_hashed(trace: Any) -> None:
    engine = Engine()
    engine.parallel.decode_context_parallel_size = 2
    engine.open()
    engine.step([1])
    assert read(trace) == []


def test_a_view_without_the_one_head_of_mla_is_hashed(trace: Any) -> None:
    """vLLM registers it with that dimension, and its layers keep it without."""
    engine = Engine((BLOCKS, 1, SIZE, 6))
    context = engine.wrapper.vllm_config.compilation_config.static_forward_context
    engine.step([1, 2])
    before = read(trace)
    for layer in context.values():
        layer.kv_cache = layer.kv_cache[:, 0]
    engine.open()
    engine.step([1, 2])
    assert len(set(before)) == 2 and read(trace) == before


def test_a_kv_cache_that_was_replaced_is_not_hashed(trace: Any) -> None:
    engine = Engine()
    context = engine.wrapper.vllm_config.compilation_config.static_forward_context
    context["layer.1"].kv_cache = torch.zeros(BLOCKS, 2, SIZE, 8)
    engine.step([1])
    assert read(trace) == [] and AGENT._failures == 0


def test_an_unreadable_output_ends_the_fingerprints_alone(trace: Any) -> None:
    engine = Engine()
    AGENT.worker.step, AGENT.worker.watched = STEP, int(Flag.STORE)
    engine.prints.plan(SimpleNamespace(scheduled_new_reqs=[1], scheduled_cached_reqs=[]))
    engine.step([1])
    assert read(trace) == [] and AGENT._failures == 1


def test_a_failure_ends_the_fingerprints_and_nothing_else(
    trace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine()
    monkeypatch.setattr(engine.prints, "_sums", lambda *args: 1 / 0)
    engine.step([1])
    monkeypatch.undo()
    engine.step([1])
    assert read(trace) == [] and AGENT._failures == 1


def test_what_the_overhead_script_switches_off_is_there() -> None:
    """scripts/overhead.py and scripts/step_parts.py reach for these in a running engine."""
    assert {"_sizes", "_own", "_signs", "account"} <= set(vars(Prints()))
    assert all(callable(getattr(Prints, name)) for name in ("begins", "plan", "take"))
