"""CUDA: graphs that were asked for and used, and hooks that wait, on synthetic traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from diagnosed import analyse, ids, not_observed, prompts, ruled_out, said, served, tokens
from synth import Chunk, Entry, Fate, Rounding, Sim

from kvtrace.ledger import read_run
from kvtrace.render.markdown import markdown
from kvtrace.render.page import Paragraph, Table
from kvtrace.render.report import device, graphs, report_page
from kvtrace.report.build import build_report
from kvtrace.report.graphs import graph_rows
from kvtrace.report.model import GraphRow
from kvtrace.trace.format import Fact, Flag

MS = 1_000_000
CUDA: dict[str, Any] = {"platform": "cuda", "enforce_eager": False, "cudagraph_mode": "FULL_AND_PIECEWISE"}
DECLARED = "ChunkStore declares requires_piecewise_for_cudagraph: vLLM takes PIECEWISE instead of "
SUPPORT = "what the attention backend, the model or the platform supports"
EVERY = frozenset({(0, 0), (0, 1)})


def cuda_sim(tmp_path: Path, *, asked: str | None = None, mode: str = "FULL_AND_PIECEWISE", used: str = "",
             piecewise: bool | None = False, eager: bool = False, **more: Any) -> Sim:  # fmt: skip
    return Sim(
        tmp_path / "run",
        ints={"unit": 32},
        args={"compilation_config.cudagraph_mode": asked} if asked else {"model": "m"},
        engine_facts={**CUDA, "cudagraph_mode": mode, "enforce_eager": eager},
        connector_facts={"requires_piecewise": piecewise, "noop": []},
        graphs={"mode": used or mode, "captured": 12, "breakable": False, "v2": False, **more},
    )


def use_of(sim: Sim) -> GraphRow:
    sim.write()
    (use,) = graph_rows(read_run(sim.dir))
    return use


# --- graphs ----------------------------------------------------------------------------------------


def test_steps_bodies_hooks_and_padding_by_mode(tmp_path: Path) -> None:
    sim = cuda_sim(tmp_path)

    def fate(n: int) -> Fate:
        if n == 1:
            return Fate(mode=1, padded=128)
        return Fate(dead_pairs=EVERY, mode=2, padded=8)

    sim.serve(prompts([100], output=4), Rounding(32).policy(), fate=fate)
    use = use_of(sim)
    assert [tuple(mode.values()) for mode in use["modes"]] == [
        ("PIECEWISE", 1, 100, 128, 2, 2, 2),
        ("FULL", 3, 3, 24, 6, 0, 0),
    ]
    shown = ("runner", "captured", "breakable", "capturing_steps")
    assert [use[name] for name in shown] == ["V1", 12, False, 0]


def test_a_store_in_a_full_replay_is_found_and_told(tmp_path: Path) -> None:
    sim = cuda_sim(tmp_path, asked="FULL", mode="FULL")
    sim.serve(prompts([64]), Rounding(32).policy(), fate=lambda n: Fate(dead_pairs=EVERY, mode=2, padded=64))
    diagnosis = analyse(sim)
    assert ids(diagnosis) == ["full-cudagraph-replay"]
    assert tokens(diagnosis) == {"not-saved:full-cudagraph-replay": 64}
    _, *lines, modes = graphs(build_report(sim.dir))
    assert [line.text for line in lines if isinstance(line, Paragraph)] == [
        "worker 0 · asked: FULL · used: FULL · V1 model runner · 12 graphs captured before the first step",
        "ChunkStore saves layer by layer and does not declare requires_piecewise_for_cudagraph, "
        "so vLLM keeps FULL graphs",
    ]
    assert isinstance(modes, Table)
    assert [row.cells for row in modes.rows] == [("FULL", "1/1", "0 % of 64", "0/2", "0/2")]


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"mode": "PIECEWISE", "piecewise": True},
         [DECLARED + "vLLM's default"]),
        ({"asked": "FULL", "mode": "PIECEWISE", "piecewise": True},
         [DECLARED + "FULL"]),
        ({"asked": "PIECEWISE", "mode": "PIECEWISE", "piecewise": True}, []),
        ({"asked": "FULL", "mode": "FULL_AND_PIECEWISE", "piecewise": None},
         ["vLLM changed FULL to FULL_AND_PIECEWISE, going by " + SUPPORT]),
        ({"asked": "FULL", "mode": "FULL", "used": "NONE", "piecewise": None},
         ["vLLM changed FULL to NONE when the worker was ready, going by " + SUPPORT]),
        ({"piecewise": None}, ["FULL_AND_PIECEWISE is vLLM's default here"]),
        ({"asked": "FULL", "mode": "NONE", "eager": True}, ["enforce_eager switches them off"]),
    ],
)  # fmt: skip
def test_why_a_mode_was_used(tmp_path: Path, facts: dict[str, Any], why: list[str]) -> None:
    sim = cuda_sim(tmp_path, **facts)
    sim.serve(prompts([64]), Rounding(32).policy())
    assert use_of(sim)["why"] == why


def test_a_run_without_cuda_has_no_graphs_in_its_report(tmp_path: Path) -> None:
    sim = served(tmp_path / "run", [64], Rounding(32).policy())
    sim.write()
    report = build_report(sim.dir)
    assert "graphs" not in report and "device" not in report and graphs(report) == []


def test_capture_time_bodies_are_no_coverage(tmp_path: Path) -> None:
    """Also not where a graph is captured within a real step: nothing was computed there."""
    sim = cuda_sim(tmp_path, asked="FULL", mode="FULL")
    step = sim.step([Chunk("a", 0, 64, first=True)], [Entry("a", 64, 64, 0)],
                    fate=Fate(dead_pairs=EVERY, mode=2))  # fmt: skip
    for layer in sim.layer_names:
        sim.body(0, step, layer, flags=int(Flag.CAPTURE))
        sim.body(0, 0, layer, flags=int(Flag.CAPTURE))
    sim.arrive(prompts([64])[0])
    sim.write()
    run = read_run(sim.dir)
    assert sum(one.fired for one in run.ops) == 0 and run.workers()[0].python == {}
    # the same bodies without the mark are coverage
    plain = cuda_sim(tmp_path / "b", asked="FULL", mode="FULL")
    step = plain.step([Chunk("a", 0, 64, first=True)], fate=Fate(dead_pairs=EVERY, mode=2))
    for layer in plain.layer_names:
        plain.body(0, step, layer)
    plain.write()
    assert sum(one.fired for one in read_run(plain.dir).ops) == 2


def test_device_times_are_called_missing_only_where_they_are(tmp_path: Path) -> None:
    def missing(sim: Sim) -> str:
        return not_observed(analyse(sim)).get("device-time", "")

    assert missing(timed_run(tmp_path / "timed", waiting(3))) == ""
    untimed = cuda_sim(tmp_path / "untimed")
    untimed.serve(prompts([64]), Rounding(32).policy())
    assert missing(untimed).startswith("none were taken")
    failed = cuda_sim(tmp_path / "failed")
    failed.serve(prompts([64]), Rounding(32).policy())
    why = {"on": False, "why": "CUDA error: out of memory"}
    failed.workers[0].fact(Fact.DEVICE, why, failed.clock())
    assert missing(failed) == "CUDA error: out of memory: all times are the host's"


# --- hooks that wait for the device ----------------------------------------------------------------


def timed_run(tmp_path: Path, calls: list[tuple[int, int, bool]]) -> Sim:
    """Calls of save_kv_layer as (outstanding, host, caught up) in ns."""
    sim = cuda_sim(tmp_path)
    sim.serve(prompts([64]), Rounding(32).policy())
    for before, host, done in calls:
        sim.device(0, sim.step_id, device=20_000, before=before, host=host, caught_up=done)
    sim.timed(0, sim.step_id, len(calls), own=100_000, busy=10 * MS)
    return sim


def waiting(n: int) -> list[tuple[int, int, bool]]:
    """Host time is the outstanding work and a little: it waits."""
    return [(before, before + 30_000, True) for before in range(MS, MS + n * MS, MS)]


CONSTANT = [(before, 2 * MS, before <= 2 * MS) for before in range(100_000, 4 * MS, 50_000)]


def test_a_hook_that_waits(tmp_path: Path) -> None:
    diagnosis = analyse(timed_run(tmp_path, waiting(10)))
    text = said(diagnosis, "sync-in-hook")
    assert "save_kv_layer makes the host wait for the device" in text
    assert "10 timed calls began while the device had work left; none returned before it was done" in text
    assert "10 as it was done, after 1.0 to 10.0 ms (5.5 ms a call" in text
    assert text.startswith("note")


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param(waiting(7), id="too few"),
        pytest.param([*waiting(20), (5 * MS, 50_000, False)], id="one returned early"),
        pytest.param([(MS, MS + 40_000, True)] * 30, id="no spread: a slow hook and a steady device"),
        pytest.param([(before, 30 * MS, True) for before, _, _ in waiting(18)], id="merely slow"),
        pytest.param([(50_000, 60_000, True), (99_000, 99_000, True)] * 9, id="nearly nothing to wait for"),
        pytest.param([*waiting(8), *[(MS, 9 * MS, True)] * 9], id="mostly something else"),
        # Whatever the device has left, the hook takes 2 ms: it returns when it is done with itself.
        pytest.param(CONSTANT, id="a constant length"),
        pytest.param([call for call in CONSTANT if call[2]], id="a constant length, little outstanding"),
    ],
)
def test_anything_less_is_no_finding(tmp_path: Path, calls: list[tuple[int, int, bool]]) -> None:
    diagnosis = analyse(timed_run(tmp_path, calls))
    assert "sync-in-hook" not in ids(diagnosis) and "sync-in-hook" not in ruled_out(diagnosis)
    assert "sync-in-hook" in not_observed(diagnosis)


def test_a_hook_that_never_waits_is_ruled_out(tmp_path: Path) -> None:
    diagnosis = analyse(timed_run(tmp_path, [(before, 9_000, False) for before, _, _ in waiting(5)]))
    assert ruled_out(diagnosis)["sync-in-hook"].startswith("in all 5 timed calls")


def test_host_and_device_side_by_side(tmp_path: Path) -> None:
    sim = timed_run(tmp_path, [(0, 40_000, True)] * 3)
    sim.device(0, sim.step_id, device=2 * MS, before=0, host=90_000, op="unified_attention_with_output")
    sim.device(0, sim.step_id, device=9 * MS, before=0, host=90_000, crossed=True)
    sim.timed(0, sim.step_id, 5, untimed=2, own=100_000, busy=10 * MS)
    sim.write()
    report = build_report(sim.dir)
    both, note = device(report)
    assert isinstance(both, Table) and isinstance(note, Paragraph)
    assert [row.cells for row in both.rows] == [
        ("save_kv_layer", "3", "40 µs", "20 µs", "120 µs", "60 µs"),
        ("unified_attention_with_output", "1", "90 µs", "2.0 ms", "90 µs", "2.0 ms"),
    ]
    assert (
        "8 calls in 2 timed steps · timing took 1.0 % of the steps' host time · 2 calls had no event free"
        in note.text
    )
    assert "1 call ended on another stream than they began" in note.text
    page = markdown(report_page(report))
    assert "### Host and device" in page and "### CUDA graphs" in page
