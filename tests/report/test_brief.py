"""The short answer of ``kvtrace explain``: 80x24 holds it for every kind of finding that was recorded."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sample import sample, with_loads

from kvtrace.ledger import model as ledger_model
from kvtrace.ledger.run_file import RunFile
from kvtrace.render.brief import ROWS, brief_text
from kvtrace.render.page import Screen
from kvtrace.render.terminal import height
from kvtrace.report import running
from kvtrace.report.model import Report
from kvtrace.report.read import check_report
from kvtrace.trace.facts import Header

ROOT = Path(__file__).resolve().parents[2]
RECORDED = sorted((ROOT / "reports" / "vllm-0.32.0-cpu").glob("*.json"))
GOLDEN = Path(__file__).parent / "golden"
SCREEN = Screen(80)
WHERE = "reports/20261120-181500-vllm"


def shown(report: Report, screen: Screen = SCREEN) -> str:
    return brief_text(report, screen, f"{WHERE}/report.json", WHERE)


def recorded(path: Path) -> Any:
    return check_report(json.loads(path.read_text(encoding="utf-8")), path.name)


@pytest.mark.parametrize("name", ["flagship", "uneven"])
def test_golden(name: str) -> None:
    text = shown(sample() if name == "flagship" else with_loads())
    path = GOLDEN / f"{name}-brief.txt"
    if os.environ.get("KVTRACE_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_every_recorded_kind_of_finding_fits_one_screen(path: Path) -> None:
    report = recorded(path)
    text = shown(report)
    lines = text.splitlines()
    assert len(lines) <= ROWS and max(map(len, lines)) <= 80, text
    assert height(text, SCREEN) == len(lines)
    # the whole verdict, and each finding of an ordinary run with its share
    words = " ".join(text.split())
    assert " ".join(report["verdict"].split()) in words
    for one in report["findings"]:
        assert f"{one['severity'].upper()} {one['id']}" in words
    if report["findings"]:
        first = report["findings"][0]
        assert " ".join(first["title"].split()) in words  # all are of one sentence
        assert not first["remedy"] or "Remedy" in text
    assert lines[-1].startswith("Next  kvtrace ") and "ruled out" in lines[-2]


def test_only_a_process_of_vllm_without_a_trace_is_called_so() -> None:
    report = recorded(ROOT / "reports" / "vllm-0.32.0-cpu" / "flagship.json")
    text = " ".join(shown(report).split())
    assert "traced: front, engine core, worker 0, worker 1" in text and "not traced" not in text
    worker = next(one for one in report["run"]["processes"] if one["name"] == "worker 1")
    worker["agent"] = False
    text = " ".join(shown(report).split())
    assert f"not traced: worker 1 (pid {worker['pid']})" in text


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_head_says_how_attention_is_reached(path: Path) -> None:
    report = recorded(path)
    text = " ".join(shown(report).split())
    for engine in report["run"]["engines"]:
        assert re.search(r"TP \d PP 1 DP 1", text)
        if engine["real_steps"]:
            assert "CPU_ATTN · runner V1 · graphs asked default, used NONE · no direct call" in text


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_no_remedy_is_cut_within_a_sentence(path: Path) -> None:
    report = recorded(path)
    for one in report["findings"][:1]:
        text = " ".join(shown(report).split())
        if not one["remedy"]:
            continue
        said = re.search(
            r"Remedy (.*?)(?: \(more: -v\))?(?= (?:FAULT|LIMIT|NOTE) | \d+ causes? ruled out)", text
        )
        assert said is not None
        whole = " ".join(one["remedy"][0].split())
        assert whole.startswith(said[1]) and (whole == said[1] or said[1].endswith("."))


def test_what_was_seen_of_the_first_fault_stands_there_where_it_fits_whole() -> None:
    report = recorded(ROOT / "reports" / "vllm-0.32.0-cpu" / "hook-raised.json")
    text = " ".join(shown(report).split())
    seen = " ".join(report["findings"][0]["evidence"][0].split())
    assert f"Seen {seen} Remedy" in text and "Disk quota exceeded" in seen
    report["findings"][0]["evidence"][0] = "long " * 60
    assert "Seen" not in shown(report)
    healthy = recorded(ROOT / "reports" / "vllm-0.32.0-cpu" / "healthy-unit.json")
    assert "Seen" not in shown(healthy)


def many(number: int) -> Report:
    report: Any = sample()
    one = report["findings"][0]
    report["findings"] = [
        {**one, "id": f"{one['id']}-{n}", "title": f"{n}: {one['title']}"} for n in range(number)
    ]
    book = report["ledger"]["saves"]
    saved = book["accounts"].pop("saved")
    for n in range(9):
        book["accounts"][f"not-saved:cause-{n}"] = saved // 16
    book["accounts"]["saved"] = saved - 9 * (saved // 16)
    return check_report(report, "here")


@pytest.mark.parametrize("width", [72, 80, 100, 200])
def test_many_findings_and_outcomes_are_named_and_fit_as_well(width: int) -> None:
    text = shown(many(12), Screen(width))
    assert height(text, Screen(width)) <= ROWS
    assert "FAULT  below-save-granularity-0" in text
    assert re.search(r"^(9|1\d) more findings \(\d+ faults\), 5 causes ruled out", text, re.M)
    assert re.search(r"\d+ more outcomes \(-v\)", text)


def test_a_wide_screen_shows_more_than_a_narrow_one() -> None:
    report = recorded(ROOT / "reports" / "vllm-0.32.0-cpu" / "ranks-share-store.json")
    assert shown(report, Screen(140)).count("Remedy") > shown(report).count("Remedy") == 1


def test_colours_change_no_word() -> None:
    coloured = brief_text(with_loads(), Screen(80, "truecolor"), f"{WHERE}/report.json", WHERE)
    assert "\x1b[" in coloured and re.sub(r"\x1b\[[\d;]*m", "", coloured) == shown(with_loads())


def test_a_report_of_before_has_no_such_facts_and_is_shown() -> None:
    report: Any = sample()
    for name in ("dp", "attention", "runner", "graphs_asked", "graphs_used", "direct_calls"):
        del report["run"]["engines"][0][name]
    text = shown(check_report(report, "here"))
    assert "runner" not in text and "graphs" not in text and "direct call" not in text


def test_attention_that_is_called_directly_stands_in_the_head() -> None:
    report: Any = sample()
    engine = report["run"]["engines"][0]
    engine.update(
        direct_calls=engine["pairs"], attention=["FLASH_ATTN", "TRITON_MLA"], graphs_used="PIECEWISE"
    )
    text = " ".join(shown(report).split())
    assert "FLASH_ATTN, TRITON_MLA · runner V1 · graphs asked default, used PIECEWISE · direct call" in text
    engine["direct_calls"] = 1
    assert "direct call in 1 of 8 layers" in " ".join(shown(report).split())


def test_a_run_that_still_goes_on_says_so() -> None:
    report: Any = sample()
    assert "still running" not in shown(report)
    report["run"]["running"] = True
    assert "still running · 34 requests" in shown(check_report(report, "here"))


def process(pid: int, host: str, wall_ns: int, end: str = "open") -> ledger_model.Process:
    header = Header(pid=pid, host=host, wall_ns=wall_ns)
    return ledger_model.Process(pid, 1, "worker 0", "worker", 0, "worker.kvt", 1, end, True, header)


def test_only_a_recording_process_that_is_there_makes_a_run_go_on() -> None:
    here, now = socket.gethostname(), time.time_ns()
    mine = process(os.getpid(), here, now)
    none = {
        "on another host": replace(mine, header=replace(mine.header, host="elsewhere")),
        "another one has its number now": replace(mine, header=replace(mine.header, wall_ns=10**18)),
        "gone": process(2**22 + 1, here, now),
    }
    assert running._any_alive([mine])
    for why, one in none.items():
        assert not running._any_alive([one]), why


def test_a_run_that_ended_is_not_running() -> None:
    class Run:
        run = RunFile(ended_wall_ns=1)
        processes = (process(os.getpid(), socket.gethostname(), time.time_ns()),)

    assert not running.still_running(Run())  # type: ignore[arg-type]
    Run.run = RunFile()
    assert running.still_running(Run())  # type: ignore[arg-type]
    Run.processes = (process(os.getpid(), socket.gethostname(), time.time_ns(), "trailer"),)
    assert not running.still_running(Run())  # type: ignore[arg-type]
