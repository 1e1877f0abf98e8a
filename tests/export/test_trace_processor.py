"""The timeline in Perfetto's own trace processor: what it makes of our file is what we wrote."""

from __future__ import annotations

from typing import Any

import pytest
from perfetto_check import ask, differences
from small_run import recorded

from kvtrace.export.run import open_run
from kvtrace.export.timeline import WrittenTimeline, write_perfetto

TRACKS = """
    select process.name as process, track.name as track
    from process_track as track join process using (upid) where track.name is not null
    union all
    select process.name, thread.name from thread_track join thread using (utid) join process using (upid)
"""
SLICES = """
    select process.name as process, track.name as track, slice.name as name, count(*) as n
    from slice join process_track as track on track.id = slice.track_id join process using (upid)
    group by process.name, track.name, slice.name
"""
FLOWS = """
    select a.name as begun, one.name as there, b.name as ended, other.name as here,
        extract_arg(a.arg_set_id, 'debug.step') as metadata_step,
        extract_arg(b.arg_set_id, 'debug.step') as step,
        extract_arg(b.arg_set_id, 'debug.layer') as layer
    from flow join slice a on a.id = flow.slice_out join slice b on b.id = flow.slice_in
        join process_track s on s.id = a.track_id join process one on one.upid = s.upid
        join process_track t on t.id = b.track_id join process other on other.upid = t.upid
"""
Answers = dict[str, list[tuple[Any, ...]]]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, WrittenTimeline]:
    folder = tmp_path_factory.mktemp("trace")
    written = write_perfetto(open_run(recorded(folder / "run")), folder / "trace")
    return (folder / "trace").read_bytes(), written


@pytest.fixture(scope="module")
def asked(trace: tuple[bytes, WrittenTimeline]) -> Answers:
    queries = {"tracks": TRACKS, "slices": SLICES, "flows": FLOWS}
    return dict(zip(queries, ask(trace[0], list(queries.values())), strict=True))


def test_it_finds_no_error_and_the_numbers_that_were_written(trace: tuple[bytes, WrittenTimeline]) -> None:
    assert differences(*trace, processes=3) == []


def test_tracks_by_process_thread_hook_and_request(asked: Answers) -> None:
    tracks = set(asked["tracks"])
    assert {("engine core", "thread 0"), ("engine core", "requests"), ("engine core", "mine")} <= tracks
    for worker in ("worker 0", "worker 1"):
        assert {(worker, "thread 0"), (worker, "connector hooks"), (worker, "save_kv_layer")} <= tracks


def test_slices_lie_on_the_tracks_of_their_hook_and_request(asked: Answers) -> None:
    found = {(process, track, name): n for process, track, name, n in asked["slices"]}
    for worker in ("worker 0", "worker 1"):
        assert found[worker, "save_kv_layer", "save_kv_layer"] == 12  # 6 steps, 2 layers
        assert found[worker, "wait_for_save", "wait_for_save"] == 6
    assert found["engine core", "cmpl-7b00-0", "prefill 512 to 700"] == 1
    assert all(track == name for process, track, name in found if process != "engine core")


def test_flows_lead_from_metadata_to_each_workers_first_save(asked: Answers) -> None:
    first = "model.layers.0.self_attn.attn"
    assert sorted(asked["flows"]) == [
        ("metadata: save", "engine core", "save_kv_layer", worker, 5, 5, first)
        for worker in ("worker 0", "worker 1")
    ]
