"""A run is looked at while it grows: each record counts once, and nothing is claimed that was not seen."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from growing import Growing, blocks_of
from synth import Sim, SpoolFile

from kvtrace.errors import KvtraceError
from kvtrace.live import analysis
from kvtrace.live.analysis import Analyses
from kvtrace.live.look import Snapshot
from kvtrace.live.tail import Tail
from kvtrace.live.watch import LiveRun, find_run
from kvtrace.trace import format as fmt
from kvtrace.trace import rows
from kvtrace.trace.format import Kind, Role, pack_head
from kvtrace.trace.reader import Spool


def numbers(look: Snapshot) -> dict[str, Any]:
    """What a look counts, without what is a matter of the moment."""
    moment = ("state", "settled", "seconds", "steps_per_s", "run", "directory", "analysis", "spool_bytes")
    return {key: value for key, value in asdict(replace(look, analysis=None)).items() if key not in moment}


def test_a_growing_run_counts_each_record_once(run: Path, tmp_path: Path) -> None:
    growing = Growing(run, tmp_path / "growing")
    watch = LiveRun(growing.folder)
    steps = []
    while growing.grow():
        steps.append(watch.look().steps)
    assert steps == sorted(steps) and len(set(steps)) > 3  # it was seen to grow
    assert numbers(watch.look()) == numbers(LiveRun(run).look())
    records = sum(len(table) for path in growing.pieces for table in Spool(path).chunks())
    assert watch.look().records == records


def test_a_block_is_read_when_it_is_whole(run: Path, tmp_path: Path) -> None:
    """The recorder may be in the middle of a write at any byte."""
    source = max((run / fmt.SPOOL_DIR).iterdir(), key=lambda path: path.stat().st_size)
    head, *blocks = blocks_of(source)
    path = tmp_path / source.name
    path.write_bytes(head)
    tail, seen = Tail(path), 0
    for block in blocks[:8]:
        for part, whole in ((block[:70], False), (block[70:], True)):
            with open(path, "ab") as file:
                file.write(part)
            got = sum(len(table) for table in tail.grown())
            assert got == (len(block) // fmt.RECORD_SIZE - 1 if whole else 0)
            seen += got
    assert seen == sum(len(block) // fmt.RECORD_SIZE - 1 for block in blocks[:8])
    assert tail.size == path.stat().st_size


def test_the_sums_are_those_of_the_report(run: Path) -> None:
    look = LiveRun(run).look(wait=True)
    assert look.analysis is not None
    report = look.analysis.report
    assert look.state == "ended" and look.settled
    assert look.steps == sum(engine["real_steps"] for engine in report["run"]["engines"])
    assert look.arrived == report["requests"]["total"] == 2
    assert look.records == report["limits"]["tracer"]["records"]
    called = {row["hook"]: (row["count"], row["total_ns"]) for row in report["timing"]}
    assert {name: (one.calls, one.total_ns) for name, one in look.hooks.items()} == called
    assert all(sum(one.buckets) == one.calls for one in look.hooks.values())


def _engine(folder: Path, wall_ns: int, executed: int) -> None:
    """Three steps were scheduled, 1, 2 and 3 s after the begin; the worker ended `executed` of them."""
    host = {"host": socket.gethostname(), "pid": os.getpid(), "perf_ns": 0, "wall_ns": wall_ns}
    scheduler = SpoolFile(folder, "scheduler-1", {**host, "role": "scheduler", "process": "EngineCore"})
    other = {**host, "perf_ns": 1, "wall_ns": wall_ns + 1}  # two spools of one process would be copies
    worker = SpoolFile(folder, "worker-1", {**other, "role": "worker", "process": "Worker-0"})
    second = 10**9
    for n in (1, 2, 3):
        step = 7 << fmt.STEP_SHIFT | n
        scheduler.add(
            *rows.Step(pack_head(Kind.STEP, Role.SCHEDULER), n * second, n * second, step, 5, 1, 0, 0)
        )
        if n <= executed:
            head = pack_head(Kind.EXEC, Role.WORKER)
            worker.add(*rows.Execution(head, n * second, n * second + 1, step, 5, 1, 0, 5))
    scheduler.write()
    worker.write()


@pytest.mark.parametrize(("executed", "step", "open_s"), [(3, None, None), (1, 2, 8.0), (0, 1, 9.0)])
def test_an_open_step_is_named_with_its_age(
    tmp_path: Path, executed: int, step: int | None, open_s: float | None
) -> None:
    """Hooks are recorded when they return: of one that hangs only the step is known that it keeps open."""
    began = time.time_ns()
    _engine(tmp_path, began, executed)
    # ten seconds after the begin, whatever the time is now
    look = LiveRun(tmp_path, wall=lambda: began + 10 * 10**9).look()
    assert look.state == "running"  # the process that "wrote" it is this one
    worker = next(one for one in look.processes if one.name == "Worker-0")
    assert (worker.open_step, worker.open_s) == (step, open_s)
    assert worker.open_steps == 3 - executed
    scheduler = next(one for one in look.processes if one.name != "Worker-0")
    assert scheduler.silent_s == 7.0 and scheduler.open_step is None
    assert look.steps_per_s == pytest.approx(3 / 9)


def test_a_run_whose_processes_are_gone_is_not_called_running(run: Path) -> None:
    (run / "run.json").unlink()
    assert LiveRun(run).look().state == "lost"


def test_an_empty_run_says_that_nothing_was_recorded(tmp_path: Path) -> None:
    (tmp_path / fmt.SPOOL_DIR).mkdir()
    look = LiveRun(tmp_path).look(wait=True)
    assert (look.steps, look.records, look.analysis) == (0, 0, None)
    assert look.problem


def test_a_damaged_spool_leaves_the_others(run: Path) -> None:
    whole = LiveRun(run).look()
    (run / fmt.SPOOL_DIR / "noise-1.kvt").write_bytes(b"no spool" * 100)
    look = LiveRun(run).look()
    assert look.steps == whole.steps and numbers(look)["hooks"] == numbers(whole)["hooks"]


def test_a_report_that_takes_long_is_made_seldom() -> None:
    assert analysis.pause(0.01) == analysis.LEAST_S
    assert analysis.pause(30.0) == 300.0


def test_a_report_is_made_again_when_due_and_when_the_run_grew() -> None:
    now, made = [0.0], []

    def build(run_dir: Path) -> Any:
        made.append(now[0])
        now[0] += 2.0
        return {"made": len(made)}

    analyses = Analyses(Path("r"), build, lambda: now[0])

    def refresh(state: int) -> int:
        analyses.refresh(state)
        if analyses._thread is not None:
            analyses._thread.join()
        return len(made)

    assert refresh(1) == 1
    assert refresh(2) == 1  # grown, not due
    now[0] += 25.0
    assert refresh(1) == 1  # due, not grown
    assert refresh(2) == 2
    latest = analyses.latest()
    assert latest is not None and latest.took_s == 2.0 and latest.made_s == 2.0
    analyses.refresh(3, wait=True)
    assert len(made) == 3


def test_a_report_that_cannot_be_made_keeps_the_last_one() -> None:
    fails: list[bool] = []

    def build(run_dir: Path) -> Any:
        if fails:
            raise KvtraceError("damaged")
        return {}

    analyses = Analyses(Path("r"), build)
    analyses.refresh(1, wait=True)
    fails.append(True)
    analyses.refresh(2, wait=True)
    assert analyses.latest() is not None and analyses.problem == "damaged"


def test_without_a_name_the_run_that_began_last_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KvtraceError, match="no run in reports/"):
        find_run(None)
    for name, began in (("a", 2), ("b", 3), ("c", 1)):
        (tmp_path / "reports" / name / fmt.SPOOL_DIR).mkdir(parents=True)
        run_file = tmp_path / "reports" / name / "run.json"
        run_file.write_text(json.dumps({"schema": "kvtrace.run/1", "started_wall_ns": began}))
    assert find_run(None) == Path("reports/b")
    assert find_run("reports/a") == Path("reports/a")
    with pytest.raises(KvtraceError, match="no such run directory"):
        find_run("reports/d")
    with pytest.raises(KvtraceError, match="no spools"):
        find_run("reports")


def test_two_engines_in_one_run_are_summed(tmp_path: Path) -> None:
    for tag, pid in ((7, 100), (8, 200)):
        sim = Sim(tmp_path, tag=tag, pid=pid)
        sim.write()
    assert len(LiveRun(tmp_path).look().processes) == 4
