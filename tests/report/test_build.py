"""From the analysis' tables to a report: plain values, caps, and nothing that breaks the schema."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtrace.causes import diagnosis as causes
from kvtrace.ledger import run as ledger
from kvtrace.report.build import assemble
from kvtrace.report.load import check_report
from kvtrace.report.model import MAX_COVERAGE_ROWS, MAX_REQUEST_ROWS
from kvtrace.terms import Stage
from kvtrace.trace import facts
from kvtrace.trace.reader import SpoolInfo
from kvtrace.trace.run_file import RunFile

ENDED = 1_000_000_005 * 10**9
HEADER = facts.Header(python="3.11")


def hook(layer: int, fired: Any, pid: int = 11, engine: int = 1) -> ledger.HookSteps:
    """With numpy's integers, where the analysis may have some."""
    zero, five, fired = np.int64(0), np.int64(5), np.int64(fired)
    name = "save_kv_layer"
    return ledger.HookSteps(engine, pid, "worker 0", zero, f"layers.{layer}", name, five, fired, 1, 0)


def request(number: int) -> causes.JudgedRequest:
    one = ledger.RunRequest(
        id=f"r{number}", client="", engine=np.int64(1), prompt=np.int64(100), computed=104, output=5,
        local=0, external=-32, offered=-1, chunks=1, chunk_tokens=(100,), first_step=(1 << 32) | 7,
        last_step=(1 << 32) | 9, block=32, status="FINISHED_STOPPED", t_end=9, digest=1, prefix=1,
        preemptions=0, t_first=1, chunk_step=(1 << 32) | 7, saved=800, unsaved=32,
        diverged=False, preempt_step=0, arrived=100, grown_step=0,
    )  # fmt: skip
    return causes.JudgedRequest(one, "saved", "read", causes.OfRequest(saved=100, sent=25, lost=4))


def book(total: int, **accounts: int) -> ledger.Ledger:
    return ledger.Ledger(total, dict(accounts), 8, {name: n / 8 for name, n in accounts.items()}, total / 8)


def run_of(tmp_path: Path, **parts: Any) -> ledger.Run:
    told = facts.EngineFact(
        tag=1, vllm="0.32.0", torch="2.13.0", platform="cpu", tp=1, prefix_caching=True, block_size=32,
        kv_transfer=facts.KvTransfer("Example", "kv_both"),
    )  # fmt: skip
    connector = ledger.Connector(
        pid=10, ordinal=0, role="scheduler", configured="Example", cls="ExampleConnector", module="m",
        file="m.py", proxy="subclass",
    )  # fmt: skip
    worker = ledger.Worker(
        engine=1, pid=11, spool="w-11.kvt", process="worker 0", connector=None,
        facts=facts.WorkerFact(ordinal=1, kv_layers=("layers.0", "layers.1"), connector_live=True),
    )  # fmt: skip
    engine = ledger.Engine(
        1, 10, "engine core", told, connector, (worker,), pairs=8, steps=9, real_steps=8, requests=1
    )
    values: dict[str, Any] = {
        "directory": tmp_path,
        "run": RunFile(name="x", command=("vllm",), started_wall_ns=10**18, ended_wall_ns=ENDED),
        "processes": [
            ledger.Process(10, "engine core", "scheduler", None, "s-10.kvt", 50, "open", HEADER),
            ledger.Process(12, "sh", "other", None, None, 0, ""),
        ],
        "engines": [engine],
        "connectors": [connector],
        "spools": [SpoolInfo(Path("s-10.kvt"), 6400, 50, "damaged", None, 3, "bad record 50")],
        "targets": [ledger.TargetStatus("t", "m", "a", "found", processes=2)],
        "exceptions": [],
        "agent_errors": [(10, "recorder", "disk full")],
        "hooks": [hook(0, 5), hook(1, 4)],
        "ops": [],
        "skips": [],
        "timing": [
            ledger.CallTimes("save_kv_layer", np.int64(9), np.float64(5.5), 9, 60, None),
        ],
        "requests": [],
        "entries": [],
        "lost": [],
        "base": [],
        "loads": book(0),
        "total": 832,
        **parts,
    }  # fmt: skip
    return ledger.Run(**values)


def diagnosis(requests: int = 1) -> causes.Diagnosis:
    found = causes.Finding(
        "decode-not-offered",
        "limit",
        1,
        "never",
        4.0,
        0.04,
        1,
        events=[causes.Event("r0", (1 << 32) | 7, "x")] * 9,
    )
    rows = list(map(request, range(requests)))
    stages = [causes.StageRow(Stage.WIRING, 100, 100, "")]
    books = book(832, saved=800, **{"not-saved:decode-not-offered": 32})
    return causes.Diagnosis("All was saved.", [found], [], [], books, book(0), stages, rows)


def built(run: ledger.Run, what: causes.Diagnosis) -> Any:
    """Through JSON and the schema, as a user gets it."""
    return check_report(json.loads(json.dumps(assemble(run, what))), "here")


def test_a_run_becomes_a_report(tmp_path: Path) -> None:
    report = built(run_of(tmp_path), diagnosis())
    assert report["run"]["seconds"] == 5.0 and report["run"]["started"] == "2001-09-09T01:46:40+00:00"
    assert report["run"]["vllm"] == "0.32.0" and report["run"]["python"] == "3.11"
    assert report["run"]["engines"][0]["connector"]["class"] == "ExampleConnector"
    assert report["run"]["engines"][0]["kv_layers"] == 2
    assert [one["role"] for one in report["run"]["processes"]] == ["scheduler", "other"]
    assert report["coverage"]["summary"] == [
        {"hook": "save_kv_layer", "eligible": 10, "fired": 9, "with_work": 2, "share": 0.9, "idle": False}
    ]
    row = report["requests"]["rows"][0]
    assert (row["first_step"], row["last_step"], row["external"], row["client"]) == (7, 9, 0, None)
    assert report["findings"][0]["docs"] == "docs/causes/decode-not-offered.md"
    assert [event["step"] for event in report["findings"][0]["events"]] == [7, 7, 7]
    assert report["timing"][0]["share_of_steps"] is None
    assert report["limits"]["lost_records"] == 3
    assert report["limits"]["damaged"] == [{"spool": "spool/s-10.kvt", "detail": "bad record 50"}]
    assert any("disk full" in note for note in report["limits"]["notes"])


def test_a_hook_is_idle_where_no_worker_does_something_in_it(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    engine, connector = run.engines[0], run.connectors[0]
    idle, busy = (
        replace(engine.workers[0], connector=replace(connector, noop=noop))
        for noop in (("save_kv_layer",), ())
    )
    for workers, said in (((idle, idle), True), ((idle, busy), False)):
        report = built(run_of(tmp_path, engines=[replace(engine, workers=workers)]), diagnosis())
        assert [row["idle"] for row in report["coverage"]["summary"]] == [said]


def test_a_run_about_which_little_is_known(tmp_path: Path) -> None:
    engine = ledger.Engine(1, 10, "engine core", facts.EngineFact(), None)
    report = built(
        run_of(tmp_path, run=RunFile(), processes=[], engines=[engine], spools=[], targets=[]), diagnosis(0)
    )
    assert report["run"]["name"] == tmp_path.name and report["run"]["vllm"] is None
    assert report["run"]["engines"][0]["connector"] is None and report["run"]["engines"][0]["tp"] is None


def test_configured_but_not_live(tmp_path: Path) -> None:
    told = facts.EngineFact(tag=1, kv_transfer=facts.KvTransfer("Mine", "kv_both"))
    engine = ledger.Engine(1, 10, "engine core", told, None)
    connector = built(run_of(tmp_path, engines=[engine]), diagnosis())["run"]["engines"][0]["connector"]
    assert connector == {"name": "Mine", "class": "", "module": "", "file": "", "role": "kv_both"}


def test_lists_are_capped_and_say_so(tmp_path: Path) -> None:
    layers = MAX_COVERAGE_ROWS + 50
    hooks = [hook(n, 4 if n == layers - 1 else 5) for n in range(layers)]
    report = built(run_of(tmp_path, hooks=hooks), diagnosis(MAX_REQUEST_ROWS + 1))
    rows = report["coverage"]["hooks"]
    assert len(rows) == MAX_COVERAGE_ROWS
    assert rows[-1]["fired"] == 4, "incomplete rows are kept first, in their order"
    assert report["coverage"]["summary"][0]["eligible"] == 5 * layers
    assert any("coverage rows" in note for note in report["limits"]["notes"])
    assert (report["requests"]["total"], report["requests"]["shown"]) == (
        MAX_REQUEST_ROWS + 1,
        MAX_REQUEST_ROWS,
    )


@pytest.mark.parametrize(("unseen", "less"), [(0, [64]), (31, [64]), (32, [])])
def test_a_layer_that_may_have_kept_as_much_did_not_keep_less(
    tmp_path: Path, unseen: int, less: list[int]
) -> None:
    kept = [ledger.PairKept(1, 0, "layers.0", 96), ledger.PairKept(1, 0, "layers.1", 64, unseen)]
    report = built(run_of(tmp_path, kept=kept), diagnosis())
    assert [one["tokens"] for one in report.get("layers", [])] == less


def test_processes_of_two_engines_are_told_apart(tmp_path: Path) -> None:
    hooks = [hook(0, 5), hook(0, 5, pid=21, engine=2)]
    rows = built(run_of(tmp_path, hooks=hooks), diagnosis())["coverage"]["hooks"]
    assert [row["process"] for row in rows] == ["worker 0 (engine 1, pid 11)", "worker 0 (engine 2, pid 21)"]


def test_unbalanced_books_never_become_a_report(tmp_path: Path) -> None:
    what = diagnosis()
    what.saves.accounts["saved"] += 1
    with pytest.raises(AssertionError, match="ledger off by"):
        assemble(run_of(tmp_path), what)
