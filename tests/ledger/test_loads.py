"""The ledger of loads: each prompt token on one account, from the lookup to the layers."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from both_books import agree, balanced
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synth import Chunk, Entry, Fate, Prompt, Rounding, Sim

from kvtrace.causes import diagnose
from kvtrace.causes.cause import LOADS
from kvtrace.causes.outcomes import named
from kvtrace.causes.registry import CATALOGUE
from kvtrace.ledger import Run, read_run
from kvtrace.ledger.ends import LoadEnd, Outcome, SaveEnd
from kvtrace.ledger.loads.outcome import LoadOf
from kvtrace.ledger.whole import of_load
from kvtrace.terms import Grade
from kvtrace.trace.format import Fact, Flag

SETTINGS = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
LOAD, ASYNC = int(Flag.LOAD), int(Flag.ASYNC)


def one(tmp_path: Path, *, prompt: int = 128, layers: int = 2, **more: object) -> Sim:
    sim = Sim(tmp_path, layers=layers, **more)  # type: ignore[arg-type]
    sim.arrive(Prompt("a", prompt, digest=1))
    return sim


def accounts(sim: Sim) -> dict[str, int]:
    """In tokens; the books must hold whole ones."""
    sim.write()
    run = read_run(sim.dir)
    run.loads.check()
    assert run.loads.pairs
    return {name: amount // run.loads.pairs for name, amount in named(run.loads).accounts.items()}


def take(sim: Sim, tokens: int, fate: Fate | None = None) -> int:
    """A synchronous load of so many of 128 tokens, and the step that computes the rest."""
    sim.lookup("a", 0, tokens, tokens)
    chunk = Chunk("a", tokens, 128 - tokens, first=True)
    step = sim.step([chunk], prompts={"a": 128}, fate=fate or Fate())
    sim.finish("a", 128)
    return step


def test_a_request_that_was_never_let_in_is_not_in_the_books(tmp_path: Path) -> None:
    sim = one(tmp_path)
    sim.finish("a", 0, 0, "FINISHED_ABORTED")
    sim.write()
    assert read_run(sim.dir).loads.total == 0


def test_without_a_lookup(tmp_path: Path) -> None:
    sim = one(tmp_path)
    sim.asks = False
    sim.step([Chunk("a", 32, 96, first=True)], prompts={"a": 128})
    assert accounts(sim) == {"local-hit": 32, "missed:never-looked-up": 96}


def test_waiting_for_an_answer(tmp_path: Path) -> None:
    sim = one(tmp_path)
    sim.lookup("a", 32, None, None)
    assert accounts(sim) == {"local-hit": 32, "pending": 96}


def test_a_load_that_nobody_saw_is_not_called_loaded(tmp_path: Path) -> None:
    """One rank's trace ends before the step; the other one's, whose records were lost, may not."""
    sim = one(tmp_path, tp=2)
    sim.step([], tokens=1)
    take(sim, 96, fate=Fate(missing_ranks=frozenset({0, 1})))
    sim.workers[1].trailer(2, 10)
    sim.write()
    assert named(read_run(sim.dir).loads).accounts == {
        "pending": 96 * 2, "not-observed": 96 * 2, "missed:lookup-miss": 32 * 4,
    }  # fmt: skip
    assert saves(sim) == {"pending": 64, "not-observed": 64}  # half of the pairs each


HOOKS_ALONE = ("wait_for_layer_load",)
"""start_load_kv must do it itself."""


@pytest.mark.parametrize(
    ("noop", "effects", "failed", "want"),
    [
        (HOOKS_ALONE, {0: 96, 1: 96}, 0, {"loaded": 96}),
        (HOOKS_ALONE, {None: 0}, 0, {"not-loaded:load-not-injected": 96}),
        # A thread or native code may have done it.
        (HOOKS_ALONE, {None: -1}, 0, {"loaded": 96}),
        ((), {None: 0}, 0, {"loaded": 96}),
        (HOOKS_ALONE, {0: 96}, 0, {"loaded": 96}),
        ((), {}, 2, {"loaded": 32, "not-loaded:load-failed": 64}),
        # The connector says why nothing is there: that is no load that nobody heard of.
        (HOOKS_ALONE, {None: 0}, 2, {"not-loaded:load-failed": 64, "not-loaded:load-not-injected": 32}),
    ],
    ids=[
        "both layers", "nothing", "not known what", "nothing, and other hooks may have", "one layer",
        "blocks that failed", "nothing, and blocks that failed",
    ],
)  # fmt: skip
def test_what_the_hooks_of_a_load_were_seen_to_write(
    tmp_path: Path, noop: tuple[str, ...], effects: dict[int | None, int], failed: int, want: dict[str, int]
) -> None:
    sim = one(tmp_path, tp=2, noop=noop)
    step = take(sim, 96)
    for rank in range(2):
        for layer, slots in effects.items():
            sim.effect(rank, step, layer, slots, hook="start_load_kv", flags=LOAD)
        if failed:
            sim.load_errors(rank, step, failed)
    assert accounts(sim) == {**want, "missed:lookup-miss": 32}
    if len(effects) == sim.layers:
        assert all(row.measured for row in read_run(sim.dir).load_rows)


@pytest.mark.parametrize("entry", [Entry("a", 64, 96, 0, LOAD), Entry("a", 3, 3, -1, LOAD)])
def test_metadata_that_names_less_of_a_load_says_nothing(tmp_path: Path, entry: Entry) -> None:
    sim = one(tmp_path)
    sim.lookup("a", 0, 96, 96)
    sim.step([Chunk("a", 96, 32, first=True)], [entry], prompts={"a": 128})
    assert accounts(sim) == {"loaded": 96, "missed:lookup-miss": 32}


def test_what_is_missing_in_one_layer_is_not_loaded_at_all() -> None:
    """Of tokens that one of four layers lacked, three in four were called loaded."""
    part = (0, 64, LoadEnd.NOT_WRITTEN)
    load = SimpleNamespace(
        prompt=72,
        ends={LoadEnd.LOADED: 192, LoadEnd.NOT_WRITTEN: 64, LoadEnd.MISSED: 32},
        lost={(part,): 0b100},
    )
    assert of_load(cast(LoadOf, load), 4) == {LoadEnd.NOT_WRITTEN: 64, LoadEnd.MISSED: 8}


def test_a_whole_prompt_loaded_behind_computes_its_last_token(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    sim.load_begins("a", 128, 128)
    sim.done("a", 0, flags=LOAD)
    sim.done("a", flags=LOAD)
    sim.step([Chunk("a", 127, 1, first=True)], prompts={"a": 128})
    assert accounts(sim) == {"loaded": 127, "clamped:lookup-clamped": 1}


def test_asynchronous_and_failed(tmp_path: Path) -> None:
    for i, failed in enumerate((0, 1)):
        sim = Sim(tmp_path / str(i))
        step = sim.load_begins("a", 128, 96)
        if not failed:
            sim.load_errors(0, step, 1)
        sim.done("a", failed=failed, flags=LOAD)
        start = 0 if failed else 32
        sim.step([Chunk("a", start, 128 - start, first=True)], prompts={"a": 128})
        lost = 96 if failed else 64
        want = {"not-loaded:load-failed": lost, "missed:lookup-miss": 32}
        assert accounts(sim) == (want if failed else {"loaded": 32, **want})


@pytest.mark.parametrize(("began", "end"), [(64, LoadEnd.PARTLY), (96, LoadEnd.FAILED)])
def test_what_lies_before_the_reported_blocks_is_not_failed(tmp_path: Path, began: int, end: LoadEnd) -> None:
    """Other blocks were reported than those that were not written: vLLM computed anew behind these.
    ``began``: where; at the load's end nothing tells which were reported."""
    sim = Sim(tmp_path, kv_blocks=64)
    step = sim.load_begins("a", 128, 96)
    sim.write_kv("a", 0, 16, hook="", step=step)
    sim.write_kv("a", 32, 96, hook="", step=step)
    sim.load_errors(0, step, 1)
    sim.done("a", flags=LOAD)
    sim.step([Chunk("a", began, 128 - began, first=True)], prompts={"a": 128})
    sim.finish("a", 128)
    sim.write()
    (row,) = read_run(sim.dir).load_rows
    (positions,) = ({(start, stop) for start, stop, of in parts if of == end} for parts in row.lost)
    assert (16, 32) in positions


@pytest.mark.parametrize(
    ("times", "status"),
    [
        (2, "FINISHED_ABORTED"),  # vLLM asks once more after a load that failed
        # Its default, ``kv_load_failure_policy`` "fail": no chunk and no second lookup tells of it.
        (1, "FINISHED_ERROR"),
    ],
)
def test_asynchronous_that_failed_and_the_request_never_ran(tmp_path: Path, times: int, status: str) -> None:
    sim = one(tmp_path)
    for _ in range(times):
        sim.lookup("a", 0, 96, 96, ASYNC)
        sim.load_errors(0, sim.step([], [Entry("a", 96, 96, 0, LOAD)], tokens=0), 3)
        sim.done("a", 0, flags=LOAD)
        sim.done("a", flags=LOAD)
    sim.finish("a", 0, 0, status)
    assert accounts(sim) == {"not-loaded:load-failed": 96, "missed:lookup-miss": 32}


def test_a_load_after_a_preemption_is_not_booked_twice(tmp_path: Path) -> None:
    sim = one(tmp_path)
    sim.lookup("a", 0, 64, 64)
    sim.step([Chunk("a", 64, 32, first=True)], prompts={"a": 128})
    sim.preempt("a", 96)
    sim.lookup("a", 0, 96, 96)
    sim.step([Chunk("a", 96, 32, resumed=True)], prompts={"a": 128})
    sim.finish("a", 128)
    assert accounts(sim) == {"loaded": 64, "missed:lookup-miss": 64}


# ------------------------------------------------------------------------- in the ledger of the saves


def saves(sim: Sim) -> dict[str, int]:
    """The accounts of the saves, in tokens."""
    sim.write()
    run = read_run(sim.dir)
    agree(run)
    book = diagnose(run).saves
    assert book.pairs
    return {name: amount // book.pairs for name, amount in book.accounts.items()}


@pytest.mark.parametrize(
    ("slots", "want"),
    [
        (96, {"loaded": 96, "saved": 32}),
        (64, {"loaded": 64, "not-loaded:loaded-partly": 32, "saved": 32}),
        (0, {"not-loaded:load-not-injected": 96, "saved": 32}),
        (-1, {"loaded": 96, "saved": 32}),  # nothing shows that it did not come
    ],
)
def test_saves_call_loaded_what_came(tmp_path: Path, slots: int, want: dict[str, int]) -> None:
    sim = Sim(tmp_path, layers=1, noop=("wait_for_layer_load",), kv_blocks=16)
    for name, wrote in (("whole", 96), ("a", slots)):
        sim.watching = int(Flag.LOAD) if wrote >= 0 else 0
        sim.arrive(Prompt(name, 128, digest=len(name)))
        sim.lookup(name, 0, 96, 96)
        entries = [Entry(name, 32, 128, 96)]
        step = sim.step([Chunk(name, 96, 32, first=True)], entries, prompts={name: 128})
        sim.effect(0, step, 0 if wrote else None, wrote, hook="start_load_kv", flags=LOAD)
        if wrote > 0:
            sim.write_kv(name, 0, wrote)
        sim.finish(name, 128)
    both = Counter({"loaded": 96, "saved": 32})
    both.update(want)
    assert saves(sim) == dict(both)


def test_saves_by_pair(tmp_path: Path) -> None:
    """One rank's load hook raised: its pairs alone lost the tokens."""
    sim = one(tmp_path, tp=2)
    step = take(sim, 96)
    sim.hook(1, "start_load_kv", step, flags=int(Flag.RAISED))
    sim.write()
    run = read_run(sim.dir, watch=("a",))
    agree(run)
    assert diagnose(run).saves.accounts == {
        "loaded": 96 * 2, "not-loaded:load-failed": 96 * 2, "not-saved:metadata-has-no-store": 32 * 4,
    }  # fmt: skip
    spans = {(span.start, span.end, span.outcome): span.pairs for span in run.spans}
    assert spans[0, 96, Outcome("loaded")] == (0, 1)
    assert spans[0, 96, Outcome("not-loaded", LoadEnd.FAILED, Grade.READ)] == (2, 3)


def test_what_failed_and_was_computed_after_all_is_no_loss(tmp_path: Path) -> None:
    sim = one(tmp_path)
    sim.lookup("a", 0, 96, 96)
    step = sim.step([Chunk("a", 96, 32, first=True)], prompts={"a": 128})
    sim.load_errors(0, step, 2)
    sim.step([Chunk("a", 32, 96)], [Entry("a", 96, 128, 32)], prompts={"a": 128})
    sim.finish("a", 128)
    assert saves(sim) == {"loaded": 32, "saved": 96}
    assert accounts(sim) == {"loaded": 32, "not-loaded:load-failed": 64, "missed:lookup-miss": 32}


def test_what_failed_and_was_not_computed(tmp_path: Path) -> None:
    """kv_load_failure_policy fail: the last positions, as their places are not recorded."""
    sim = one(tmp_path)
    step = take(sim, 96)
    sim.load_errors(0, step, 2)
    sim.write()
    spans = read_run(sim.dir, watch=("a",)).spans
    assert [(span.start, span.end, span.outcome) for span in spans] == [
        (0, 32, Outcome("loaded")), (32, 96, Outcome("not-loaded", LoadEnd.FAILED, Grade.READ)),
        (96, 128, Outcome("not-saved", SaveEnd.NOT_DECLARED)),
    ]  # fmt: skip
    assert saves(sim)["not-loaded:load-failed"] == 64


def test_lost_in_loading_and_computed_after_a_preemption(tmp_path: Path) -> None:
    sim = one(tmp_path, noop=("wait_for_layer_load",))
    sim.lookup("a", 0, 96, 96)
    step = sim.step([Chunk("a", 96, 32, first=True)], prompts={"a": 128})
    sim.effect(0, step, None, 0, hook="start_load_kv", flags=LOAD)
    sim.preempt("a", 128)
    sim.lookup("a", 0, 0, 0)
    sim.step([Chunk("a", 0, 64, resumed=True)], [Entry("a", 64, 128, 0)], prompts={"a": 128})
    sim.finish("a", 128)
    assert saves(sim) == {
        "saved": 64,
        "not-loaded:load-not-injected": 32,
        "not-saved:metadata-has-no-store": 32,
    }


# ------------------------------------------------------------------------- random schedules


@st.composite
def schedules(draw: st.DrawFn, folder: Path) -> Sim:
    tp, layers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sim = Sim(
        folder, tp=tp, layers=layers, batched=256,
        live=draw(st.lists(st.sampled_from([True, True, False]), min_size=tp, max_size=tp)),
        noop=draw(st.sampled_from([(), ("wait_for_layer_load",)])),
        role=draw(st.sampled_from(["kv_both", "kv_consumer", "kv_producer"])),
        in_process=tp == 1 and draw(st.booleans()),
    )  # fmt: skip
    sim.asks = draw(st.booleans())
    for i in range(draw(st.integers(1, 4))):
        prompt = Prompt(f"r{i}", draw(st.integers(1, 200)), digest=draw(st.integers(0, 2)),
                        prefix=draw(st.integers(0, 2)))  # fmt: skip
        sim.arrive(prompt)
        _life(draw, sim, prompt)
    return sim


def _life(draw: st.DrawFn, sim: Sim, prompt: Prompt) -> None:
    """One request: admissions with loads of every kind, chunks, preemptions, an end or none."""
    n = prompt.length
    for admission in range(draw(st.integers(1, 2))):
        local = draw(st.integers(0, n))
        answer = draw(st.sampled_from([None, -32, 0, 5, 32, n, n + 7]))
        taken = draw(st.sampled_from([None, 0, 5, max(0, min(answer or 0, n - local))]))
        asynchronous = draw(st.booleans())
        asked = draw(st.integers(0, 4)) > 0
        if asked:
            sim.lookup(prompt.id, local, answer, taken, ASYNC if asynchronous else 0)
        got = local + (taken or 0 if asked else 0)
        entries = [
            Entry(prompt.id, draw(st.integers(-1, n)), draw(st.integers(-1, n)), draw(st.integers(-1, n)),
                  draw(st.sampled_from([LOAD, LOAD, int(Flag.STORE)])))
            for _ in range(draw(st.integers(0, 2)))
        ]  # fmt: skip
        fate = draw(
            st.sampled_from([
                Fate(), Fate(), Fate(missing_ranks=frozenset({0})), Fate(unbound_ranks=frozenset({0})),
                Fate(dead_pairs=frozenset({(0, 0)}), mode=2), Fate(unhooked=frozenset({(0, 0)})),
                Fate(raising=frozenset({(0, 0)})),
            ])
        )  # fmt: skip
        if asynchronous and draw(st.booleans()):
            step = sim.step([], entries, tokens=0, fate=fate)
            entries = []
            _evidence(draw, sim, step)
            sim.clock(draw(st.sampled_from([1, 10**9, 6 * 10**9, 70 * 10**9])))
            for rank in draw(st.sampled_from([[None], [0], [0, None], []])):
                sim.done(prompt.id, rank, draw(st.sampled_from([0, 0, 1])), LOAD)
        if draw(st.integers(0, 5)) == 0:
            if draw(st.booleans()):
                sim.finish(prompt.id, draw(st.integers(0, got + 1)), 0, "FINISHED_ABORTED")
            return
        start = min(got, n - 1) if draw(st.integers(0, 3)) else draw(st.integers(0, n - 1))
        step = sim.step([Chunk(prompt.id, start, n - start, first=admission == 0, resumed=admission > 0)],
                        entries, prompts={prompt.id: n}, fate=fate)  # fmt: skip
        _evidence(draw, sim, step)
        sim.preempt(prompt.id, draw(st.integers(0, n)))
    sim.finish(prompt.id, n)


def _evidence(draw: st.DrawFn, sim: Sim, step: int) -> None:
    for rank in range(sim.tp):
        for layer in [None, *range(sim.layers)]:
            if draw(st.integers(0, 2)) == 0:
                hook = draw(st.sampled_from(["start_load_kv", "wait_for_layer_load"]))
                slots = draw(st.sampled_from([-1, 0, 5, 64, 200]))
                sim.effect(rank, step, layer, slots, hook=hook, flags=LOAD)
        if draw(st.integers(0, 3)) == 0:
            sim.load_errors(rank, step, draw(st.integers(0, 4)))
        if draw(st.integers(0, 6)) == 0:
            sim.hook(rank, draw(st.sampled_from(["start_load_kv", "wait_for_layer_load"])), step,
                     draw(st.sampled_from(["", *sim.layer_names])), flags=int(Flag.RAISED))  # fmt: skip


def checked(folder: Path) -> Run:
    run, diagnosis = balanced(folder)  # asserts the sum of each request
    book = diagnosis.loads
    lost = {name for name in diagnosis.saves.accounts if name.startswith("not-loaded:")}
    assert lost <= book.accounts.keys()  # and so each has a finding, see below
    pairs = {engine.tag: engine.pairs for engine in run.engines}
    assert book.total == sum(row.prompt * pairs[row.engine] for row in run.load_rows)
    assert all(amount > 0 for row in run.load_rows for amount in row.ends.values())
    found = {finding.id: finding for finding in diagnosis.findings}
    ruled_out = {item.id for item in diagnosis.ruled_out}
    for account, amount in book.accounts.items():
        _, _, cause = account.partition(":")
        if not cause:
            assert account in ("local-hit", "loaded", "pending", "not-observed")
            continue
        assert CATALOGUE[cause].ledger == LOADS
        if cause == "lookup-miss":
            continue  # a finding only where something could be expected
        assert cause in found and cause not in ruled_out
        # no whole token counts for an account where each token has a worse one on another layer
        assert abs(found[cause].tokens - book.tokens.get(account, 0)) < 1e-6 * max(1, amount)
    return run


@SETTINGS
@given(st.data())
def test_books_of_loads_balance(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data.draw(schedules(folder)).write()
        checked(folder)


@SETTINGS
@given(st.integers(1, 300), st.integers(0, 300), st.integers(-64, 300), st.booleans(), st.integers(1, 3))
def test_prefix_hits_at_every_offset(
    prompt: int, local: int, answer: int, asynchronous: bool, tp: int
) -> None:
    """As vLLM schedules: what is offered is taken, up to the last token; a healthy load has no fault. An
    answer of more than the prompt has is one."""
    local = min(local, prompt - 1)
    taken = max(0, min(answer, prompt - 1 - local))
    with tempfile.TemporaryDirectory() as name:
        sim = Sim(Path(name), tp=tp)
        sim.arrive(Prompt("a", prompt, digest=1))
        sim.lookup("a", local, answer, taken, ASYNC if asynchronous else 0)
        if asynchronous and taken:
            sim.step([], [Entry("a", taken, taken, local, LOAD)], tokens=0)
            sim.done("a", flags=LOAD)
        start = local + taken
        step = sim.step([Chunk("a", start, prompt - start, first=True)], prompts={"a": prompt})
        for rank in range(tp):
            for layer in range(2):
                sim.effect(rank, step, layer, taken, hook="start_load_kv", flags=LOAD)
        sim.finish("a", prompt)
        sim.write()
        run = checked(sim.dir)
        assert run.loads.accounts.get(LoadEnd.LOADED, 0) == taken * run.engines[0].pairs
        assert run.loads.accounts.get(LoadEnd.LOCAL_HIT, 0) == local * run.engines[0].pairs
        causes = [f for f in diagnose(run).findings if CATALOGUE[f.id].ledger == LOADS]
        faults = [finding.id for finding in causes if finding.severity == "fault"]
        assert faults == ["lookup-clamped"] * (local + answer > prompt)


@pytest.mark.parametrize("at", [None, 0, 1])
def test_what_a_reset_made_the_store_forget_begins_no_prompt(tmp_path: Path, at: int | None) -> None:
    """``reset_cache``: what was stored before it is not there to be found, by the same promise."""
    sim = Sim(tmp_path, layers=1)
    for number, name in enumerate("abc"):
        sim.serve([Prompt(name, 64, digest=4, prefixes=(3, 4))], Rounding(32).policy())
        if number == at:
            sim.scheduler.fact(Fact.CACHE_RESET, {"connector": 1, "step": sim.step_id}, sim.t)
    sim.write()
    run = read_run(tmp_path)
    alike = {run.requests[row].id: len(shared) for row, shared in run.in_common.items()}
    assert alike == {None: {"a": 2, "b": 2, "c": 2}, 0: {"b": 2, "c": 2}, 1: {"a": 2, "b": 2}}[at]
