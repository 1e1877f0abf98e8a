"""The book of states: whose state a connector read or wrote, at which point, and what is left open."""

from __future__ import annotations

from collections.abc import Callable
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

    def prompt(self, request: str, tokens: int, external: int = 0) -> None:
        """A prompt is computed, in one step, but for what was taken from the connector."""
        self.one_step(request, tokens, taken=external, ends=False)

    def decode(self) -> None:
        self.step([], [], tokens=1)

    def book(self) -> States:
        self.write()
        found = read_run(self.dir).states
        assert found is not None
        return found

    def saves(self) -> dict[str, int]:
        return dict(self.book().saves)

    def loads(self) -> dict[str, int]:
        return dict(self.book().loads)


@pytest.fixture
def sim(tmp_path: Path) -> Hybrid:
    return Hybrid(tmp_path)


def test_a_state_read_after_the_prompts_last_forward_is_taken(sim: Hybrid) -> None:
    sim.prompt("a", 10)
    sim.state("a")
    sim.ends(True)
    book = sim.book()
    assert (book.layers, book.pairs, book.requests) == (1, 1, 1)
    assert (book.saves, book.loads) == ({"taken": 1}, {})


Work = Callable[[Hybrid], None]


def touch(**how: Any) -> Work:
    return lambda sim: sim.state("a", **how)


def ends(*sure: bool, **where: Any) -> Work:
    return lambda sim: sim.ends(*sure, **where)


BY_ADDRESS = STORE | LOAD

SAVES: dict[str, tuple[list[Work], str]] = {
    "nobody said anything": ([], "not-observed"),
    "the next step's load hook still finds it": (
        [Hybrid.decode, touch(hook="start_load_kv")], "taken",
    ),
    "read after a later token": ([Hybrid.decode, touch()], "taken-elsewhere"),
    "the forward may not be over": ([touch(hook="save_kv_layer"), ends(True)], "taken-elsewhere"),
    "... in the background": ([touch(hook=""), ends(True)], "taken-elsewhere"),
    "one tensor of two": ([touch(parts=(1,)), ends(True)], "partly-taken"),
    "a piece of a tensor": ([touch(parts=(0,)), touch(parts=(1,), how=HALF), ends(True)], "partly-taken"),
    "both tensors, in two calls": ([touch(parts=(0,)), touch(hook="get_finished", parts=(1,))], "taken"),
    "nobody can have read it": (
        [ends(True, True), Hybrid.decode, ends(True, hook="start_load_kv")], "not-taken",
    ),
    "no call read it": ([ends(True)], "not-taken"),
    "memory given out by address": ([touch(flags=BY_ADDRESS), ends(True)], "not-observed"),
    "... and not known which": ([touch(flags=BY_ADDRESS, how=""), ends(True)], "not-observed"),
    "a call may have read more": ([ends(True, False)], "not-observed"),
    "... than one tensor": ([touch(parts=(0,)), ends(True, False)], "not-observed"),
    "a call of the next step may read more": (
        [ends(True), Hybrid.decode, ends(False, hook="start_load_kv")], "not-observed",
    ),
    "not known which blocks": ([touch(how=""), ends(True)], "not-observed"),
    "its blocks are held back": ([ends(True), lambda sim: sim.open_save("a")], "not-observed"),
}  # fmt: skip


@pytest.mark.parametrize("case", SAVES)
def test_whether_the_state_of_a_prompts_end_was_taken(sim: Hybrid, case: str) -> None:
    work, outcome = SAVES[case]
    sim.prompt("a", 10)
    for one in work:
        one(sim)
    sim.finish("a", 11, 2)
    assert sim.saves() == {outcome: 1}


@pytest.mark.parametrize(
    ("work", "loads", "saves"),
    [
        ([touch(hook="start_load_kv", flags=LOAD)], "given", "not-observed"),
        ([touch(flags=LOAD), ends(True)], "not-given", "not-taken"),
        ([touch(hook="start_load_kv", flags=LOAD, parts=(0,)), ends(True)], "partly-given", "not-taken"),
        ([ends(False)], "not-observed", "not-observed"),
        (
            [touch(hook="start_load_kv", flags=BY_ADDRESS, how=""), ends(True)],
            "not-observed", "not-observed",
        ),
    ],
    ids=["before the forward", "after it", "a part", "nobody saw it", "memory given out by address"],
)  # fmt: skip
def test_whether_the_state_that_is_loaded_was_given(
    sim: Hybrid, work: list[Work], loads: str, saves: str
) -> None:
    sim.prompt("a", 10, external=8)
    for one in work:
        one(sim)
    book = sim.book()
    assert (book.loads, book.saves) == ({loads: 1}, {saves: 1})


def test_the_state_of_an_earlier_chunk_is_another_one(sim: Hybrid) -> None:
    sim.arrive(Prompt("a", 20))
    sim.step([Chunk("a", 0, 10, first=True)], prompts={"a": 20})
    sim.state("a")
    sim.step([Chunk("a", 10, 10)], prompts={"a": 20})
    assert sim.saves() == {"taken-elsewhere": 1}


def test_a_step_that_was_not_watched_says_nothing(sim: Hybrid) -> None:
    sim.watching = 0
    sim.prompt("a", 10)
    sim.ends(True)
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


def test_a_prompt_that_did_not_end_has_no_state_of_its_end(sim: Hybrid) -> None:
    sim.arrive(Prompt("a", 20))
    sim.step([Chunk("a", 0, 10, first=True)], prompts={"a": 20})
    assert sim.book().saves == {}


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
    assert sum(book.saves.values()) == len(steps)
    assert sum(book.loads.values()) == sum(bool(one[0]) for one in steps)
