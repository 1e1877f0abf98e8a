"""The short answer of ``kvtrace explain``: 80x24 holds it for every kind of finding that was recorded."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from first_screen import WHERE, judged, shown
from sample import sample, with_loads

from kvtrace.ledger import run as ledger_model
from kvtrace.render import answers
from kvtrace.render.brief import ROWS, brief_text
from kvtrace.render.page import Screen
from kvtrace.render.terminal import height
from kvtrace.report import running
from kvtrace.report.load import check_report
from kvtrace.report.model import Report
from kvtrace.trace.facts import Header
from kvtrace.trace.run_file import RunFile
from kvtrace.words import count

ROOT = Path(__file__).resolve().parents[2]
RECORDED = sorted((ROOT / "reports" / "vllm-0.32.0-cpu").glob("*.json"))
GOLDEN = Path(__file__).parent / "golden"


def recorded(path: Path) -> Any:
    return check_report(json.loads(path.read_text(encoding="utf-8")), path.name)


@pytest.mark.parametrize("name", ["flagship", "uneven"])
def test_golden(name: str) -> None:
    text = judged(sample() if name == "flagship" else with_loads())
    path = GOLDEN / f"{name}-brief.txt"
    if os.environ.get("KVTRACE_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_every_recorded_kind_of_finding_has_a_first_screen(path: Path) -> None:
    judged(recorded(path))


def fraction(report: Any) -> None:
    report["verdict"] = "748.4 of 2 962 prompt tokens computed here were stored."


def glossary(report: Any) -> None:
    report["findings"][0]["remedy"] = ["Look at the ledger of token-layers."]


def two_totals(report: Any) -> None:
    report["ledger"]["saves"]["prompts"]["saved"]["read"] += 1


def no_place(report: Any) -> None:
    report["places"] = [{"kind": "directory", "name": "", "files": 0, "size": 0}]


def no_reason(report: Any) -> None:
    report["verdict"] = report["verdict"].partition(":")[0] + "."
    report["findings"][0].update(headline="", title="")


def too_long(report: Any) -> None:
    report["verdict"] += " and more words" * 160


@pytest.mark.parametrize("how", [fraction, glossary, two_totals, no_place, no_reason, too_long])
def test_what_a_first_screen_may_not_be_is_seen(how: Callable[[Any], None]) -> None:
    report: Any = sample()
    how(report)
    with pytest.raises(AssertionError):
        judged(report)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_each_finding_that_is_shown_says_how_much(path: Path) -> None:
    report = recorded(path)
    words = " ".join(shown(report).split())
    for one in report["findings"]:
        if round(one["tokens"]) and f" {one['id']}, " in words:
            here = report["ledger"]["saves"].get("prompts", {}).get(f"not-saved:{one['id']}", {})
            tokens = sum(here.values()) or round(one["tokens"])
            assert re.search(rf"{one['id']}, (in \w+, )?{count(tokens)} tokens?\b", words)


def test_only_a_process_of_vllm_without_a_trace_is_called_so() -> None:
    report = recorded(ROOT / "reports" / "vllm-0.32.0-cpu" / "flagship.json")
    text = " ".join(shown(report).split())
    assert "4 of 4 vLLM processes traced" in text and "not traced" not in text
    worker = next(one for one in report["run"]["processes"] if one["name"] == "worker 1")
    worker["agent"] = False
    text = " ".join(shown(report).split())
    assert f"not traced: worker 1 (pid {worker['pid']})" in text and "3 of 4 vLLM" in text


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_the_forums_questions_are_answered(path: Path) -> None:
    """Was attention called and how, did save_kv_layer fire and do something, prefix cache, CUDA graphs."""
    report = recorded(path)
    text = " ".join(shown(report).split())
    for engine in report["run"]["engines"]:
        if engine["real_steps"]:
            cache = "on" if engine["prefix_caching"] else "off"
            assert f"CPU_ATTN · no direct call · prefix cache {cache} · eager: no CUDA graphs" in text
            assert "unified_attention_with_output ran in Python" in text
            if engine["connector"] and engine["connector"]["class"]:
                assert re.search(r"(save_kv_layer|wait_for_save) was called \d+ of \d+ times", text)


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_no_remedy_is_cut_within_a_sentence(path: Path) -> None:
    report = recorded(path)
    for one in report["findings"][:1]:
        text = " ".join(shown(report).split())
        if not one["remedy"]:
            continue
        said = re.search(
            r"Remedy (.*?)(?= Requests | Logged | (?:FAULT|CHOICE|NOTE) | \d+ causes? ruled out"
            r"| \d+ more finding)",
            text,
        )
        assert said is not None
        whole = " ".join(one["remedy"][0].split())
        assert whole.startswith(said[1]) and (whole == said[1] or said[1].endswith("."))


def test_a_quoted_sentence_is_not_cut_in_the_middle() -> None:
    report: Any = recorded(ROOT / "reports" / "vllm-0.32.0-cpu" / "hook-raised.json")
    report["findings"][0]["remedy"] = ['See why it logged "No memory. It is not stored." ' + "(long) " * 40]
    assert '"No memory. It is not stored."' in " ".join(shown(report).split())


def test_what_the_connector_logged_is_said_once() -> None:
    report: Any = recorded(ROOT / "reports" / "vllm-0.32.0-cpu" / "hook-raised.json")
    line = {
        "where": "wait_for_save",
        "level": "WARNING",
        "logger": "pool",
        "message": "it is full",
        "count": 8,
    }
    report["logged"] = [line]
    assert 'Logged wait_for_save: "it is full" (warning, 8 times)' in " ".join(shown(report).split())
    report["findings"][0]["remedy"] = ['See why wait_for_save logged "it is full"']
    assert "Logged" not in shown(report)
    report["findings"] = []
    assert "Logged" not in shown(report)


def test_evidence_of_the_first_finding_stands_where_it_fits() -> None:
    report = recorded(ROOT / "reports" / "vllm-0.32.0-cpu" / "hook-raised.json")
    text = " ".join(shown(report, Screen(120)).split())
    seen = " ".join(report["findings"][0]["evidence"][0].split())
    assert f"Seen {seen} Remedy" in text and "Disk quota exceeded" in seen
    report["findings"][0]["evidence"][0] = "long " * 60
    assert "Seen" not in shown(report)


@pytest.mark.parametrize(("told", "severity", "title", "line"), [
    (True, "fault", "It is so.", "FAULT hook-raised, 128 tokens: preempted Seen"),
    (False, "fault", "It is so.", "of 1): preempted"),
    (False, "limit", "It is so. Is that meant?", "of 1): preempted"),
    (False, "limit", "It is so.", "of 1) "),
])  # fmt: skip
def test_what_the_requests_have_in_common_is_said_of_a_fault(
    told: bool, severity: str, title: str, line: str
) -> None:
    report: Any = recorded(ROOT / "reports" / "vllm-0.32.0-cpu" / "hook-raised.json")
    one = report["findings"][0]
    one |= {"pattern": "preempted", "severity": severity, "title": title}
    one["headline"] = one["headline"] if told else "nothing of that"
    text = " ".join(shown(report, Screen(120)).split())
    assert line in text and ("preempted" in text) is ("preempted" in line), text


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
        book["prompts"][f"not-saved:cause-{n}"] = {"read": 256}
    book["accounts"]["saved"] = saved - 9 * (saved // 16)
    book["prompts"]["saved"]["read"] -= 9 * 256
    return check_report(report, "here")


@pytest.mark.parametrize("width", [72, 80, 100, 200])
def test_many_findings_and_outcomes_are_named_and_fit_as_well(width: int) -> None:
    text = shown(many(12), Screen(width))
    assert height(text, Screen(width)) <= ROWS
    assert "FAULT  below-save-granularity-0" in text
    assert re.search(r"^(9|1\d) more findings \(\d+ faults\), 5 causes", text, re.M)
    assert re.search(r"\d+ more \(-v\)", text)


def test_a_wide_screen_shows_more_than_a_narrow_one() -> None:
    report = recorded(ROOT / "reports" / "vllm-0.32.0-cpu" / "ranks-share-store.json")
    assert len(shown(report, Screen(140)).split()) > len(shown(report).split())


def test_colours_change_no_word() -> None:
    coloured = brief_text(with_loads(), Screen(80, "truecolor"), f"{WHERE}/report.json", WHERE)
    assert "\x1b[" in coloured and re.sub(r"\x1b\[[\d;]*m", "", coloured) == shown(with_loads())


def test_attention_that_is_called_directly_stands_in_the_head() -> None:
    report: Any = sample()
    engine = report["run"]["engines"][0]
    engine.update(
        direct_calls=engine["pairs"], attention=["FLASH_ATTN", "TRITON_MLA"], graphs_used="PIECEWISE",
        platform="cuda", enforce_eager=False,
    )  # fmt: skip
    text = " ".join(shown(report).split())
    assert "FLASH_ATTN, TRITON_MLA · direct call · prefix cache off · CUDA graphs PIECEWISE" in text
    engine.update(direct_calls=1, graphs_asked="FULL")
    text = " ".join(shown(report).split())
    assert "direct call in 1 of 8 layers" in text and "CUDA graphs PIECEWISE (FULL was asked for)" in text
    engine.update(enforce_eager=True)
    assert "eager: no CUDA graphs" in " ".join(shown(report).split())


@pytest.mark.parametrize(
    ("places", "saved", "said"),
    [
        ([("directory", "/mnt/kv", 16, 4404019)], True, "Stored in /mnt/kv (16 files, 4.2 MiB)."),
        ([("peer", "tcp 10.0.0.2:6379", 0, 1024)], True, "Stored in 10.0.0.2:6379 (1.0 KiB sent)."),
        ([("directory", "/dev/shm", 0, 0)], True, "Stored in /dev/shm (no file of it is there any more)."),
        ([("database", "/srv/kv.db", 0, 0)], True, "Stored in /srv/kv.db (database)."),
        ([("database", "/srv/kv.db", 0, 4404019)], True, "Stored in /srv/kv.db (database, 4.2 MiB)."),
        ([], True, "Where to was not seen: no file, no database, no socket."),
        (
            [("configured", "/mnt/kv", 0, 0)],
            True,
            "Where to was not seen: no file, no database, no socket. Configured is /mnt/kv: no write to it "
            "was seen.",
        ),
        (
            [("directory", "/mnt/kv", 2, 64, 3)],
            True,
            "Stored in /mnt/kv (2 files, 64 B; 3 more from before this run).",
        ),
        ([("directory", "/mnt/kv", 2, 0)], False, "Nothing was stored. Written to /mnt/kv (2 files, 0 B)."),
        ([("database", "/mnt/kv", 0, 64)], False, "Nothing was stored. Opened /mnt/kv (database, 64 B)."),
        ([("configured", "/mnt/kv", 0, 0)], False, "Nothing was stored. Configured is /mnt/kv."),
        ([], False, "Nothing was stored."),
    ],
)
def test_where_things_were_stored(places: Any, saved: bool, said: str) -> None:
    report: Any = sample()
    report["places"] = [
        dict(zip(("kind", "name", "files", "size", "older"), one, strict=False)) for one in places
    ]
    if not saved:
        report["ledger"]["saves"]["accounts"]["saved"] = report["ledger"]["saves"]["tokens"]["saved"] = 0
    assert answers.where(report) == said


def test_files_with_what_some_ranks_stored_are_no_nothing() -> None:
    report: Any = sample()
    report["ledger"]["saves"]["tokens"]["saved"] = 0
    report["places"] = [{"kind": "directory", "name": "/mnt/kv", "files": 27, "size": 4096}]
    assert answers.where(report) == ("No token was stored whole. Written to /mnt/kv (27 files, 4.0 KiB).")


@pytest.mark.parametrize(("mute", "saved"), [(True, True), (False, True), (False, False)])
def test_never_with_kv_is_said_only_where_metadata_says_all(mute: bool, saved: bool) -> None:
    report: Any = sample()
    for row in report["coverage"]["hooks"]:
        row["with_work"] = 0
    if not saved:
        del report["ledger"]["saves"]["accounts"]["saved"]
    report["not_observed"] = [{"id": "connector-metadata", "why": "not understood"}] if mute else []
    unknown = mute or saved
    assert ("with how much KV is not known" in answers.saving(report)) == unknown
    assert ("never with KV to save" in answers.saving(report)) != unknown


@pytest.mark.parametrize("idle", [(), ("save_kv_layer",), ("save_kv_layer", "wait_for_save")])
def test_an_idle_hook_is_not_said_to_have_kv_to_save(idle: tuple[str, ...]) -> None:
    report: Any = sample()
    for row in report["coverage"]["summary"]:
        row["idle"] = row["hook"] in idle
    assert answers.saving(report).count("times, and does nothing") == len(idle)
    # where the layers' hook does nothing, the step's is told of
    assert ("wait_for_save was called" in answers.saving(report)) == bool(idle)
    assert "save_kv_layer was called" in answers.saving(report)


@pytest.mark.parametrize("grade", ["proved", "written"])
def test_without_a_finding_verify_is_named_where_none_came_back(grade: str) -> None:
    report: Any = sample()
    report["findings"] = []
    report["ledger"]["saves"]["prompts"]["saved"] = {grade: 4096}
    words = " ".join(shown(report).split())
    assert ("kvtrace verify tells whether it comes back" in words) == (grade != "proved")


def test_a_layer_in_which_less_was_saved_is_named() -> None:
    report: Any = sample()
    rows = [
        {"engine": 1, "rank": rank, "layer": "model.layers.3.self_attn.attn", "tokens": 0, "most": 4096}
        for rank in (0, 1)
    ]
    report["layers"] = rows
    assert answers.uneven(report) == ("0 prompt tokens saved in layer 3, model.layers.3; elsewhere 4 096.")
    report["layers"] = [
        {"engine": 1, "rank": 1, "layer": f"model.layers.{n}.self_attn.attn", "tokens": 0, "most": 4096}
        for n in range(4)
    ]
    assert answers.uneven(report) == "0 prompt tokens saved in rank 1; elsewhere 4 096."
    assert "saved in rank 1; elsewhere" in judged(check_report(report, "here"))
    rows += [row | {"layer": "model.layers.0.self_attn.attn"} for row in rows]
    between = rows[0] | {"layer": "model.layers.1.self_attn.attn", "tokens": 64}
    report["layers"] = [*rows, between]
    assert answers.uneven(report) == "0 prompt tokens saved in layers 0, 3; elsewhere up to 4 096."


def test_a_run_that_still_goes_on_says_so() -> None:
    report: Any = sample()
    assert "still running" not in shown(report)
    report["run"]["running"] = True
    assert "still running · 34 requests" in shown(check_report(report, "here"))


def process(pid: int, host: str, wall_ns: int, end: str = "open") -> ledger_model.Process:
    header = Header(pid=pid, host=host, wall_ns=wall_ns)
    return ledger_model.Process(pid, "worker 0", "worker", 0, "worker.kvt", 1, end, header)


def test_only_a_living_recording_process_makes_a_run_go_on() -> None:
    here, now = socket.gethostname(), time.time_ns()
    mine = process(os.getpid(), here, now)
    none = {
        "on another host": replace(mine, header=replace(mine.header, host="elsewhere")),
        "another one has its number now": replace(mine, header=replace(mine.header, wall_ns=10**18)),
        "gone": process(2**22 + 1, here, now),
    }
    assert running.any_alive([mine.header])
    for why, one in none.items():
        assert not running.any_alive([one.header]), why


def test_a_run_that_ended_is_not_running() -> None:
    class Run:
        run = RunFile(ended_wall_ns=1)
        processes = (process(os.getpid(), socket.gethostname(), time.time_ns()),)

    assert not running.still_running(Run())  # type: ignore[arg-type]
    Run.run = RunFile()
    assert running.still_running(Run())  # type: ignore[arg-type]
    Run.processes = (process(os.getpid(), socket.gethostname(), time.time_ns(), "trailer"),)
    assert not running.still_running(Run())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("grades", "words"),
    [
        ({"proved": 400}, "30 generated tokens: stored."),
        ({"proved": 280, "read": 120}, "30 generated tokens: read by the connector, no more seen."),
        ({"read": 400}, "30 generated tokens: read by the connector, no more seen."),
    ],
)
def test_generated_tokens_are_called_stored_where_that_was_seen(grades: dict[str, int], words: str) -> None:
    """Of 100 saved ones in 4 layers 70 are of prompts."""
    prompts = {"proved": 70} if "proved" in grades else {"read": 70}
    saves = {"accounts": {"saved": 400}, "tokens": {"saved": 100.0}, "grades": {"saved": grades}}
    loads = {"accounts": {}, "tokens": {}, "pairs": 4}
    report: Any = {"ledger": {"saves": {**saves, "pairs": 4, "prompts": {"saved": prompts}}, "loads": loads}}
    assert answers.generated(report) == words


@pytest.mark.parametrize(
    ("grades", "said"),
    [
        ({"proved": 128}, "(50.0 %); 64 not found."),
        ({"read": 128}, "(50.0 %), not compared with what was computed; 64 not found."),
        (
            {"proved": 32, "read": 64, "declared": 32},
            "(50.0 %), 16 of them by the connector's report alone, 32 of them not compared with what was "
            "computed; 64 not found.",
        ),
        ({"proved": 128, "read": 40}, "(50.0 %); 64 not found."),  # layers of tokens that came in part
    ],
)
def test_loads_that_were_compared_with_nothing_are_said_to_be(grades: dict[str, int], said: str) -> None:
    report: Any = with_loads()
    report["ledger"]["loads"] |= {
        "total": 256, "total_tokens": 128.0, "pairs": 2,
        "accounts": {"loaded": 128, "missed:lookup-miss": 128},
        "tokens": {"loaded": 64.0, "missed:lookup-miss": 64.0}, "grades": {"loaded": grades},
    }  # fmt: skip
    assert answers.loaded(report) == f"Loaded: 64 of 128 prompt tokens {said}"
