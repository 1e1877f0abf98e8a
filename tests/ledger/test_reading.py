"""Reading runs: steps, coverage, engines, requests, timing, and what bad input gets."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from synth import Chunk, Entry, Fate, Policy, Prompt, Rounding, Sim, SpoolFile, nothing, run_json

from kvtrace.causes import diagnose
from kvtrace.causes.outcomes import named
from kvtrace.ledger import RunError, read_run
from kvtrace.ledger.timing import Histograms
from kvtrace.trace import hooks, ops, rows
from kvtrace.trace.format import DETAIL_IS_OP, Fact, Kind, Role, Skip, Way, pack_head


def account(run_dir: Path) -> dict[str, int]:
    return diagnose(read_run(run_dir)).saves.accounts


def test_no_run_and_no_spool(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such run directory"):
        read_run(tmp_path / "nothing")
    with pytest.raises(RunError, match="no process of this run loaded the agent") as caught:
        read_run(tmp_path)
    assert "\n" not in str(caught.value)


def test_one_bad_spool_does_not_take_the_others(tmp_path: Path) -> None:
    sim = Sim(tmp_path)
    sim.serve([Prompt("a", 64)], Rounding(32).policy())
    sim.write()
    (tmp_path / "spool" / "zz.kvt").write_bytes(b"not a spool")
    (tmp_path / "run.json").write_text("[")
    run = read_run(tmp_path)
    assert len(run.requests) == 1
    assert any("zz.kvt" in note for note in run.notes)
    assert any("run.json" in note for note in run.notes)


@pytest.mark.parametrize(
    ("files", "went_on", "found"),
    [
        ([(0, 1), (0, 1)], False, True),
        ([(0, 1), (0, 1)], True, False),  # the same work went on
        ([(0, 1), (900, 0)], False, False),  # files were made: it looked for one
        ([(0, 1), (900, 1)], False, False),  # ... and took another name
        ([(0, 1)], False, False),
        ([], False, False),
    ],
)
def test_a_missing_file_was_to_be_written_where_none_ever_was(
    tmp_path: Path, files: list[tuple[int, int]], went_on: bool, found: bool
) -> None:
    sim = Sim(tmp_path)
    sim.serve([Prompt("a", 64)], Rounding(32).policy())
    for at, (size, missing) in enumerate(files):
        target = sim.workers[0].name(f"/store/{at}.part")
        head = pack_head(Kind.OUTSIDE, Role.WORKER, Way.FILE)
        sim.workers[0].add(*rows.Outside(head, 0, at, 0, target, size, size, missing))
    fact = {"hook": "thread", "step": sim.tag << 32 | 1, "connector": 71, "type": "FileNotFoundError",
            "asked_by": "wait_for_save", "count": 2, "went_on": went_on, "where": "s.py:1"}  # fmt: skip
    sim.workers[0].fact(Fact.SWALLOWED, fact)
    sim.write()
    assert [one.in_vain for one in read_run(tmp_path).swallowed] == ["/store/0.part" if found else ""]


def test_coverage_counts_layer_steps_once(tmp_path: Path) -> None:
    sim = Sim(tmp_path, layers=3)
    sim.step([], tokens=8, dummy=True)
    sim.one_step("a", 64, [Entry("a", 64)], ends=False, fate=Fate(twice=True))
    sim.step([], tokens=1, fate=Fate(dead_pairs=frozenset({(0, 2)}), direct=True))
    sim.step([], tokens=0)
    sim.write()
    run = read_run(tmp_path)
    hooks = {(one.hook, one.layer): one for one in run.hooks}
    for i, fired in enumerate((2, 2, 1)):
        row = hooks["save_kv_layer", sim.layer_names[i]]
        assert (row.eligible, row.fired, row.with_work) == (2, fired, 1)
    assert hooks["wait_for_save", ""].fired == 2  # the step without tokens is not eligible
    assert hooks["build_connector_meta", ""].eligible == 4
    ops = {one.layer: one for one in run.ops}
    assert ops[sim.layer_names[2]].fired == 1 and ops[sim.layer_names[0]].direct == 1
    worker = run.engines[0].workers[0]
    assert (worker.steps, worker.no_forward_steps) == (2, 1)


def test_a_connector_that_answers_for_children_owes_no_finish(tmp_path: Path) -> None:
    """MultiConnector's own get_transfer_results asks its children; where nothing asked, that is a gap."""
    own, none = tmp_path / "own", tmp_path / "none"
    for folder, hook in ((own, "get_transfer_results"), (none, "handle_preemptions")):
        sim = Sim(folder)
        sim.step([], tokens=8, fate=Fate(finish_hook=hook))
        sim.write()
    assert "get_finished" not in {one.hook for one in read_run(own).hooks}
    (finished,) = (one for one in read_run(none).hooks if one.hook == "get_finished")
    assert (finished.eligible, finished.fired) == (1, 0)


def test_coverage_is_the_same_in_small_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Sim(tmp_path, tp=2, layers=3)
    sim.serve([Prompt(f"r{i}", 100 + i, digest=i, output=3) for i in range(5)], Rounding(32).policy(),
              fate=lambda n: Fate(twice=n % 2 == 0))  # fmt: skip
    sim.write()
    whole = read_run(tmp_path)
    from kvtrace.trace import reader

    plain, again = reader.Spool.chunks, reader.Spool.again
    monkeypatch.setattr(reader.Spool, "chunks", lambda self, records=0, bare=True: plain(self, 7, bare))
    monkeypatch.setattr(reader.Spool, "again", lambda self, info: again(self, info, 7))
    small = read_run(tmp_path)
    assert whole.hooks == small.hooks and whole.ops == small.ops
    assert whole.timing == small.timing
    assert diagnose(whole).saves == diagnose(small).saves


def test_quiet_records_are_added_exactly(tmp_path: Path) -> None:
    sim = Sim(tmp_path, layers=2)
    sim.step([], tokens=1)
    w = sim.workers[0]
    layers = w.name(json.dumps([w.name(name) for name in sim.layer_names]))
    for _ in range(100):
        sim.n += 1
        step = sim.step_id
        w.add(pack_head(Kind.EXEC, Role.WORKER), sim.clock(), sim.clock(), step, 1, 1, 0)
        for code, detail in ((hooks.SAVE_LAYER.code, 1), (ops.ATTENTION_WITH_OUTPUT.code, DETAIL_IS_OP)):
            w.add(pack_head(Kind.QUIET, Role.WORKER, code, detail), 0, layers, step, 2, 300, 100, 200)
    sim.write()
    run = read_run(tmp_path)
    rows = [one for one in run.hooks if one.hook == "save_kv_layer"]
    assert [(one.eligible, one.fired, one.with_work) for one in rows] == [(101, 101, 0)] * 2
    assert [one.fired for one in run.ops] == [101, 101]
    (timing,) = (one for one in run.timing if one.hook == "save_kv_layer")
    assert (timing.calls, timing.total_ns) == (202, 100 * 300 + 2 * 1000)
    assert sum(one.layer_steps for one in run.skips) == 202
    assert {one.skip for one in run.skips} == {Skip.HOOKED.name}


def test_two_engines_in_one_process(tmp_path: Path) -> None:
    first = Sim(tmp_path, tag=5, in_process=True, layers=2)
    first.serve([Prompt("0", 64, digest=1)], Rounding(32).policy())
    second = Sim(tmp_path, tag=6, in_process=True, layers=4, connector=None, base=first.scheduler)
    second.serve([Prompt("0", 100, digest=1)], Policy(nothing))
    first.write()
    run = read_run(tmp_path)
    assert [(engine.tag, engine.pairs, engine.requests) for engine in run.engines] == [(5, 2, 1), (6, 4, 1)]
    book = diagnose(run).saves
    assert book.accounts == {"saved": 128, "not-saved:no-connector-configured": 400}
    assert book.pairs is None
    assert book.tokens == {"saved": 64, "not-saved:no-connector-configured": 100}


def test_an_engine_that_is_started_again_has_books_of_its_own(tmp_path: Path) -> None:
    """It died and came up again within one run: other processes, another tag, the same ids of requests."""
    first = Sim(tmp_path, tag=5, pid=100, tp=2, layers=2)
    first.serve([Prompt("0", 64, digest=1), Prompt("1", 64, digest=2)], Rounding(32).policy())
    second = Sim(tmp_path, tag=6, pid=200, tp=2, layers=2)
    second.serve([Prompt("0", 96, digest=3)], Policy(nothing))
    first.write()
    second.write()
    run = read_run(tmp_path)
    assert [(engine.tag, engine.pid, engine.requests) for engine in run.engines] == [(5, 100, 2), (6, 200, 1)]
    assert [[worker.pid for worker in engine.workers] for engine in run.engines] == [[101, 102], [201, 202]]
    assert [(one.engine, one.prompt, one.saved) for one in run.requests] == [
        (5, 64, 256), (5, 64, 256), (6, 96, 0),
    ]  # fmt: skip
    found = diagnose(run).saves
    assert found.tokens["saved"] == 128 and sum(found.tokens.values()) == 224


def test_a_helper_that_a_worker_forked_is_no_untraced_worker(tmp_path: Path) -> None:
    """It has the worker's name and writes no spool; a second worker without a spool is another matter."""
    sim = Sim(tmp_path, pid=100, tp=2)
    sim.serve([Prompt("a", 64)], Rounding(32).policy())
    sim.write()
    rows = [(100, 1, "VLLM::EngineCor"), (101, 100, "VLLM::Worker_TP"), (103, 101, "VLLM::Worker_TP")]
    named = [{"pid": pid, "ppid": ppid, "name": name, "vllm": True} for pid, ppid, name in rows]
    run_json(tmp_path, named)
    assert [(p.pid, p.role) for p in read_run(tmp_path).processes if not p.agent] == [(103, "other")]
    run_json(tmp_path, [*named, {"pid": 104, "ppid": 100, "name": "VLLM::Worker_TP", "vllm": True}])
    untraced = [(p.pid, p.role) for p in read_run(tmp_path).processes if not p.agent]
    assert sorted(untraced) == [(103, "other"), (104, "worker")]


def test_preempted_and_resumed_positions_count_once(tmp_path: Path) -> None:
    sim = Sim(tmp_path, layers=1)
    sim.arrive(Prompt("a", 100, digest=1))
    sim.step([Chunk("a", 0, 64, first=True)], [Entry("a", 64, 64, 0)], prompts={"a": 100})
    sim.preempt("a", 64)
    sim.lookup("a", 32, 0, 0)
    sim.step([Chunk("a", 32, 68, resumed=True)], [], prompts={"a": 100})
    sim.finish("a", 105, 6)
    sim.write()
    run = read_run(tmp_path)
    assert run.total == 105
    assert [(one.saved, one.local) for one in run.requests] == [(64, 0)]


def test_local_and_loaded_positions(tmp_path: Path) -> None:
    sim = Sim(tmp_path, layers=1, prefix_caching=True)
    sim.arrive(Prompt("a", 128, digest=1))
    sim.lookup("a", 32, 64, 64)
    sim.step([Chunk("a", 96, 32, first=True)], [Entry("a", 128, 128, 0)], prompts={"a": 128})
    sim.finish("a", 128, 1)
    sim.write()
    run = read_run(tmp_path)
    # What is stored again is saved, even though it was reused; what was loaded stays loaded.
    found = diagnose(run)
    assert found.saves.accounts == {"loaded": 64, "saved": 64}
    (reused,) = (one.evidence for one in found.ruled_out if one.id == "local-hit")
    assert reused.startswith("32 tokens (25.0 %) were reused from the GPU's prefix cache")
    assert named(run.loads).accounts == {"local-hit": 32, "loaded": 64, "missed:lookup-miss": 32}


@pytest.mark.parametrize(
    ("computed", "entries", "saved"),
    [
        (128, [Entry("a", 128, 384)], 128),  # ExampleConnector's first chunk speaks of all 384 tokens
        (200, [Entry("a", 256, 384)], 200),
        (300, [Entry("a", 128), Entry("a", 128)], 128),
    ],
    ids=["slots count, not tokens", "slots of blocks not filled yet", "a connector within another, once"],
)
def test_what_is_declared_is_what_its_slots_hold(
    tmp_path: Path, computed: int, entries: list[Entry], saved: int
) -> None:
    sim = Sim(tmp_path, layers=1, block=128)
    sim.arrive(Prompt("a", 400, digest=1))
    sim.step([Chunk("a", 0, computed, first=True)], entries, prompts={"a": 400})
    sim.write()
    assert account(tmp_path)["saved"] == saved


def test_worker_without_facts(tmp_path: Path) -> None:
    """Only the scheduler's spool is there: the books have pairs, and say that nothing was seen."""
    sim = Sim(tmp_path, tp=2, layers=3)
    sim.serve([Prompt("a", 64, digest=1)], Rounding(32).policy())
    sim.write()
    for worker in sim.workers:
        worker.path.unlink()
    diagnosis = diagnose(read_run(tmp_path))
    assert diagnosis.saves.accounts == {"not-observed": 64 * 6}
    assert [finding.id for finding in diagnosis.findings] == ["agent-not-loaded"]


def test_quantiles_are_within_two_percent() -> None:
    values = np.random.default_rng(1).lognormal(10, 2, 20_000).astype(np.int64) + 1
    time_of = Histograms(2)
    time_of.add(np.ones_like(values), values)
    for q in (0.5, 0.99):
        exact = float(np.quantile(values, q))
        assert abs(time_of.quantile(1, q) - exact) / exact < 0.02
    assert time_of.count(1) == len(values) and time_of.totals[1] == int(values.sum())
    assert time_of.quantile(0, 0.5) == 0


def test_of_many_spools_each_takes_memory_for_what_it_holds(tmp_path: Path) -> None:
    """A run of 300 took 700 MiB: histograms of every hook, most of them of none of its calls."""
    sim = Sim(tmp_path, layers=2, tp=39)
    sim.serve([Prompt("a", 64, digest=1)], Rounding(32).policy())
    sim.write()
    tracemalloc.start()
    try:
        run = read_run(tmp_path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(run.processes) == 40
    assert peak < 40 * (1 << 19), f"{peak >> 20} MiB"


def test_a_million_hooks_take_seconds(tmp_path: Path) -> None:
    layers, steps = 16, 30_000
    sim = Sim(tmp_path, layers=layers, in_process=True)
    sim.serve([Prompt("a", 64, digest=1)], Rounding(32).policy())
    spool: SpoolFile = sim.scheduler
    ids = [spool.name(layer) for layer in sim.layer_names]
    step = (np.arange(steps) + sim.n + 1) | (sim.tag << 32)
    table = np.zeros((steps, 2 * layers + 1, 8), dtype=np.int64)
    t = np.arange(steps * (2 * layers + 1)).reshape(steps, -1) * 1000 + sim.t
    table[:, :, 1], table[:, :, 2], table[:, :, 3] = t, t + 500, step[:, None]
    for i, layer in enumerate(ids):
        table[:, 2 * i, 0] = pack_head(Kind.HOOK, Role.WORKER, hooks.SAVE_LAYER.code, 1)
        table[:, 2 * i + 1, 0] = pack_head(Kind.OP, Role.WORKER, ops.ATTENTION_WITH_OUTPUT.code)
        table[:, 2 * i : 2 * i + 2, 4] = layer
    table[:, -1, 0] = pack_head(Kind.EXEC, Role.WORKER)
    table[:, -1, 4] = 1
    spool.data += table.astype("<i8").tobytes()
    sim.write()
    started = time.process_time()
    run = read_run(tmp_path)
    diagnose(run)
    spent = time.process_time() - started
    assert [one.fired for one in run.hooks if one.hook == "save_kv_layer"] == [steps + 1] * layers
    assert spent < 15, f"{spent:.1f} s for {steps * (2 * layers + 1)} records"
