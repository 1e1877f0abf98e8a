"""The ledger balances whatever happens: random schedules, faults, cut and reordered spools."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from both_books import balanced
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from synth import Chunk, Entry, Fate, Prompt, Sim

from kvtrace.causes import diagnose
from kvtrace.ledger import Run, RunError
from kvtrace.ledger.intervals import covers, length, subtract, union
from kvtrace.trace.format import RECORD_SIZE, Fact, Flag

SETTINGS = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@st.composite
def pairs(draw: st.DrawFn, tp: int, layers: int) -> frozenset[tuple[int, int]]:
    every = [(rank, layer) for rank in range(tp) for layer in range(layers)]
    return frozenset(draw(st.lists(st.sampled_from(every), max_size=2)))


@st.composite
def fates(draw: st.DrawFn, tp: int, layers: int) -> Fate:
    if draw(st.integers(0, 3)):
        return Fate()
    return Fate(
        dead_pairs=draw(pairs(tp, layers)),
        unhooked=draw(pairs(tp, layers)),
        raising=draw(pairs(tp, layers)),
        unbound_ranks=frozenset(draw(st.lists(st.integers(0, tp - 1), max_size=1))),
        missing_ranks=frozenset(draw(st.lists(st.integers(0, tp - 1), max_size=1))),
        mode=draw(st.sampled_from([0, 1, 2, -1])),
        direct=draw(st.booleans()),
        twice=draw(st.booleans()),
    )


def entry(draw: st.DrawFn, request: str, prompt: int) -> Entry:
    flags = int(
        draw(st.sampled_from([Flag.STORE, Flag.STORE | Flag.ASYNC, Flag.LOAD, Flag.STORE | Flag.UNREADABLE]))
    )
    return Entry(request, draw(st.integers(-1, prompt + 40)), draw(st.integers(-1, prompt)),
                 draw(st.integers(-1, prompt)), flags)  # fmt: skip


def measured(draw: st.DrawFn, sim: Sim, request: str, tp: int, layers: int) -> None:
    """Something that was seen of the latest step, or of an asynchronous save: true or not."""
    rank = draw(st.integers(0, tp - 1))
    kind = draw(st.sampled_from(["effect", "effect", "effect", "open", "done", "caught"]))
    if kind == "effect":
        sim.effect(
            rank, sim.step_id, draw(st.sampled_from([None, *range(layers)])), draw(st.integers(-1, 200)),
            size=draw(st.sampled_from([-1, 0, 10, 9999])), files=draw(st.integers(-1, 2)),
            target=draw(st.integers(0, 3)), hook=draw(st.sampled_from(["save_kv_layer", "wait_for_save"])),
            flags=int(draw(st.sampled_from([Flag.STORE, Flag.STORE, Flag.LOAD, 0]))),
        )  # fmt: skip
    elif kind == "open":
        sim.open_save(request)
    elif kind == "done":
        sim.done(request, draw(st.sampled_from([None, rank])), draw(st.integers(0, 1)))
    else:
        hook = draw(st.sampled_from(["save_kv_layer", "build_connector_meta"]))
        sim.workers[rank].fact(
            Fact.SWALLOWED, {"hook": hook, "step": sim.step_id, "layer": sim.layer_names[0], "type": "E",
                             "where": "a.py:1 in f", "count": draw(st.integers(0, 9))},
        )  # fmt: skip


@st.composite
def schedules(draw: st.DrawFn, folder: Path, tag: int = 7) -> Sim:
    tp, layers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sim = Sim(
        folder, tag=tag, pid=100 * tag, tp=tp, layers=layers, batched=draw(st.sampled_from([32, 64, 512])),
        connector=draw(st.sampled_from(["S", "S", "S", None])),
        role=draw(st.sampled_from(["kv_both", "kv_consumer"])),
        ints=draw(st.sampled_from([{}, {"u": 32}, {"u": 64, "v": 48}])),
        live=draw(st.lists(st.booleans(), min_size=tp, max_size=tp)),
        noop=draw(st.sampled_from([(), ("save_kv_layer",)])), in_process=tp == 1 and draw(st.booleans()),
        direct_call=draw(st.booleans()),
    )  # fmt: skip
    sim.asks = draw(st.booleans())
    for i in range(draw(st.integers(1, 4))):
        prompt = Prompt(
            f"r{i}", draw(st.integers(1, 200)), digest=draw(st.integers(0, 3)), prefix=draw(st.integers(0, 3))
        )
        sim.arrive(prompt)
        at, first, resumed, lives = 0, True, False, 0
        while True:
            if first:
                local = draw(st.integers(0, prompt.length))
                answer = draw(st.sampled_from([None, -128, 0, 5, prompt.length]))
                accepted = min(max(0, answer or 0), prompt.length - local)
                if draw(st.booleans()):
                    sim.lookup(prompt.id, local, answer, draw(st.sampled_from([None, accepted, 0])))
                at = min(local + accepted, prompt.length - 1)
            size = min(draw(st.integers(1, 90)), prompt.length - at)
            entries = [entry(draw, prompt.id, prompt.length) for _ in range(draw(st.integers(0, 2)))]
            marked = first and draw(st.booleans())
            sim.step([Chunk(prompt.id, at, size, first=marked, resumed=resumed)], entries,
                     prompts={prompt.id: prompt.length}, fate=draw(fates(tp, layers)),
                     unreadable=not draw(st.integers(0, 8)))  # fmt: skip
            for _ in range(draw(st.integers(0, 2))):
                measured(draw, sim, prompt.id, tp, layers)
            at, first = at + size, False
            fate = draw(st.sampled_from(["on", "on", "on", "preempt", "abort", "silence"]))
            if fate == "abort":
                sim.finish(prompt.id, draw(st.integers(0, at)), 0, "FINISHED_ABORTED")
            if fate in ("abort", "silence"):
                break
            if fate == "preempt" and lives < 2:
                sim.preempt(prompt.id, at)
                first, resumed, lives = True, True, lives + 1
            elif at >= prompt.length:
                decode = draw(st.integers(0, 6))
                for _ in range(decode):
                    extra = [Entry(prompt.id, 32, at, at)] if not draw(st.integers(0, 5)) else []
                    sim.step([], extra, tokens=draw(st.integers(0, 1)), fate=draw(fates(tp, layers)))
                sim.finish(prompt.id, prompt.length + decode, decode + 1)
                break
    return sim


def checked(folder: Path) -> Run:
    """Load and diagnose: both assert their sums; here the properties that they do not."""
    run, diagnosis = balanced(folder)
    book = diagnosis.saves
    pairs_of = {engine.tag: engine.pairs for engine in run.engines}
    want = sum(r.computed * pairs_of.get(r.engine, 0) for r in run.requests)
    assert book.total == want == sum(book.accounts.values())
    assert all(amount >= 0 for amount in book.accounts.values())
    assert book.accounts.get("saved", 0) <= book.total
    for r in run.requests:
        assert 0 <= r.saved + r.unsaved <= r.computed * pairs_of.get(r.engine, 0)
    assert all(one.with_work <= one.fired <= one.eligible for one in run.hooks)
    assert all(one.fired <= one.eligible for one in run.ops)
    for before, after in zip(diagnosis.stages, diagnosis.stages[1:], strict=False):
        assert before.out == after.into and after.out <= after.into
    return run


@SETTINGS
@given(st.data())
def test_books_balance(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        data.draw(schedules(folder)).write()
        checked(folder)


@SETTINGS
@given(st.data())
def test_books_balance_in_cut_traces(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sim = data.draw(schedules(folder))
        sim.write()
        for spool in sorted({s.path for s in (sim.scheduler, *sim.workers)}):
            whole = spool.read_bytes()
            spool.write_bytes(whole[: data.draw(st.integers(RECORD_SIZE * 4, len(whole)))])
        try:
            checked(folder)
        except RunError:
            pass


@SETTINGS
@given(st.data())
def test_order_of_the_spools_does_not_matter(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "a"
        data.draw(schedules(folder, tag=3)).write()
        data.draw(schedules(folder, tag=9)).write()
        one = checked(folder)
        other = Path(name) / "b"
        (other / "spool").mkdir(parents=True)
        paths = data.draw(st.permutations(sorted((folder / "spool").glob("*.kvt"))))
        for i, path in enumerate(paths):
            shutil.copy(path, other / "spool" / f"{i:02}.kvt")
        two = checked(other)
        assert diagnose(one).saves == diagnose(two).saves
        assert one.loads == two.loads
        assert sorted(r.id for r in one.requests) == sorted(r.id for r in two.requests)


positions = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


@given(positions, positions)
def test_intervals_are_sets(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    def points(intervals: list[tuple[int, int]]) -> set[int]:
        return {i for a, b in intervals for i in range(a, b)}

    a, b = union(left), union(right)
    assert points(a) == points(left) and length(a) == len(points(left))
    assert points(subtract(a, b)) == points(left) - points(right)
    assert all(covers(a, i) == (i in points(left)) for i in range(31))
