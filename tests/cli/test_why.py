"""``kvtrace why``, ``requests`` and ``scenario`` as a user's shell sees them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from synth import Prompt, Rounding, Sim, run_json

from kvtrace.report.build import build_report

Shell = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "a run"
    sim = Sim(folder, batched=512)
    sim.serve([Prompt(f"req-{n}", n, n, output=2) for n in (100, 200, 600)], Rounding(512).policy())
    sim.write()
    run_json(folder)
    return folder


def test_explain_leads_to_why_and_why_tells(shell: Shell, run: Path) -> None:
    code, out, err = shell("explain", str(run))
    assert (code, err) == (0, "")
    following = out.splitlines()[-1]
    assert following == f"Next  kvtrace why '{run}' --request req-200"
    code, out, err = shell("why", str(run), "--request", "req-200")
    assert (code, err) == (0, "") and "below-save-granularity" in out and "\x1b" not in out
    code, out, _ = shell("why", str(run / "run.json"), "--request", "req-6", "--format", "json")
    assert code == 0 and json.loads(out)["id"] == "req-600" and out.isascii()
    code, out, _ = shell("why", str(run), "--request", "req-6", "--layer", "0", "--token", "3")
    assert code == 0 and "Position 3 of the prompt" in out


def test_requests(shell: Shell, run: Path) -> None:
    code, out, err = shell("requests", str(run))
    assert (code, err) == (0, "") and out.startswith("3 requests\n")
    assert [line.split()[0] for line in out.splitlines()[3:]] == ["req-200", "req-100", "req-600"]
    code, out, _ = shell("requests", str(run), "--sort", "prompt", "--limit", "1", "--format", "json")
    listed = json.loads(out)
    assert code == 0 and [row["id"] for row in listed["rows"]] == ["req-600"] and listed["total"] == 3
    code, report, _ = shell("explain", str(run), "--format", "json")
    (run.parent / "lone.json").write_text(report)
    code, out, _ = shell("requests", str(run.parent / "lone.json"), "--verdict", "below-save-granularity")
    assert code == 0 and "req-200" in out and "req-600" not in out


def test_why_tells_what_a_report_alone_holds(shell: Shell, run: Path, tmp_path: Path) -> None:
    lone = tmp_path / "lone.json"
    lone.write_text(json.dumps(build_report(run)))
    code, out, err = shell("why", str(lone), "--request", "req-2")
    assert (code, err) == (0, "")
    assert "below-save-granularity" in out and "0 of 201 tokens that were left to save" in " ".join(
        out.split()
    )
    assert "Findings that name it" in out and "What to do" in out and "give the run directory" in out
    code, out, _ = shell("why", str(lone), "--request", "req-600", "--format", "json")
    told = json.loads(out)
    assert (code, told["schema"]) == (0, "kvtrace.story-of-report/1")
    assert told["request"]["id"] == "req-600" and told["request"]["verdict"] == "partly-saved"


def test_a_request_of_which_a_part_is_lost_is_not_called_saved(shell: Shell, tmp_path: Path) -> None:
    """46 % of it were not saved, and the verdict said "saved"; "100 %" had no base."""
    sim = Sim(tmp_path, batched=512)
    lengths = {"whole": (512, 1), "tail": (600, 1), "answered": (512, 300)}
    sim.serve([Prompt(name, n, n, output=out) for name, (n, out) in lengths.items()], Rounding(512).policy())
    sim.write()
    run_json(tmp_path)
    _, out, _ = shell("requests", str(tmp_path), "--format", "json")
    found = {row["id"]: row["verdict"] for row in json.loads(out)["rows"]}
    assert found == {"whole": "saved", "tail": "partly-saved", "answered": "prompt-saved"}
    _, out, _ = shell("requests", str(tmp_path), "--verdict", "partly-saved")
    assert "88 of 600" in out and "whole" not in out


def test_requests_fit_80_columns_with_ids_that_why_takes(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    sim = Sim(folder, batched=512)
    ids = [f"chatcmpl-{start}{n}{'5' * 24}" for n, start in enumerate(("11aaaa", "11aaaa", "22", "3", "4"))]
    sim.serve([Prompt(one, 300 + n, n, output=2) for n, one in enumerate(ids)], Rounding(512).policy())
    sim.write()
    run_json(folder)
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = shell("requests", str(folder))
    assert (code, err) == (0, "") and max(map(len, out.splitlines())) <= 80
    shown = [line.split()[0] for line in out.splitlines()[3:]]
    assert sorted(map(len, shown)) == [12, 12, 12, 16, 16] and len(set(shown)) == 5
    for short in shown:
        assert shell("why", str(folder), "--request", short)[0] == 0
    whole = shell("requests", str(folder), "--format", "markdown")[1]
    assert all(one in whole for one in ids)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["why", "RUN", "--request", "req-"], "fits 3 requests"),
        (["why", "RUN", "--request", "nope"], "no such request"),
        (["why", "RUN"], "--request"),
        (["why", "RUN", "--request", "req-1", "--layer", "99"], "no layer"),
        (["why", "RUN", "--request", "req-1", "--token", "-1"], "no position -1"),
        (["why", "LONE", "--request", "nope"], "no such request"),
        (["why", "LONE", "--request", "req-100", "--layer", "0"], "give the run directory"),
        (["why", "LONE", "--request", "req-100", "--token", "0"], "give the run directory"),
        (["why", "EMPTY", "--request", "req-1"], "no kvtrace report"),
        (["why", "nowhere", "--request", "req-1"], "no such file"),
        (["requests", "nowhere"], "no such file"),
        (["requests", "RUN", "--sort", "size"], "size"),
        (["requests", "RUN", "--limit", "0"], "--limit"),
        (["scenario", "run", "nope"], "no such scenario"),
        (["scenario", "list", "--dir", "nowhere"], "no scenarios in this folder"),
    ],
)
def test_errors_are_one_line_and_exit_2(
    shell: Shell, run: Path, tmp_path: Path, words: list[str], says: str
) -> None:
    lone, empty = tmp_path / "lone.json", tmp_path / "empty.json"
    report = build_report(run)
    lone.write_text(json.dumps(report))
    empty.write_text("{}")
    words = [{"RUN": str(run), "LONE": str(lone), "EMPTY": str(empty)}.get(word, word) for word in words]
    code, out, err = shell(*words)
    assert (code, out) == (2, "")
    assert err.startswith("kvtrace: ") and err.count("\n") == 1 and says in err


def test_scenarios_are_listed_with_what_they_give(shell: Shell) -> None:
    code, out, err = shell("scenario", "list")
    assert (code, err) == (0, "")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert "below-save-granularity" in lines["flagship"] and "healthy" in lines["healthy-reuse"]


def test_scenarios_run_as_a_subprocess(shell: Shell, tmp_path: Path) -> None:
    """The verb hands on names, folder and exit code; what runs is the folder's run.py."""
    (tmp_path / "one.toml").write_text('title = "one"\ncause = "x"\n')
    (tmp_path / "run.py").write_text(
        "import pathlib, sys\npathlib.Path(sys.argv[-2]).write_text(' '.join(sys.argv[1:]))\nsys.exit(1)\n"
    )
    out = tmp_path / "out"
    code, _, err = shell("scenario", "run", "one", "--dir", str(tmp_path), "--out", str(out))
    assert (code, err) == (1, "") and out.read_text() == f"one --out {out} --check"
