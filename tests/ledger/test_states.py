"""The book of states: whose state a connector read or wrote, at which point, and what is left open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synth import Chunk, Prompt, Sim

from kvtrace.ledger import read_run
from kvtrace.ledger.states.outcome import States
from kvtrace.report.build import build_report
from kvtrace.trace import hooks, rows
from kvtrace.trace.format import Fact, Flag, Kind, Role, pack_head

LONGEST = 1000
STORE, LOAD = int(Flag.STORE), int(Flag.LOAD)
WHOLE, HALF = "{0}+1", "/{0}+1"


class Hybrid(Sim):
    """An engine with one layer of attention (blocks of 4 tokens) and one of states, each of two tensors."""

    def __init__(self, path: Path, state_block: int = LONGEST, **more: Any) -> None:
        names = [f"model.layers.{i}.self_attn.attn" for i in range(2)]
        groups = [
            {"kind": "FullAttentionSpec", "block_size": 4, "layers": names[:1]},
            {"kind": "MambaSpec", "block_size": state_block, "layers": names[1:]},
        ]
        facts = {"kv_groups": groups, "max_model_len": LONGEST}
        sizes = ((4, [0]), (state_block, [1]))
        super().__init__(path, layers=2, block=4, kv_blocks=99, groups=sizes, engine_facts=facts, **more)

    def state(
        self, request: str, hook: str = "wait_for_save", flags: int = STORE, parts: tuple[int, ...] = (0, 1),
        how: str = WHOLE, step: int = 0, place: int = 0,
    ) -> None:  # fmt: skip
        """One call touched the state of a request; ``hook`` "": the background did. ``how`` "": not known
        which."""
        assert self.blocks is not None
        w, step = self.workers[0], step or self.step_id
        block = self.blocks.table(request, 1)[place]
        for part in parts:
            ident = w.name(how.format(block)) if how else 0
            self._record(hook, step, flags, w.name(self.layer_names[1]), ident, part, 2)

    def ends(self, *sure: bool, step: int = 0, hook: str = "wait_for_save") -> None:
        """The last records of watched calls."""
        for one in sure:
            self._record(hook, step or self.step_id, 0, 0, 0, int(one), 0)

    def _record(self, hook: str, step: int, flags: int, layer: int, *words: int) -> None:
        code = hooks.BY_NAME[hook].code if hook else 0
        head = pack_head(Kind.STATES, Role.WORKER, code, self.tag * 10 + 1 & 0xFF, flags)
        t = self.hook_t.get((0, step, hook, "")) or self.clock()
        self.workers[0].add(*rows.StatesTouched(head, t, layer, step, *words, call=1))

    def prompt(self, request: str, tokens: int, external: int = 0, asynchronous: bool = False) -> None:
        """A prompt is computed, in one step, but for what was taken from the connector."""
        self.arrive(Prompt(request, tokens))
        self.lookup(request, 0, external, external)
        self.step([Chunk(request, external, tokens - external, first=True)], prompts={request: tokens})

    def decode(self) -> None:
        self.step([], [], tokens=1)

    def book(self) -> States:
        self.write()
        found = read_run(self.dir).states
        assert found is not None
        found.saves.check()
        found.loads.check()
        return found

    def saves(self) -> dict[str, int]:
        return dict(self.book().saves.accounts)

    def loads(self) -> dict[str, int]:
        return dict(self.book().loads.accounts)


@pytest.fixture
def sim(tmp_path: Path) -> Hybrid:
    return Hybrid(tmp_path)


def test_a_state_read_after_the_prompts_last_forward_is_taken(sim: Hybrid) -> None:
    sim.prompt("a", 10)
    sim.state("a")
    sim.ends(True)
    book = sim.book()
    assert (book.layers, book.pairs, book.requests) == (1, 1, 1)
    assert (book.saves.total, book.saves.accounts) == (1, {"taken": 1})
    assert (book.loads.total, book.loads.accounts) == (0, {})


def test_the_next_steps_load_hook_still_finds_the_prompts_state(sim: Hybrid) -> None:
    sim.prompt("a", 10)
    sim.decode()
    sim.state("a", hook="start_load_kv")
    sim.finish("a", 11, 2)
    assert sim.saves() == {"taken": 1}


def test_a_state_read_after_a_later_token_is_another_one(sim: Hybrid) -> None:
    sim.prompt("a", 10)
    sim.decode()
    sim.state("a")
    sim.finish("a", 11, 2)
    assert sim.saves() == {"taken-elsewhere": 1}


def test_the_state_of_an_earlier_chunk_is_another_one(sim: Hybrid) -> None:
    sim.arrive(Prompt("a", 20))
    sim.step([Chunk("a", 0, 10, first=True)], prompts={"a": 20})
    sim.state("a")
    sim.step([Chunk("a", 10, 10)], prompts={"a": 20})
    assert sim.saves() == {"taken-elsewhere": 1}


@pytest.mark.parametrize("hook", ["save_kv_layer", ""])
def test_a_forward_that_may_not_be_over_leaves_the_point_open(sim: Hybrid, hook: str) -> None:
    sim.prompt("a", 10)
    sim.state("a", hook=hook)
    sim.ends(True)
    assert sim.saves() == {"taken-elsewhere": 1}


def test_a_state_of_which_one_tensor_was_read_is_taken_in_part(sim: Hybrid) -> None:
    sim.prompt("a", 10)
    sim.state("a", parts=(1,))
    sim.ends(True)
    assert sim.saves() == {"partly-taken": 1}


def test_a_tensor_of_which_a_piece_was_read_is_not_taken(sim: Hybrid) -> None:
    sim.prompt("a", 10)
    sim.state("a", parts=(0,))
    sim.state("a", parts=(1,), how=HALF)
    sim.ends(True)
    assert sim.saves() == {"partly-taken": 1}


def test_tensors_that_were_read_in_two_calls_make_one_state(sim: Hybrid) -> None:
    sim.prompt("a", 10)
    sim.state("a", parts=(0,))
    sim.state("a", hook="get_finished", parts=(1,))
    assert sim.saves() == {"taken": 1}


def test_what_nobody_can_have_read_is_not_taken(sim: Hybrid) -> None:
    sim.prompt("a", 10)
    sim.ends(True, True)
    sim.decode()
    sim.ends(True, hook="start_load_kv")
    sim.finish("a", 11, 2)
    assert sim.saves() == {"not-taken": 1}


def test_silence_is_no_absence(sim: Hybrid) -> None:
    sim.prompt("a", 10)
    assert sim.saves() == {"not-observed": 1}


@pytest.mark.parametrize("how", [WHOLE, ""])
def test_memory_given_out_by_address_may_have_been_read_or_not(sim: Hybrid, how: str) -> None:
    sim.prompt("a", 10)
    sim.state("a", flags=STORE | LOAD, how=how)
    sim.ends(True)
    assert sim.saves() == {"not-observed": 1}


@pytest.mark.parametrize("parts", [(), (0,)])
def test_after_a_call_that_may_have_read_more_nothing_is_said(sim: Hybrid, parts: tuple[int, ...]) -> None:
    sim.prompt("a", 10)
    sim.state("a", parts=parts)
    sim.ends(True, False)
    assert sim.saves() == {"not-observed": 1}


def test_a_call_of_the_next_step_that_may_read_more_counts(sim: Hybrid) -> None:
    sim.prompt("a", 10)
    sim.ends(True)
    sim.decode()
    sim.ends(False, hook="start_load_kv")
    assert sim.saves() == {"not-observed": 1}


def test_a_read_of_blocks_that_are_not_known_leaves_it_open(sim: Hybrid) -> None:
    sim.prompt("a", 10)
    sim.state("a", how="")
    sim.ends(True)
    assert sim.saves() == {"not-observed": 1}


def test_a_step_that_was_not_watched_says_nothing(sim: Hybrid) -> None:
    sim.watching = 0
    sim.prompt("a", 10)
    sim.ends(True)
    assert sim.saves() == {"not-observed": 1}


def test_a_connector_that_holds_blocks_back_may_read_later(sim: Hybrid) -> None:
    sim.prompt("a", 10)
    sim.ends(True)
    sim.open_save("a")
    assert sim.saves() == {"not-observed": 1}


def test_a_way_that_can_not_be_followed_leaves_it_open(sim: Hybrid) -> None:
    limit = {"connector": 71, "kind": "native", "what": "their.copy", "where": "", "hook": "", "step": 0}
    sim.workers[0].fact(Fact.WATCH_LIMITS, limit)
    sim.prompt("a", 10)
    sim.ends(True)
    assert sim.saves() == {"not-observed": 1}


def test_where_past_states_are_kept_the_point_is_not_known(tmp_path: Path) -> None:
    sim = Hybrid(tmp_path, state_block=8)
    sim.prompt("a", 10)
    sim.state("a", place=1)
    sim.prompt("b", 10)
    sim.ends(True)
    assert sim.saves() == {"taken-elsewhere": 1, "not-observed": 1}


def test_a_block_belongs_to_who_holds_it(sim: Hybrid) -> None:
    sim.prompt("a", 10)
    sim.ends(True)
    sim.prompt("b", 10)
    sim.state("b")
    sim.ends(True)
    assert sim.saves() == {"not-taken": 1, "taken": 1}


def test_a_state_that_was_written_before_the_forward_is_given(sim: Hybrid) -> None:
    sim.prompt("a", 10, external=8)
    sim.state("a", hook="start_load_kv", flags=LOAD)
    assert sim.loads() == {"given": 1}


def test_a_state_that_was_written_after_the_forward_is_not(sim: Hybrid) -> None:
    sim.prompt("a", 10, external=8)
    sim.state("a", flags=LOAD)
    sim.ends(True)
    assert sim.loads() == {"not-given": 1}


def test_a_state_of_which_a_part_was_written_is_given_in_part(sim: Hybrid) -> None:
    sim.prompt("a", 10, external=8)
    sim.state("a", hook="start_load_kv", flags=LOAD, parts=(0,))
    sim.ends(True)
    assert sim.loads() == {"partly-given": 1}


def test_a_load_that_nobody_saw_is_not_observed(sim: Hybrid) -> None:
    sim.prompt("a", 10, external=8)
    sim.ends(False)
    assert sim.loads() == {"not-observed": 1}


def test_memory_given_out_by_address_is_neither_taken_nor_given(sim: Hybrid) -> None:
    sim.prompt("a", 10, external=8)
    sim.state("a", hook="start_load_kv", flags=STORE | LOAD, how="")
    sim.ends(True)
    book = sim.book()
    assert (book.saves.accounts, book.loads.accounts) == ({"not-observed": 1}, {"not-observed": 1})


def test_a_prompt_that_did_not_end_has_no_state_of_its_end(sim: Hybrid) -> None:
    sim.arrive(Prompt("a", 20))
    sim.step([Chunk("a", 0, 10, first=True)], prompts={"a": 20})
    assert sim.book().saves.total == 0


def test_only_a_model_with_states_has_their_book_in_its_report(tmp_path: Path) -> None:
    hybrid, plain = Hybrid(tmp_path / "hybrid"), Sim(tmp_path / "plain", kv_blocks=99)
    hybrid.prompt("a", 10)
    plain.step([Chunk("a", 0, 10, first=True)])
    hybrid.write()
    plain.write()
    ledger = build_report(tmp_path / "hybrid")["ledger"]
    assert ledger["states"]["saves"] == {"total": 1, "accounts": {"not-observed": 1}}
    assert "states" not in build_report(tmp_path / "plain")["ledger"]


def test_without_a_connector_there_is_no_book(tmp_path: Path) -> None:
    sim = Hybrid(tmp_path, connector=None)
    sim.step([Chunk("a", 0, 10, first=True)])
    sim.write()
    assert read_run(tmp_path).states is None


TOUCH = st.tuples(
    st.sampled_from(["wait_for_save", "start_load_kv", "save_kv_layer", "get_finished", ""]),
    st.sampled_from([STORE, LOAD, STORE | LOAD]),
    st.sets(st.integers(0, 1)),
    st.sampled_from([WHOLE, HALF, ""]),
)
STEP = st.tuples(st.integers(0, 8), st.lists(TOUCH, max_size=3), st.lists(st.booleans(), max_size=2))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEP, min_size=1, max_size=5))
def test_each_state_has_exactly_one_outcome(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Any]
) -> None:
    sim = Hybrid(tmp_path_factory.mktemp("run"))
    for number, (external, touches, sure) in enumerate(steps):
        sim.prompt(f"r{number}", 10, external)
        for hook, flags, parts, how in touches:
            sim.state(f"r{number // 2}", hook, flags, tuple(sorted(parts)), how)
        sim.ends(*sure)
    book = sim.book()
    assert book.saves.total == len(steps) and book.loads.total == sum(bool(one[0]) for one in steps)
